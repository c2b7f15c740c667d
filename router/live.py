"""What people look at: the fleet, its requests and what has happened to it, as the page /cluster and as the states that the live
page and `launch top` show, one after the other.

Owns the shape and the bounds of these, and what it takes to tell a change: the state before. All is computed when somebody looks,
from what the router keeps anyway, so no request and no heartbeat pays for it. Holds no prompt, text or token. Does not know HTTP,
nor who looks.

    roster   the instances by their places, and what does not change while they stay. Its version counts their changes
    state    figures of the instances in that order, lanes of requests, and the latest marks
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct
from msgspec.json import encode
from msgspec.structs import asdict

from common.ids import ROLES, InstanceId, RequestId
from common.messages import WIRE_VERSION
from router.attempts import Phase
from router.core import RouterCore
from router.fleet import Departure
from router.history import FleetEvent
from router.members import Member
from router.metrics import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S, RouterMetrics
from router.scaling import role_figures
from router.timelines import AttemptTimeline, RequestTimes, ResumeReason


class SafeToDelete(Struct, frozen=True):
    """Whether nothing is lost with an instance."""

    id: str
    safe_to_delete: bool
    reasons: list[str]
    """Why not; empty when it is."""


DEPARTED_SHOWN = 32
"""How many of the latest departures are shown."""
PIECE = 50
"""How many instances are described in one turn of the loop."""


async def cluster_page(core: RouterCore) -> dict[str, Any]:
    """The page as builtins, messages and pieces of JSON, ready for JSON. The loop turns between two pieces."""
    pieces: list[bytes] = []
    members = list(core.fleet.members())
    for first in range(0, len(members), PIECE):
        pieces.append(b",".join([encode(_instance(member)) for member in members[first : first + PIECE]]))
        await asyncio.sleep(0)
    departed = list(core.fleet.departed.values())[-DEPARTED_SHOWN:]
    phases = Counter(record.phase for record in core.requests.records())
    return {
        "router": {
            "wire_version": WIRE_VERSION,
            "requests_open": len(core.requests),
            "phases": {phase.value: phases[phase] for phase in Phase},
            "queue_depth": phases[Phase.AWAITING],
            "unread_chars": sum(client.unread_chars for client in core.requests.clients),
            "messages_stale": core.requests.stale + core.requests.retelling.stale_standings + core.fleet.stale,
            "prediction_errors": core.requests.placer.prediction_errors(),
            "unready": core.unready(),
            "degraded": core.degraded(),
            "settled": core.fleet.peering.settled,
        },
        "roles": {role: role_figures(core.fleet, role) for role in ROLES},
        "kept": core.scaling.kept,
        "detokenizers": [
            {"shard": shard, "silent": watch.silent} | ({} if watch.last is None else asdict(watch.last))
            for shard, watch in enumerate(core.detokenizers)
        ],
        "instances": Raw(b"[" + b",".join(pieces) + b"]"),
        "departed": [_departed(each, core.unix_s) for each in departed],
        "history": list(core.fleet.history.events),
        "refused": [{"id": name, "reason": refusal.reason} for name, refusal in core.fleet.refused.items()],
    }


_SAID_OF_ITSELF = ("id", "incarnation", "wire_version", "inbox", "ranks", "model", "max_running", "page_size", "page_bytes")


def _instance(member: Member) -> dict[str, Any]:
    info, trouble = member.info, member.trouble
    return {name: getattr(info, name) for name in _SAID_OF_ITSELF} | {
        "role": member.role,
        "state": member.state,
        "reason": None if trouble is None else trouble.reason,
        "transport": info.pools[0].backend,
        "pages_free": member.load.pages_free,
        "pages_total": info.total_pages,
        "load": asdict(member.load),
        "counters": member.counters,
        "assigned_tokens": member.assigned_tokens,
        "peers": len(member.partners),
        "links": Counter(member.links.values()),
        "usable": len(member.usable),
    }


MOST_LANES, MOST_OPEN_LANES = 100, 80
"""Requests that are shown, and those of them that may be open: some places are left for those that were short."""
KEPT_S = 6.0
"""How long a request that has ended is still shown."""
MOST_ATTEMPTS_SHOWN = 4
MOST_ENDED, MOST_LINKS, MOST_MARKS = 256, 256, 64
LINKED_INSTANCES = 64
"""In a larger fleet no single links are told."""
ID_CHARS, TEXT_CHARS = 128, 200

SegmentKind: TypeAlias = Literal["queue", "prefill", "push", "decode", "waits"]
Milliseconds: TypeAlias = int
"""Before (less than 0) or after the moment of the state."""


OF_INSTANCE = ("id", "role", "host", "transport", "pages", "max_running")
LOADS = (
    *("waiting_requests", "running_requests", "pages_free", "pages_cached", "pages_quarantined"),
    *("pushes_in_flight", "reservations"),
)
DONE = ("prompt_tokens_computed", "tokens_generated")
FIGURES = ("state", "pace_us", "links_usable", "links", *LOADS, *DONE)
"""pace_us: microseconds of a prompt token where prompts are computed, and of a step with the present rows where answers are."""
_loads, _done = attrgetter(*LOADS), attrgetter(*DONE)


class LiveRoster(msgspec.Struct, frozen=True, tag="roster"):
    """Who is there, and how the states are read."""

    version: int
    router: InstanceId
    model: str
    dispatch: str
    prefill_policy: str
    decode_policy: str
    instances: list[tuple[str | int, ...]]
    """For each of them what OF_INSTANCE names."""
    of_instance: tuple[str, ...] = OF_INSTANCE
    figures: tuple[str, ...] = FIGURES
    first_token_bounds_s: tuple[float, ...] = LATENCY_BUCKETS_S
    token_bounds_s: tuple[float, ...] = TOKEN_BUCKETS_S


class LaneSegment(msgspec.Struct, frozen=True, array_like=True):
    """A part of a request's time. A push overlaps what is computed meanwhile; all others follow each other."""

    kind: SegmentKind
    begin: Milliseconds
    end: Milliseconds


