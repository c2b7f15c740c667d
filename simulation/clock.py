"""Simulated time: a clock that stands still until it is moved to the next thing that happens, and loops that act on it.

Owns what happens when, and in which order. Knows nothing of those to whom it happens.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

NEVER = math.inf
TURN_S = 0.001
"""How long an actor takes to act: what comes for it meanwhile waits."""


class Clock:
    """Reads as the clocks that are given to the product, and knows what comes next. What was planned first for a time happens
    first, so a run can be repeated exactly."""

    def __init__(self) -> None:
        self.now = 0.0
        self._plans: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = 0

    def __call__(self) -> float:
        return self.now

    def at(self, at_s: float, act: Callable[[], object]) -> None:
        """Plan something; what is planned for the past happens now."""
        self._serial += 1
        heapq.heappush(self._plans, (max(at_s, self.now), self._serial, act))

    def next_deadline(self) -> float:
        return self._plans[0][0] if self._plans else NEVER

    def turn(self) -> None:
        """Move to the next thing that is planned, and let it happen. There must be one."""
        self.now, _, act = heapq.heappop(self._plans)
        act()


@dataclass(frozen=True, slots=True)
class LocalClock:
    """The clock of one process, which began to count at another moment than those of others."""

    clock: Clock
    offset_s: float

    def __call__(self) -> float:
        return self.clock.now + self.offset_s

    def simulated(self, at_s: float) -> float:
        """What the simulated time is at this time of the process."""
        return at_s - self.offset_s


class Actor(Protocol):
    """Somebody who acts now and then, as a process does: when its time has come, or when it is woken."""

    def act(self) -> None: ...

    def next_deadline(self) -> float:
        """When it acts next, in simulated time, even if nobody wakes it."""


class Loop:
    """Lets one actor act at its times. While it is stopped, what comes for it waits."""

    def __init__(self, clock: Clock, actor: Actor) -> None:
        self._clock = clock
        self._actor = actor
        self._wakes_s = NEVER
        self._free_s = 0.0
        self._ended = False

    def wake(self, at_s: float) -> None:
        """Act at this time or before; as soon as it is free."""
        at_s = max(at_s, self._free_s, self._clock.now)
        if at_s < self._wakes_s and not self._ended:
            self._wakes_s = at_s
            self._clock.at(at_s, self._ring)

    def stop_until(self, until_s: float) -> None:
        """Do not act before then, as a process that a signal stopped."""
        self._free_s = max(self._free_s, until_s)

    def end(self) -> None:
        """Never act again."""
        self._ended = True

    def _ring(self) -> None:
        now = self._clock.now
        if now != self._wakes_s or self._ended:
            return  # it was woken before, or is gone
        self._wakes_s = NEVER
        if now < self._free_s:
            self.wake(self._free_s)
            return
        self._free_s = now + TURN_S
        self._actor.act()
        self.wake(self._actor.next_deadline())
