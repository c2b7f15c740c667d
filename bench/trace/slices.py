"""Slices: spans as a viewer draws them, in whole microseconds, each on a lane where it overlaps no other.

Owns the choice of lanes and the way of a request through the slices. Pure functions. Does not know files.

    spans of a track   ├──── a ────┤     ├── c ──┤           lane 0: a, c
                              ├──── b ────┤                  lane 1: b
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.trace.record import Line

REQUESTS = "requests"
"""The track whose slices are whole requests: the way of a request begins and ends there."""


@dataclass(frozen=True, slots=True)
class Slice:
    """[begin_us, end_us), counted from the beginning of the trace, which may be later than its own. It may be empty, as when two
    steps came back in one turn, but not if it is about a request: a flow binds to it. process: its place in the trace. lane: of
    its track."""

    process: int
    track: str
    lane: int
    name: str
    begin_us: int
    end_us: int
    request: str
    args: Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Stop:
    """A moment within a slice, on the way of a request."""

    at_us: int
    slice: Slice


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
        intervals = [_interval(span, began_s) for span in spans]
        for span, (begin, end), lane in zip(spans, intervals, lanes(intervals), strict=True):
            slices.append(Slice(process, track, lane, span.name, begin, end, span.request, span.args))
    return slices


def ways(slices: Iterable[Slice]) -> Iterator[list[Stop]]:
    """The way of each request that has several slices: where each of them begins, in that order, and where the whole request
    ends."""
    of_requests: defaultdict[str, list[Stop]] = defaultdict(list)
    for each in slices:
        if each.request:
            of_requests[each.request].append(Stop(each.begin_us, each))
            if each.track == REQUESTS:
                of_requests[each.request].append(Stop(each.end_us - 1, each))
    for stops in of_requests.values():
        if len({id(stop.slice) for stop in stops}) > 1:
            yield sorted(stops, key=lambda stop: (stop.at_us, stop.slice.track != REQUESTS))


def _interval(span: Line, began_s: float) -> tuple[int, int]:
    begin, least_us = math.floor((span.begin_s - began_s) * 1e6), 1 if span.request else 0
    return begin, max(begin + least_us, math.floor((span.end_s - began_s) * 1e6))
