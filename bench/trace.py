"""`launch bench trace`: has a fleet record what its processes do, and writes it as a file that Perfetto shows.

Owns the words of /cluster/trace, the lanes of the spans, and the file, in Chrome's Trace Event format as gzip
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Each process is a process there, each lane of a
track a thread. A flow leads each request from slice to slice: its events bind to the slices that enclose them. `bench/serve.py`
sends the load.

    spans of a track   ├──── a ────┤     ├── c ──┤           lane 0: a, c
                              ├──── b ────┤                  lane 1: b
"""

import contextlib
import gzip
import heapq
import http.client
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from bench.client import tls_context
from bench.options import LoadOptions, ServeOptions, TraceOptions, WorkloadOptions
from bench.report import ReportStyle, machine_line, say, this_hardware
from bench.serve import ServerRefuses, measure, served
from common.errors import TandemError, needs_file
from common.processes.local_fleet import FleetFailed
from common.tracing import TracedProcess, TraceLine, TraceStatus

HEAD = ("process", "busy with steps", "steps", "chunks", "chunk tokens", "pushes", "MB pushed", "spans", "dropped")
PATH = "/cluster/trace"
LOOK_S = 1.0
ANSWER_S = 60.0
LOAD_ENDS_S = 600.0
ROLES = ("router", "detokenizer", "prefill", "decode")
TRACKS = ("requests", "attempts", "turns", "steps", "chunks", "pushes", "handoffs", "starts", "answers")
"""In the order in which a viewer shows them."""
LANES = 2**20
"""Threads that are set aside for each track of a process."""
GZIP_LEVEL = 6
T = TypeVar("T")


class TraceFailed(TandemError):
    """The router does not record, or says nothing of it."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A span as a viewer draws it: [begin_us, end_us), never empty, counted from the beginning of the trace, which may be later
    than its own."""

    span: TraceLine
    lane: int
    """The lane of its track on which it overlaps no other."""
    begin_us: int
    end_us: int

    @property
    def thread(self) -> int:
        place = TRACKS.index(self.span.track) if self.span.track in TRACKS else len(TRACKS)
        return 1 + place * LANES + self.lane


def run(bench: TraceOptions, workload: WorkloadOptions, load: LoadOptions, command: str, markdown: bool, control_key: str) -> int:
    """Record, write the file and print the table. Returns the exit status: 1 if there is no trace. Raises ConfigError."""
    hardware = this_hardware()
    try:
        with served(bench.url, *bench.fleet_flags) as url:
            status, slices = _record(bench, None if bench.url else bench.load_on(url, workload, load), url, control_key)
    except (FleetFailed, TraceFailed, ServerRefuses) as error:
        say(f"there is no trace: {error}")
        return 1
    with needs_file(f"--out {bench.out} cannot be written"):
        size_bytes = write(bench.out, status, slices)
    machine = machine_line(hardware, f"{status.seconds:g} s, {len(slices):,} spans, {size_bytes / 1e6:.2f} MB")
    style = ReportStyle(markdown)
    print(style.text(command, [machine, style.table(table(status, slices))]))
    if status.spans_refused:
        say(f"the router had no room for {status.spans_refused:,} spans: record for a shorter time")
    say(f"wrote {bench.out}: open it at https://ui.perfetto.dev")
    return 0


def table(status: TraceStatus, slices: Sequence[Slice]) -> list[tuple[str, ...]]:
    """What each process did, in the order of `ROLES`."""
    tracks: defaultdict[tuple[int, str], list[Slice]] = defaultdict(list)
    for each in slices:
        tracks[each.span.process, each.span.track].append(each)
    lines: list[tuple[str, ...]] = [HEAD]
    for place in _in_order(status.processes):
        process = status.processes[place]
        steps, chunks, pushes = (tracks[place, track] for track in ("steps", "chunks", "pushes"))
        work: tuple[str, ...] = ("",) * 6
        if process.role in ("prefill", "decode"):
            busy_us = sum(each.end_us - each.begin_us for each in steps)
            pushed_mb = sum(int(each.span.args.get("bytes", 0)) for each in pushes) / 1e6
            work = (
                f"{busy_us / (status.seconds * 1e6):.1%}",
                f"{len(steps):,}",
                f"{len(chunks):,}",
                f"{sum(int(each.span.args['tokens']) for each in chunks):,}",
                *((f"{len(pushes):,}", f"{pushed_mb:,.2f}") if process.role == "prefill" else ("", "")),
            )
        lines.append((process.id, *work, f"{process.spans:,}", f"{process.dropped:,}"))
    return lines


