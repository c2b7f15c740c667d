"""Soonest: whose first token is predicted to come first, of some random members and those that have most of the prompt.

Owns whom to compare when a request would be too late where its policy sends it. Does not know how a prediction is made.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf

from router.ask import Ask
from router.candidates import Candidates, Pool
from router.cost import predict_ttft
from router.members import Member
from router.policies.port import Suits, others

RANDOM, DEEPEST = 64, 3
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

        some = list(filter(suits, self._candidates.some(pool, RANDOM)))
        if some:
            deepest = ask.overlap.deepest(some[0].info.role, DEEPEST, suits)
            some = list(dict.fromkeys(chain(some, deepest)))
            yield sorted(some, key=rank)
        yield from others(some, pool, suits, rank)

    def chose(self, member: Member) -> None:
        """It is used once."""
