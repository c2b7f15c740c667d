"""The weather of a simulation: letters that are late, overtaken, lost or come twice, and links that are cut for a while.

Owns the chances and the cuts. Everything is drawn from a seeded generator. Knows no messages.
"""

import re
from dataclasses import dataclass, field
from random import Random

from common.ids import InstanceId
from simulation.network import DELAY_S

RANK = ".rank-"
"""In the name of a rank as a sender. Ranks have one connection for their lives, so nothing overtakes or comes twice there."""
TEXT_NAME = re.compile(r"\.text-\d+$")
"""The end of a detokenizer's name."""
SLOW_S = 1.5
"""The longest that a letter takes which is merely late."""

APART_S = 1e-6
"""Between two letters that must not overtake each other: rounding must not change their order."""


@dataclass(frozen=True, kw_only=True)
class Chances:
    """The chances of what may happen to a letter. caches_lost: for letters that tell of prefix caches. overtaking: whether
    letters of one sender to one receiver may overtake each other; those of a detokenizer and to one never do, for gaps in text
    and answers to probes tell the router what was lost. ranks_lost: for a letter between ranks, whose loss ends their
    instance."""

    lost: float
    twice: float
    slow: float
    overtaking: bool
    caches_lost: float = 0.0
    ranks_lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes between two of them until then. queued: letters wait for its end, as in a socket's buffer, or are lost."""

    until_s: float
    queued: bool


@dataclass(slots=True)
class Storm:
    """Implements `simulation.network.Weather` until `ends_s`; then it is calm, and only cuts that last go on."""

    random: Random
    chances: Chances
    ends_s: float
    cuts: dict[frozenset[InstanceId], Cut] = field(default_factory=dict)
    _latest_s: dict[tuple[InstanceId, InstanceId], float] = field(default_factory=dict)

    def cut(self, one: InstanceId, other: InstanceId, cut: Cut) -> None:
        self.cuts[frozenset((one, other))] = cut

    def cut_until(self, one: InstanceId, other: InstanceId, now: float) -> float:
        """When something that is sent between them now passes; the present when nothing is in its way."""
        cut = self.cuts.get(frozenset((one, other)))
        return now if cut is None else max(now, cut.until_s)

    def delays(self, sender: InstanceId, to: InstanceId, now: float, kind: str) -> tuple[float, ...]:
        chances, draw = self.chances, self.random.random
        passes_s = now
        if self.cuts:
            cut = self.cuts.get(frozenset((sender, to)))
            if cut is not None and now < cut.until_s:
                if not cut.queued:
                    return ()
                passes_s = cut.until_s
        if now >= self.ends_s:
            return (self._ordered(sender, to, passes_s + DELAY_S) - now,)
        if RANK in sender:
            return () if draw() < chances.ranks_lost else (self._ordered(sender, to, passes_s + self._delay()) - now,)
        if draw() < (max(chances.lost, chances.caches_lost) if kind == "CacheChanges" else chances.lost):
            return ()
        arrivals = 2 if draw() < chances.twice else 1
        return tuple(self._ordered(sender, to, passes_s + self._delay()) - now for _ in range(arrivals))

    def _delay(self) -> float:
        draw = self.random.random
        if draw() < self.chances.slow:
            return DELAY_S + SLOW_S * draw() ** 3
        return DELAY_S * (0.2 + 4.0 * draw())

    def _ordered(self, sender: InstanceId, to: InstanceId, arrives_s: float) -> float:
        """The arrival, put off until that of what was sent before on this link, if nothing may overtake there."""
        if self.chances.overtaking and RANK not in sender and TEXT_NAME.search(sender) is None and TEXT_NAME.search(to) is None:
            return arrives_s
        arrives_s = max(arrives_s, self._latest_s.get((sender, to), 0.0) + APART_S)
        self._latest_s[sender, to] = arrives_s
        return arrives_s
