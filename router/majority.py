"""The majority: whether those that were refused served here before, and are more than those that are members now.

Owns the votes. Who is first at a router that has just started decides what all others must be like. If that one is the odd one,
the fleet of the former life would stay outside. So an instance that a former life has welcomed votes whenever it is refused
because it differs; instances that are alike vote together. Newcomers do not: nobody can push out a fleet by starting a larger
one. Knows neither members nor messages.
"""

from collections import Counter
from collections.abc import Hashable

from common.ids import InstanceId

VOTE_S = 15.0
"""How long a vote counts: who is refused asks again before that, however seldom it asks."""
VOTES_COUNTED = 4096
"""How many votes are kept, the newest."""


class Majority:
    def __init__(self) -> None:
        self._votes: dict[InstanceId, tuple[Hashable, float]] = {}
        """What each is like, and until when its vote counts, the oldest first."""
        self._counts: Counter[Hashable] = Counter()

    def vote(self, name: InstanceId, likeness: Hashable, now: float) -> int:
        """Count the vote of this instance, in place of its former one. likeness: equal for all that fit together. Returns how
        many vote with it."""
        self._withdraw(name)
        while self._votes and (len(self._votes) >= VOTES_COUNTED or next(iter(self._votes.values()))[1] <= now):
            self._withdraw(next(iter(self._votes)))
        self._votes[name] = likeness, now + VOTE_S
        self._counts[likeness] += 1
        return self._counts[likeness]

    def _withdraw(self, name: InstanceId) -> None:
        likeness, _ = self._votes.pop(name, (None, 0.0))
        self._counts[likeness] -= 1
        if self._counts[likeness] <= 0:
            del self._counts[likeness]