def _in_order(processes: Sequence[TracedProcess]) -> list[int]:
    """The places of the processes, in the order of their roles."""
    return sorted(range(len(processes)), key=lambda place: (ROLES.index(processes[place].role), place))


# ---- the recording ----


def _record(bench: TraceOptions, load: ServeOptions | None, url: str, control_key: str) -> tuple[TraceStatus, list[Slice]]:
    """load: what is sent meanwhile. Raises TraceFailed, ServerRefuses."""
    made = TraceRecording(url, control_key, verify=bench.insecure == "off")
    with ThreadPool(1) as sender, contextlib.closing(made) as recording:
        say(f"recording {url} for {bench.seconds:g} s")
        recording.begin(bench.seconds)
        try:
            sending = None if load is None else sender.apply_async(_send, (load,))
            status, spans = recording.spans()
            slices = slices_of(spans, status.began_s)
        finally:
            recording.forget()
        if sending is not None:
            sending.wait(LOAD_ENDS_S)
            if sending.ready():
                sending.get()
    return status, slices


def _send(load: ServeOptions) -> None:
    """Send the load, and say what became of it. Raises ServerRefuses."""
    figures = measure(load).figures
    say(f"{figures['completed']:,} requests were answered, {figures['failed']:,} failed")


class TraceRecording:
    """One connection to a router, which has its fleet record. Several routers may share a port, so everything goes over one
    connection. Raises TraceFailed wherever it fails."""

    def __init__(self, url: str, control_key: str = "", *, verify: bool = True) -> None:
        parts = urlsplit(url)
        self._headers: Mapping[str, str] = {"Authorization": f"Bearer {control_key}"} if control_key else {}
        self._path = parts.path.rstrip("/") + PATH
        self._connection = http.client.HTTPConnection(parts.netloc, timeout=ANSWER_S)
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(parts.netloc, timeout=ANSWER_S, context=tls_context(verify))

    def begin(self, seconds: float) -> None:
        self._request("POST", f"?seconds={seconds:g}").read()

    def spans(self) -> tuple[TraceStatus, Iterator[TraceLine]]:
        """Wait until the time is over. Returns how the trace ended, and its spans, which are read as they are taken."""
        while True:
            answer = self._request("GET")
            status = _decoded(answer.readline(), TraceStatus)
            if status.state == "over":
                return status, (_decoded(line, TraceLine) for line in answer)
            answer.read()
            time.sleep(LOOK_S)

    def forget(self) -> None:
        self._request("DELETE").read()

    def close(self) -> None:
        self._connection.close()

    def _request(self, method: str, query: str = "") -> http.client.HTTPResponse:
        try:
            self._connection.request(method, self._path + query, headers=self._headers)
            answer = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise TraceFailed(f"the router does not answer: {error!r}") from error
        if answer.status >= http.HTTPStatus.MULTIPLE_CHOICES:
            raise TraceFailed(f"{method} {self._path}: HTTP {answer.status}: {answer.read().decode(errors='replace')}")
        return answer


def _decoded(line: bytes, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=shape)
    except msgspec.DecodeError as error:
        raise TraceFailed(f"the router's trace cannot be read: {error}") from error


# ---- slices ----


