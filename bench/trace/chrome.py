"""A trace as a file that Perfetto opens: Chrome's Trace Event format, as gzip.

Owns the format (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Each process is a process, each
lane of a track a thread. A flow leads each request from slice to slice: its events bind to the slices that enclose them.
"""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.trace.record import Process, Status
from bench.trace.slices import Slice, ways

ROLES = ("router", "detokenizer", "prefill", "decode")
TRACKS = ("requests", "attempts", "turns", "steps", "chunks", "pushes", "handoffs", "starts", "answers")
"""In the order in which a viewer shows them."""
LANES = 2**20
"""Threads that are set aside for each track of a process."""
LEVEL = 6


def write(path: str, status: Status, slices: Sequence[Slice]) -> int:
    """Returns the size of the file. Raises OSError."""
    encode = msgspec.json.Encoder().encode
    with gzip.open(path, "wb", compresslevel=LEVEL) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + encode({"began_unix_s": status.began_s}) + b',"traceEvents":[\n')
        between = b""
        for event in events(status.processes, slices):
            file.write(between + encode(event))
            between = b",\n"
        file.write(b"\n]}\n")
    return Path(path).stat().st_size


def events(processes: Sequence[Process], slices: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    """All of them. Flows come last: a slice is there before what binds to it."""
    places = sorted(range(len(processes)), key=lambda place: (ROLES.index(processes[place].role), place))
    for order, place in enumerate(places):
        yield _meta(place, 0, "process_name", name=processes[place].id)
        yield _meta(place, 0, "process_labels", labels=_labels(processes[place]))
        yield _meta(place, 0, "process_sort_index", sort_index=order)
    for process, track, lane in sorted({(each.process, each.track, each.lane) for each in slices}):
        thread = _thread(track, lane)
        yield _meta(process, thread, "thread_name", name=track if lane == 0 else f"{track} {lane + 1}")
        yield _meta(process, thread, "thread_sort_index", sort_index=thread)
    for each in slices:
        args = {**each.args, "request": each.request} if each.request else each.args
        yield {
            "ph": "X", "pid": each.process + 1, "tid": _thread(each.track, each.lane), "cat": each.track, "name": each.name,
            "ts": each.begin_us, "dur": each.end_us - each.begin_us, "args": args,
        }  # fmt: skip
    for number, way in enumerate(ways(slices)):
        yield from _flow(number, way)


def _flow(number: int, way: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    phases = ["s", *("t" for _ in way[2:]), "f"]
    for phase, each in zip(phases, way, strict=True):
        yield {
            "ph": phase, "bp": "e", "id": number, "cat": "request", "name": "request", "pid": each.process + 1,
            "tid": _thread(each.track, each.lane), "ts": each.begin_us,
        }  # fmt: skip


def _meta(process: int, thread: int, what: str, **args: object) -> dict[str, Any]:
    return {"ph": "M", "pid": process + 1, "tid": thread, "name": what, "args": args}


def _thread(track: str, lane: int) -> int:
    place = TRACKS.index(track) if track in TRACKS else len(TRACKS)
    return 1 + place * LANES + lane


def _labels(process: Process) -> str:
    parts: Iterable[str] = (process.role, process.host, f"pid {process.pid}" if process.pid else "", process.device)
    return ", ".join(part for part in parts if part)
