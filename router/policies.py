"""The policies: each ranks the members of one role for a request.

Owns the choice of a policy by its name, how many members a ranking compares, and by what. A policy is told who can serve the
request; it does not know why another cannot, nor what becomes of a placement. What it costs does not grow with the fleet while
most members suit.

    least_loaded   the least loaded of a few random members is nearly as good as the least loaded of all, and routers that choose
    power_of_two   at the same time do not all choose the same (Mitzenmacher 2001, the power of two choices)
    cache_aware    the cheapest in seconds (`router.cost`), of some random members and of those that have most of the prompt in
                   their caches: one with much of the prompt loses when too many wait there, so a common beginning makes no crowd
    session        the member to which consistent hashing (Karger et al. 1997) gives the session: all routers agree, and a member
                   that joins or leaves moves few sessions
    round_robin    each in turn
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import shake_128
from itertools import islice
from math import inf
from typing import TypeAlias

from common.config import PolicyName
from common.ids import Role
from router.cost import Demand, decode_cost_s, predict_ttft, prefill_cost_s, single_estimate
from router.members import Candidates, Member

CANDIDATES = 4
"""How many decode instances a placement names: the next one is asked when the best has no room by then."""

Suits: TypeAlias = Callable[[Member], bool]
"""Whether a member can serve the request."""
Policy: TypeAlias = Callable[[Sequence[Member], Suits, Demand, Member | None], Iterator[Sequence[Member]]]
"""Yields the members of the pool that suit, in groups that are not empty, each with its best member first. A caller that can use
nobody of a group takes the next one; together the groups hold all that suit. The last argument is the prefill member that is to
push KV to them; None for prefill members, and for a decode member that is to serve the request alone."""
RankKey: TypeAlias = Callable[[Member], float | tuple[float, ...]]
"""What members are ordered by, the lowest first."""
Ranking: TypeAlias = Callable[[Demand, Member | None, Sequence[Member]], RankKey]
"""Makes the rank for a demand, its source, and the members that are compared."""


class Sampled:
    """The best of `drawn` random members and of the `deepest` members that have most of the prompt.

    compared: how many of the random ones are compared with each other; the others stand behind them in the group, because a
    placement may name more members than a small sample has. None: all of the group are.
    """

    def __init__(
        self, candidates: Candidates, role: Role, rank_of: Ranking, drawn: int, deepest: int = 0, compared: int | None = None
    ) -> None:
        self._candidates, self._role = candidates, role
        self._rank_of = rank_of
        self._drawn, self._deepest, self._compared = drawn, deepest, compared or drawn + deepest

    def __call__(self, pool: Sequence[Member], suits: Suits, demand: Demand, source: Member | None) -> Iterator[Sequence[Member]]:
        some = [member for member in self._candidates.some(pool, self._drawn) if suits(member)]
        if self._deepest:
            some = list(dict.fromkeys([*some, *demand.overlap.deepest(self._role, self._deepest, suits)]))
        rank = self._rank_of(demand, source, some)
        if some:
            yield sorted(some[: self._compared], key=rank) + sorted(some[self._compared :], key=rank)
        if others := sorted((member for member in pool if suits(member) and member not in some), key=rank):
            yield others


SAMPLE = 8
"""How many members `least_loaded` compares."""


def least_loaded(candidates: Candidates, role: Role, compared: int = SAMPLE) -> Sampled:
    """By how much a member has to do, for what its memory holds. Among equals, the one that was chosen longest ago."""
    return Sampled(candidates, role, lambda demand, *_: partial(_load, demand), max(compared, CANDIDATES), compared=compared)


def _load(demand: Demand, member: Member) -> tuple[float, ...]:
    """Decode instances without room for it come last: it would wait there, or drive another out."""
    if member.info.role == "prefill":
        return (member.tokens_to_do + demand.prompt_tokens) / member.capacity_tokens, member.chosen
    tokens = member.tokens_to_do + member.growth_tokens + demand.held_tokens
    return member.tokens_free < demand.held_tokens, tokens / member.capacity_tokens, member.chosen


RANDOM, DEEPEST = 4, 3
"""How many random members `cache_aware` compares, and how many of those that have most of the prompt."""


def cache_aware(candidates: Candidates, role: Role, drawn: int = RANDOM, deepest: int = DEEPEST) -> Sampled:
    """By seconds. Among equals, the one that was chosen longest ago."""
    return Sampled(candidates, role, _prefill_seconds if role == "prefill" else _decode_seconds, drawn, deepest)


def _prefill_seconds(demand: Demand, source: Member | None, some: Sequence[Member]) -> RankKey:
    """Behind a queue of so many tokens come as many prompts of the usual size. If the prompts in it were counted, the short ones
    would gather where many wait, and the long ones elsewhere."""
    prompts = sum(member.requests_to_do for member in some)
    usual = max(1.0, sum(member.tokens_to_compute for member in some) / max(1, prompts))
    return lambda member: (prefill_cost_s(member, demand, member.tokens_to_compute / usual), member.chosen)


def _decode_seconds(demand: Demand, source: Member | None, some: Sequence[Member]) -> RankKey:
    if source is None:
        return lambda member: (single_estimate(member, demand).cost_s, member.chosen)
    return lambda member: (decode_cost_s(member, source, demand), member.chosen)


SOONEST_RANDOM, SOONEST_DEEPEST = 64, 3
"""Only requests that would be refused come here, so it compares more members than a policy does."""


def soonest(candidates: Candidates, role: Role, now: float) -> Sampled:
    """By the predicted time of the first token, for a request that is placed now."""

    def rank_of(demand: Demand, source: Member | None, some: Sequence[Member]) -> RankKey:
        return partial(ttft_s, demand=demand, now=now)

    return Sampled(candidates, role, rank_of, SOONEST_RANDOM, SOONEST_DEEPEST)


def ttft_s(member: Member, demand: Demand, now: float) -> float:
    """Predicted seconds until the first token there."""
    predicted_s = predict_ttft(member, demand, member.computed_s(now))
    return inf if predicted_s is None else predicted_s


POINTS = 64
"""How many points each member has. The parts of members then differ by an eighth (the root of 1 / POINTS)."""
POINT_BYTES = 16
"""So many that no two points are ever equal."""
CIRCLE = 1 << 8 * POINT_BYTES


class BySession:
    """Consistent hashing for a request with a session. One without a session goes to the least loaded.

    Members and their points form a ring, in the order of the points. It depends on names only, so all routers have the same."""

    def __init__(self, candidates: Candidates, role: Role) -> None:
        self._line = candidates.lines[role]
        self._without_session = least_loaded(candidates, role)
        self._points: list[int] = []
        self._owners: dict[int, Member] = {}
        self._members: dict[Member, list[int]] = {}
        """The points of each, in order."""
        self._changes = -1
        """Changes of the line when the ring got its members."""

    def __call__(self, pool: Sequence[Member], suits: Suits, demand: Demand, source: Member | None) -> Iterator[Sequence[Member]]:
        if not demand.session:
            return self._without_session(pool, suits, demand, source)
        if self._changes != self._line.changes:
            self._follow(set(self._line))
            self._changes = self._line.changes
        return _grouped(filter(suits, self._order(demand.session, pool)))

    def _follow(self, wanted: set[Member]) -> None:
        """From now on the ring has these members. The points are sorted once, whoever came and went."""
        for gone in self._members.keys() - wanted:  # first: a later life of an instance has the points of the former
            for point in self._members.pop(gone):
                del self._owners[point]
        self._points = [point for point in self._points if point in self._owners]
        for new in wanted - self._members.keys():
            points = self._members[new] = sorted(_hash(new.info.id, POINTS))
            self._owners.update(dict.fromkeys(points, new))
            self._points += points
        self._points.sort()

    def _order(self, session: str, pool: Sequence[Member]) -> Iterator[Member]:
        """Every member once, in the order of this session; if few are in the pool, only these."""
        (start,) = _hash(session, 1)
        if len(pool) ** 2 < len(self._members):
            yield from sorted(self._members.keys() & set(pool), key=lambda member: _distance(self._members[member], start))
            return
        points, seen = self._points, set[Member]()
        first = bisect_left(points, start)
        for number in range(first, first + len(points)):
            owner = self._owners[points[number % len(points)]]
            if owner not in seen:
                seen.add(owner)
                yield owner


def _distance(points: list[int], start: int) -> int:
    """From the start to the first of these points that lies behind it. points: in order."""
    point = points[bisect_left(points, start) % len(points)]
    return (point - start) % CIRCLE


def _hash(text: str, count: int) -> list[int]:
    """So many points."""
    digest = shake_128(text.encode()).digest(count * POINT_BYTES)
    return [int.from_bytes(digest[at : at + POINT_BYTES], "big") for at in range(0, len(digest), POINT_BYTES)]


class RoundRobin:
    """Members in the order of their memory and names, from the one behind the last choice."""

    def __init__(self, candidates: Candidates, role: Role) -> None:
        self._candidates, self._role = candidates, role

    def __call__(self, pool: Sequence[Member], suits: Suits, demand: Demand, source: Member | None) -> Iterator[Sequence[Member]]:
        line, latest = self._candidates.lines[self._role], self._candidates.latest.get(self._role)
        return _grouped(filter(suits, line.after(latest)))


def _grouped(members: Iterator[Member]) -> Iterator[Sequence[Member]]:
    while group := list(islice(members, CANDIDATES)):
        yield group


POLICIES: Mapping[PolicyName, Callable[[Candidates, Role], Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": least_loaded,
    "power_of_two": partial(least_loaded, compared=2),
    "session": BySession,
    "cache_aware": cache_aware,
}
