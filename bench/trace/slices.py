"""Slices: spans as a viewer draws them, in whole microseconds, each on a lane where it overlaps no other.

Owns the choice of lanes and the way of a request through the slices. Pure functions. Does not know files.

    spans of a track   ├──── a ────┤     ├── c ──┤           lane 0: a, c
                              ├──── b ────┤                  lane 1: b
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.trace.record import Line


@dataclass(frozen=True, slots=True)
class Slice:
    """[begin_us, end_us), never empty; counted from the beginning of the trace, which may be later than its own. process: its
    place in the trace. lane: of its track."""

    process: int
    track: str
    lane: int
    name: str
    begin_us: int
    end_us: int
    request: str
    args: Mapping[str, int | float | str]


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


def slices_of(lines: Iterable[Line], began_s: float) -> list[Slice]:
    """began_s: UNIX time of moment 0."""
    tracks: defaultdict[tuple[int, str], list[Line]] = defaultdict(list)
    for line in lines:
        tracks[line.process, line.track].append(line)
    slices: list[Slice] = []
    for (process, track), spans in tracks.items():
        intervals = _intervals(spans, began_s)
        for span, (begin, end), lane in zip(spans, intervals, lanes(intervals), strict=True):
            slices.append(Slice(process, track, lane, span.name, begin, end, span.request, span.args))
    return slices


def ways(slices: Iterable[Slice]) -> Iterator[list[Slice]]:
    """The way of each request that has several slices, in the order of their begins."""
    of_requests: defaultdict[str, list[Slice]] = defaultdict(list)
    for each in slices:
        if each.request:
            of_requests[each.request].append(each)
    for its in of_requests.values():
        if len(its) > 1:
            yield sorted(its, key=lambda each: each.begin_us)


def _intervals(spans: Sequence[Line], began_s: float) -> list[tuple[int, int]]:
    """An empty one, as of a step that came back in one turn with the step before, takes its microsecond from what ends there."""
    exact = [(round((span.begin_s - began_s) * 1e6), round((span.end_s - began_s) * 1e6)) for span in spans]
    empty = {begin for begin, end in exact if begin >= end}
    return [
        (begin - 1, begin) if begin >= end else (begin, end - 1) if end in empty and end - begin > 1 else (begin, end)
        for begin, end in exact
    ]