class RequestLane(msgspec.Struct, frozen=True, array_like=True):
    """A request. id: as its client knows it. place: tells it from others of that id."""

    id: str
    place: str
    prompt_tokens: int
    tokens: int
    phase: str
    """The kind of its last segment, or how it ended."""
    is_over: bool
    first: str
    decode: str
    cached_tokens: int
    chunks: int
    """0: not told yet."""
    predicted: Milliseconds | None
    """When its first token is expected; None: it has come, or nothing was predicted."""
    segments: list[LaneSegment]


class LiveState(msgspec.Struct, frozen=True, tag="state"):
    """One moment. roster: the version by which the instances are read."""

    roster: int
    at: float
    unready: list[str]
    degraded: list[str]
    open: int
    first_tokens: tuple[int, ...]
    """Counts of the histogram of times to the first token, since the router started; `token_times` those of later tokens."""
    token_times: tuple[int, ...]
    ended: int
    """Requests that ended since the state before."""
    latest: list[tuple[float, float, bool]]
    """The last MOST_ENDED of them: seconds to the first token, mean seconds of a later one, and whether it has all its tokens."""
    instances: list[tuple[str | int, ...]]
    """For each of them what FIGURES names."""
    links: list[tuple[int, int, str, int]]
    """The places of source and target in the roster, the state, and bytes a second; 0: not measured."""
    lanes: list[RequestLane]
    marks: list[FleetEvent]


