"""The choice of a policy by its name, as the flags have it. Owns the names. Does not know what policies do.

The port of a policy: it ranks the members of one role for a request.

Owns the port, and how many members a ranking is made of. A policy is told who can serve the request. It does not know why
another cannot, nor what becomes of a placement that is not its own.

Least loaded, and the power of two choices: who has the least to do, of some random members.

Owns how much a member has to do, for what its memory holds. The least loaded of a few random ones is nearly as good as the least
loaded of all, and routers that choose at the same time do not all choose the same (Mitzenmacher 2001, the power of two choices).
Does not know caches or times.

The ring of consistent hashing (Karger et al. 1997): every key has an order of the members, of which all routers agree.

Owns the points of the members. Each has many, so that all get equal parts; a member that joins or leaves moves only the keys that
it gets or had. Pure: it depends on names only. Does not know what a key stands for.

Session: the requests of one session go to one member, which has what came before in its cache.

Owns the ring of those that take requests. Requests without a session go to the least loaded. Does not know what is in the caches.

Round robin: the members in turn, whatever they have to do.

Owns whose turn it is. Does not know loads, caches or times.

Cache aware: who serves the request at the least cost in seconds, counting what each has of its prompt.

Owns whom to compare: random members, which know little of the prompt but may have time, and those that have most of it. `cost`
tells what each would take: a member with much of the prompt loses when too many wait there, so a prompt that all begin with makes
no crowd. Does not know what a placement costs, nor how the caches are known.

Soonest: whose first token is predicted to come first, of some random members and those that have most of the prompt.

Owns whom to compare when a request would be too late where its policy sends it. Does not know how a prediction is made.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import shake_128
from itertools import chain, islice
from math import inf
from typing import Protocol, TypeAlias

from common.config import PolicyName
from common.ids import Role
from router.candidates import Candidates, Pool
from router.cost import Ask, alone, at_decode, of_prefill, predict_ttft
from router.members import Member

CANDIDATES = 4
"""How many decode instances a placement names: the next one is asked when the best has no room by then."""

Suits: TypeAlias = Callable[[Member], bool]
"""Whether a member can serve the request."""


def others(
    some: Sequence[Member], pool: Pool, suits: Suits, rank: Callable[[Member], float | tuple[float, ...]]
) -> Iterator[Sequence[Member]]:
    """All that suit but these, the least first, as a group for whoever could use none of these."""
    if rest := sorted((member for member in pool if suits(member) and member not in some), key=rank):
        yield rest


class Policy(Protocol):
    """Ranks the members of one role. Its cost must not grow with the fleet while most members suit."""

    def groups(self, pool: Pool, suits: Suits, ask: Ask, source: Member | None) -> Iterator[Sequence[Member]]:
        """Those that suit, in groups that are not empty, each with its best member first. Whoever can use nobody of a group takes
        the next. Together the groups hold all that suit.

        pool: members of which all that suit are part. source: the prefill member that is to push KV to them; None for prefill
        members, and for a decode member that is to serve the request alone.
        """

    def chose(self, member: Member) -> None:
        """The request goes to this member."""


SAMPLE = 8
"""How many members `least_loaded` compares."""


class LeastLoaded:
    """The least loaded of `compared` random members. Among equals, the one that was chosen longest ago."""

    def __init__(self, candidates: Candidates, role: Role, compared: int = SAMPLE) -> None:
        self._candidates = candidates
        self._load = _at_prefill if role == "prefill" else _at_decode
        self._compared = compared

    def groups(self, pool: Pool, suits: Suits, ask: Ask, source: Member | None) -> Iterator[Sequence[Member]]:
        load, compared = self._load(ask), self._compared
        some = list(filter(suits, self._candidates.some(pool, max(compared, CANDIDATES))))
        if some:  # those that are not compared stand behind: a placement names more members than a small sample has
            yield sorted(some[:compared], key=load) + sorted(some[compared:], key=load)
        yield from others(some, pool, suits, load)

    def chose(self, member: Member) -> None:
        """Its load grows by the request."""


def _at_prefill(ask: Ask) -> Callable[[Member], tuple[float, int]]:
    def load(member: Member) -> tuple[float, int]:
        return (member.tokens_to_do + prompt_tokens) / member.capacity_tokens, member.chosen

    prompt_tokens = ask.prompt_tokens
    return load


def _at_decode(ask: Ask) -> Callable[[Member], tuple[bool, float, int]]:
    def load(member: Member) -> tuple[bool, float, int]:
        """Those without room for it come last: it would wait there, or drive another out."""
        tokens = member.tokens_to_do + member.growth_tokens + held_tokens
        return member.tokens_free < held_tokens, tokens / member.capacity_tokens, member.chosen

    held_tokens = ask.held_tokens
    return load


POINTS = 64
"""Of each member. The parts of members then differ by an eighth (the root of 1 / POINTS)."""
POINT_BYTES = 16
"""So many that no two points are ever equal."""
CIRCLE = 1 << 8 * POINT_BYTES


class Ring:
    """Members and their points, in the order of the points."""

    def __init__(self) -> None:
        self._points: list[int] = []
        self._owners: dict[int, Member] = {}
        self._members: dict[Member, list[int]] = {}
        """The points of each, in order."""

    def become(self, members: Iterable[Member]) -> None:
        """From now on it has these members. The points are sorted once, whoever came and went."""
        wanted = set(members)
        for gone in self._members.keys() - wanted:  # first: a later life of an instance has the points of the former
            for point in self._members.pop(gone):
                del self._owners[point]
        self._points = [point for point in self._points if point in self._owners]
        for new in wanted - self._members.keys():
            points = self._members[new] = sorted(_hash(new.info.id, POINTS))
            self._owners.update(dict.fromkeys(points, new))
            self._points += points
        self._points.sort()

    def order(self, key: str, pool: Pool) -> Iterator[Member]:
        """Every member once, in the order of this key; if few are in the pool, only these."""
        (start,) = _hash(key, 1)
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


class BySession:
    """The member that consistent hashing gives to the session, so that all routers agree, and a member that joins or leaves moves
    few sessions."""

    def __init__(self, candidates: Candidates, role: Role) -> None:
        self._candidates = candidates
        self._role = role
        self._without = LeastLoaded(candidates, role)
        self._ring = Ring()
        self._changes = -1
        """As many there were when the ring got its members."""

    def groups(self, pool: Pool, suits: Suits, ask: Ask, source: Member | None) -> Iterator[Sequence[Member]]:
        if not ask.session:
            yield from self._without.groups(pool, suits, ask, source)
            return
        if self._changes != (changes := self._candidates.changes(self._role)):
            self._ring.become(self._candidates.line(self._role))
            self._changes = changes
        in_order = filter(suits, self._ring.order(ask.session, pool))
        while group := list(islice(in_order, CANDIDATES)):
            yield group

    def chose(self, member: Member) -> None:
        """The ring stays as it is."""


class RoundRobin:
    """In the order of their memory and names, from the one behind the last that was chosen."""

    def __init__(self, candidates: Candidates, role: Role) -> None:
        self._candidates = candidates
        self._role = role
        self._last: Member | None = None

    def groups(self, pool: Pool, suits: Suits, ask: Ask, source: Member | None) -> Iterator[Sequence[Member]]:
        in_turn = filter(suits, self._candidates.after(self._role, self._last))
        while group := list(islice(in_turn, CANDIDATES)):
            yield group

    def chose(self, member: Member) -> None:
        self._last = member


RANDOM, DEEPEST = 4, 3
"""How many random members it compares, and how many of those that have most of the prompt."""


class CacheAware:
    """The cheapest of some random members and of those with most of the prompt. Among equals, the one chosen longest ago."""

    def __init__(self, candidates: Candidates, role: Role, random: int = RANDOM, deepest: int = DEEPEST) -> None:
        self._candidates = candidates
        self._role = role
        self._random = random
        self._deepest = deepest

    def groups(self, pool: Pool, suits: Suits, ask: Ask, source: Member | None) -> Iterator[Sequence[Member]]:
        def rank(member: Member) -> tuple[float, int]:
            return cost(member), member.chosen

        drawn = filter(suits, self._candidates.some(pool, self._random))
        some = list(dict.fromkeys(chain(drawn, ask.overlap.deepest(self._role, self._deepest, suits))))
        cost = self._cost(ask, source, some)
        if some:
            yield sorted(some, key=rank)
        yield from others(some, pool, suits, rank)

    def chose(self, member: Member) -> None:
        """Its cost grows by the request."""

    def _cost(self, ask: Ask, source: Member | None, some: Sequence[Member]) -> Callable[[Member], float]:
        """In seconds. Behind a queue of so many tokens come as many prompts of the usual size. If the prompts in it were counted,
        the short ones would gather where many wait, and the long ones elsewhere."""
        if self._role == "prefill":
            prompts = sum(member.requests_to_do for member in some)
            usual = max(1.0, sum(member.tokens_to_compute for member in some) / max(1, prompts))
            return lambda member: of_prefill(member, ask, member.tokens_to_compute / usual)
        if source is None:
            return lambda member: alone(member, ask).cost_s
        return lambda member: at_decode(member, source, ask)


SOONEST_RANDOM, SOONEST_DEEPEST = 64, 3
"""Only requests that would be refused come here, so it compares more members than a policy does."""


class Soonest:
    """For one request. now: when it is placed."""

    def __init__(self, candidates: Candidates, now: float) -> None:
        self._candidates = candidates
        self._now = now

    def ttft_s(self, member: Member, ask: Ask) -> float:
        """Predicted seconds until the first token there."""
        predicted_s = predict_ttft(member, ask, member.computed_s(self._now))
        return inf if predicted_s is None else predicted_s

    def groups(self, pool: Pool, suits: Suits, ask: Ask, source: Member | None) -> Iterator[Sequence[Member]]:
        def rank(member: Member) -> float:
            return self.ttft_s(member, ask)

        some = list(filter(suits, self._candidates.some(pool, SOONEST_RANDOM)))
        if some:
            deepest = ask.overlap.deepest(some[0].info.role, SOONEST_DEEPEST, suits)
            some = list(dict.fromkeys(chain(some, deepest)))
            yield sorted(some, key=rank)
        yield from others(some, pool, suits, rank)

    def chose(self, member: Member) -> None:
        """It is used once."""


_POLICIES: Mapping[PolicyName, Callable[[Candidates, Role], Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": partial(LeastLoaded, compared=2),
    "session": BySession,
    "cache_aware": CacheAware,
}


def make_policy(name: PolicyName, candidates: Candidates, role: Role) -> Policy:
    """The policy of this name, for the members of this role."""
    return _POLICIES[name](candidates, role)
