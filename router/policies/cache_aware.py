"""Cache aware: who serves the request at the least cost in seconds, counting what each has of its prompt.

Owns whom to compare: random members, which know little of the prompt but may have time, and those that have most of it. `cost`
tells what each would take: a member with much of the prompt loses when too many wait there, so a prompt that all begin with makes
no crowd. Does not know what a placement costs, nor how the caches are known.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from common.ids import Role
from router.ask import Ask
from router.candidates import Candidates, Pool
from router.cost import alone, at_decode, of_prefill
from router.members import Member
from router.policies.port import Suits, others

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