class LiveView:
    """What those see who look at a router from now on. Use it on the router's loop. named: the model and the policies."""

    def __init__(self, core: RouterCore, metrics: RouterMetrics, named: tuple[str, str, str, str], now: float) -> None:
        self._core, self._metrics, self._named = core, metrics, named
        self.roster = LiveRoster(0, core.router, *named, [])
        self._looked_s = now
        self._resumes: dict[str, float] = {}
        self._lanes: dict[RequestId, RequestTimes] = {}
        self._in_front_s: dict[tuple[RequestId, int], float] = {}
        """Since when the prompt of an attempt is computed, of those that were seen to be the first in a queue."""

    async def look(self, now: float) -> LiveState:
        """The state as it is now. The loop turns between two pieces of a large fleet."""
        core, at = self._core, round(now + self._core.unix_s, 3)
        members = list(core.fleet.members())
        entries = [_entry(member) for member in members]
        if not self.roster.version or entries != self.roster.instances:
            self.roster = LiveRoster(self.roster.version + 1, core.router, *self._named, entries)
        self._note_resumes(now)
        ended = list(core.requests.timelines.ended_since(self._looked_s))
        lanes, self._looked_s = self._choose_lanes(now), now
        figures: list[tuple[str | int, ...]] = []
        for first in range(0, len(members), PIECE):
            await asyncio.sleep(0)
            figures += map(_figures, members[first : first + PIECE])
        return LiveState(
            roster=self.roster.version,
            at=at,
            unready=[reason[:TEXT_CHARS] for reason in core.unready()],
            degraded=[reason[:TEXT_CHARS] for reason in core.degraded()],
            open=len(core.requests),
            first_tokens=self._metrics.first_tokens.counts,
            token_times=self._metrics.token_times.counts,
            ended=len(ended),
            latest=[_ended(request) for request in ended[:MOST_ENDED]],
            instances=figures,
            links=_links(members),
            lanes=lanes,
            marks=list(core.fleet.history.events)[-MOST_MARKS:],
        )

    # --- what has happened -------------------------------------------------------------------------------------------------

    def _note_resumes(self, now: float) -> None:
        """Compare their counts with those before. Instances that are lost are told of with theirs."""
        samples = [sample for family in self._metrics.resumes.collect() for sample in family.samples]
        counts = {sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("_total")}
        for reason, count in self._resumes.items():
            more = int(counts[reason] - count)
            if more and reason != ResumeReason.LOST_INSTANCE:
                text = f"{more} resumed: {reason.replace('_', ' ')}"
                self._core.fleet.history.tell("resumed", "", text, now, level=logging.NOTSET)
        self._resumes = counts

    # --- requests ----------------------------------------------------------------------------------------------------------

    def _choose_lanes(self, now: float) -> list[RequestLane]:
        """Open requests that were shown before, then the newest; and those that ended just now, as far as there are places."""
        requests = self._core.requests
        chosen = {name: times for name, times in self._lanes.items() if times.ended_s is None}
        for record in requests.newest():
            if len(chosen) >= MOST_OPEN_LANES:
                break
            chosen.setdefault(record.spec.request_id, record.times)
        for times in requests.timelines.ended_since(now - KEPT_S):
            if len(chosen) >= MOST_LANES:
                break
            chosen.setdefault(times.request_id, times)
        self._lanes = chosen
        self._note_fronts()
        return sorted((self._lane(times, now) for times in chosen.values()), key=lambda lane: lane.segments[0].begin)

    def _note_fronts(self) -> None:
        """Which of the shown requests are first in a queue now."""
        for member in self._core.fleet.members():
            if (key := next(iter(member.computing), None)) is not None and key.request_id in self._lanes:
                self._in_front_s.setdefault((key.request_id, key.attempt), member.computes_since_s)
        self._in_front_s = {key: since_s for key, since_s in self._in_front_s.items() if key[0] in self._lanes}

    def _lane(self, request: RequestTimes, now: float) -> RequestLane:
        segments = list(self._segments(request, now))
        attempt = request.attempts[-1] if request.attempts else None
        told = [each.times for each in attempt.instances] if attempt is not None else []
        expected_s = request.predicted_first_s if request.first_token_s is None else None
        return RequestLane(
            id=(request.names[0] if request.names else request.request_id)[:ID_CHARS],
            place=request.request_id[-ID_CHARS:],
            prompt_tokens=request.prompt_tokens,
            tokens=request.tokens,
            phase=segments[-1].kind if request.ending is None else request.ending,
            is_over=request.ending is not None,
            first="" if attempt is None else attempt.first,
            decode="" if attempt is None or attempt.decode is None else attempt.decode,
            cached_tokens=max((times.cached_tokens for times in told), default=0),
            chunks=sum(times.chunks for times in told),
            predicted=None if expected_s is None else round(1e3 * (request.received_s + expected_s - now)),
            segments=segments,
        )

    def _segments(self, request: RequestTimes, now: float) -> Iterator[LaneSegment]:
        """The parts of its time, in order; at least one."""
        over_s, at_s = now if request.ended_s is None else request.ended_s, request.received_s
        for attempt in request.attempts[-MOST_ATTEMPTS_SHOWN:]:
            if attempt.number and attempt.dispatched_s > at_s:
                yield _segment("waits", at_s, attempt.dispatched_s, now)
                at_s = attempt.dispatched_s
            end_s = over_s if attempt.ended_s is None else attempt.ended_s
            yield from self._of_attempt(request, attempt, at_s, end_s, now)
            at_s = end_s
        if at_s < over_s or not request.attempts:
            yield _segment("waits", at_s, over_s, now)

    def _of_attempt(
        self, request: RequestTimes, attempt: AttemptTimeline, begin_s: float, end_s: float, now: float
    ) -> Iterator[LaneSegment]:
        """Its first instance tells the exact times when it has let go of it. Until then the router knows who is first in a queue,
        and its own time of the first token. Clocks of hosts may differ: nothing leaves the attempt's own time."""
        of_unix = self._core.unix_s
        told = next((each.times for each in attempt.instances if each.id == attempt.first), None)

        def within(time_s: float | None, shift_s: float = of_unix) -> float:
            return end_s if time_s is None else min(max(time_s - shift_s, begin_s), end_s)

        if told is not None and told.admitted_s is not None:
            admitted_s = within(told.admitted_s)
        elif (since_s := self._in_front_s.get((request.request_id, attempt.number))) is not None:
            admitted_s = within(since_s, 0.0)
        else:
            admitted_s = begin_s if attempt.first_token_s is not None else end_s
        token_s = within(attempt.first_token_s, 0.0)
        parts: list[tuple[SegmentKind, float, float]] = [("queue", begin_s, admitted_s), ("prefill", admitted_s, token_s)]
        if told is not None and told.granted_s is not None and told.first_push_s is not None:
            parts.append(("push", within(max(told.granted_s, told.first_push_s)), within(told.handed_off_s)))
        parts.append(("decode", token_s, end_s))
        there = [_segment(kind, from_s, to_s, now) for kind, from_s, to_s in parts if to_s > from_s]
        yield from there or [_segment("queue", begin_s, end_s, now)]