def slices_of(spans: Iterable[TraceLine], began_s: float) -> list[Slice]:
    """began_s: UNIX time of moment 0."""
    tracks: defaultdict[tuple[int, str], list[TraceLine]] = defaultdict(list)
    for span in spans:
        tracks[span.process, span.track].append(span)
    slices: list[Slice] = []
    for track in tracks.values():
        intervals = _intervals(track, began_s)
        for span, lane, (begin_us, end_us) in zip(track, lanes(intervals), intervals, strict=True):
            slices.append(Slice(span, lane, begin_us, end_us))
    return slices


def lanes(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """For each interval [begin, end), the number of a lane where it overlaps no other: the lowest that is free when it begins."""
    chosen = [0] * len(intervals)
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    used = 0
    for at in sorted(range(len(intervals)), key=lambda at: intervals[at]):
        begin, end = intervals[at]
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            chosen[at] = heapq.heappop(free)
        else:
            chosen[at], used = used, used + 1
        heapq.heappush(busy, (end, chosen[at]))
    return chosen


def paths_of_requests(slices: Iterable[Slice]) -> Iterator[list[Slice]]:
    """The slices of each request that has several, in the order of their begins."""
    requests: defaultdict[str, list[Slice]] = defaultdict(list)
    for each in slices:
        if each.span.request:
            requests[each.span.request].append(each)
    for path in requests.values():
        if len(path) > 1:
            yield sorted(path, key=lambda each: each.begin_us)


def _intervals(spans: Sequence[TraceLine], began_s: float) -> list[tuple[int, int]]:
    """An empty one, as of a step that came back in one turn with the step before, takes its microsecond from what ends there."""
    exact = [(round((span.begin_s - began_s) * 1e6), round((span.end_s - began_s) * 1e6)) for span in spans]
    empty = {begin for begin, end in exact if begin >= end}
    return [
        (begin - 1, begin) if begin >= end else (begin, end - 1) if end in empty and end - begin > 1 else (begin, end)
        for begin, end in exact
    ]


# ---- the file ----


def write(path: str, status: TraceStatus, slices: Sequence[Slice]) -> int:
    """Returns the size of the file. Raises OSError."""
    encode = msgspec.json.Encoder().encode
    with gzip.open(path, "wb", compresslevel=GZIP_LEVEL) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + encode({"began_unix_s": status.began_s}) + b',"traceEvents":[\n')
        between = b""
        for event in events(status.processes, slices):
            file.write(between + encode(event))
            between = b",\n"
        file.write(b"\n]}\n")
    return Path(path).stat().st_size


def events(processes: Sequence[TracedProcess], slices: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    """All events of the file. Flows come last: a slice is there before what binds to it."""
    for order, place in enumerate(_in_order(processes)):
        process = processes[place]
        labels = (process.role, process.host, f"pid {process.pid}" if process.pid else "", process.device)
        yield _meta(place, 0, "process_name", name=process.id)
        yield _meta(place, 0, "process_labels", labels=", ".join(label for label in labels if label))
        yield _meta(place, 0, "process_sort_index", sort_index=order)
    threads = {(each.span.process, each.span.track, each.lane): each.thread for each in slices}
    for (place, track, lane), thread in sorted(threads.items()):
        yield _meta(place, thread, "thread_name", name=track if lane == 0 else f"{track} {lane + 1}")
        yield _meta(place, thread, "thread_sort_index", sort_index=thread)
    for each in slices:
        span = each.span
        args = {**span.args, "request": span.request} if span.request else span.args
        where = {"pid": span.process + 1, "tid": each.thread, "cat": span.track, "name": span.name}
        yield {"ph": "X", **where, "ts": each.begin_us, "dur": each.end_us - each.begin_us, "args": args}
    for number, path in enumerate(paths_of_requests(slices)):
        for phase, each in zip(["s", *("t" for _ in path[2:]), "f"], path, strict=True):
            what = {"ph": phase, "bp": "e", "id": number, "cat": "request", "name": "request"}
            yield {**what, "pid": each.span.process + 1, "tid": each.thread, "ts": each.begin_us}


def _meta(place: int, thread: int, what: str, **args: object) -> dict[str, Any]:
    return {"ph": "M", "pid": place + 1, "tid": thread, "name": what, "args": args}
