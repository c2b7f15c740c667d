"""Least loaded, and the power of two choices: who has the least to do, of some random members.

Owns how much a member has to do, for what its memory holds. The least loaded of a few random ones is nearly as good as the least
loaded of all, and routers that choose at the same time do not all choose the same (Mitzenmacher 2001, the power of two choices).
Does not know caches or times.
"""

from collections.abc import Callable, Iterator, Sequence

from common.ids import Role
from router.ask import Ask
from router.candidates import Candidates, Pool
from router.members import Member
from router.policies.port import CANDIDATES, Suits, others

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