def _segment(kind: SegmentKind, begin_s: float, end_s: float, now: float) -> LaneSegment:
    return LaneSegment(kind, round(1e3 * (begin_s - now)), round(1e3 * (end_s - now)))


def _ended(request: RequestTimes) -> tuple[float, float, bool]:
    first_s, last_s = request.first_token_s, request.last_token_s
    if first_s is None or last_s is None:
        return 0.0, 0.0, False
    token_s = (last_s - first_s) / max(1, request.tokens - 1)
    return round(first_s - request.received_s, 4), round(token_s, 5), request.ending in ("stop", "length")


def _departed(gone: Departure, unix_s: float) -> dict[str, Any]:
    info = gone.member.info
    at = round(gone.at_s + unix_s, 3)
    return {"id": info.id, "incarnation": info.incarnation, "role": info.role, "reason": gone.reason, "at": at}


def _entry(member: Member) -> tuple[str | int, ...]:
    info = member.info
    return info.id, member.role, info.ranks[0].host, info.pools[0].backend, info.total_pages, info.max_running


def _figures(member: Member) -> tuple[str | int, ...]:
    load = member.load
    step_s = load.step_s + load.running_requests * load.decode_row_s + load.running_tokens * load.held_token_s
    pace_us = round(1e6 * (load.chunk_token_s if member.info.role == "prefill" else step_s))
    links = len(member.usable), len(member.partners)
    return (member.state, pace_us, *links, *_loads(load), *_done(member.counters))


def _links(members: list[Member]) -> list[tuple[int, int, str, int]]:
    """None in a large fleet."""
    if len(members) > LINKED_INSTANCES:
        return []
    places = {member.info.id: place for place, member in enumerate(members)}
    found: list[tuple[int, int, str, int]] = [
        (places[member.info.id], places[peer], state, round(member.speeds.get(peer, 0.0)))
        for member in members
        for peer, state in member.links.items()
        if peer in places
    ]
    return found[:MOST_LINKS]
