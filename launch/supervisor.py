"""Supervision: what happens to a part that ended. It is restarted, after a longer pause each time, or stays away.

Owns the back-off. Starts nothing and reads no clock: fed with events of children and the time, it says what to do. Does not know
what a part is for.

    first start   when any part ends, everything ends: a bad flag must not loop
    after it      status 0 of a part that drains    it was told to leave: not started again
                  BAD_FLAG                          it can never run as it is: not started again, and the end of all when
                                                    nobody else has its role
                  anything else, also too little    started again after 0.5 s, 1 s, … 30 s; from 0.5 s again when it had
                  free memory                       been ready for a minute
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from common.deadlines import DeadlineWheel
from common.processes.child import Exited, Ready
from launch.child import BAD_FLAG, ChildEvent

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
STEADY_S = 60.0
"""A part that was ready for so long is well: its next end is the first of a new row."""


@dataclass(frozen=True, slots=True)
class SupervisedChild:
    """A child that is to live."""

    name: str
    role: str
    drains: bool
    """It ends with status 0 when it was told to leave in order, and only then."""


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start the part again, as it was started before."""

    name: str


@dataclass(frozen=True, slots=True)
class Notice:
    """What became of the part, for people."""

    name: str
    text: str
    account: str
    """What is known of the reason, in one or more lines."""

    @property
    def headline(self) -> str:
        reason, _, _ = self.account.partition("\n")
        return f"{self.text}: {reason}"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The whole cannot go on."""

    reason: str
    status: int
    """The exit status of the whole, BAD_FLAG or 1."""


Action: TypeAlias = StartAgain | Notice | GiveUp


class Supervisor:
    """The parts of a whole, each of which somebody else starts for the first time."""

    def __init__(self, parts: Sequence[SupervisedChild]) -> None:
        self._parts = {part.name: part for part in parts}
        self._started = False
        self._ready_since: dict[str, float] = {}
        self._backoff_s: dict[str, float] = {}
        self._restarts: DeadlineWheel[str] = DeadlineWheel()

    def started(self) -> None:
        """The first start is complete: from now on what ends is started again."""
        self._started = True

    def receive(self, event: ChildEvent, now: float) -> list[Action]:
        if isinstance(event, Exited):
            return self._ended(event, now)
        if isinstance(event.report, Ready):
            self._ready_since[event.child] = now
        return []

    def tick(self, now: float) -> list[Action]:
        """The parts whose time has come."""
        return [StartAgain(name) for name in self._restarts.expired(now)]

    def next_deadline(self) -> float | None:
        return self._restarts.next_deadline()

    def _ended(self, event: Exited, now: float) -> list[Action]:
        part = self._parts[event.child]
        if not self._started:
            return [GiveUp(f"{part.name} ended: {event.account}", BAD_FLAG if event.status == BAD_FLAG else 1)]
        if event.status == 0 and part.drains:
            del self._parts[part.name]
            return [Notice(part.name, "has left as it was told, and is not started again", event.account)]
        if event.status == BAD_FLAG:
            return self._cannot_run(part, event)
        backoff_s = self._next_backoff_s(part.name, now)
        self._restarts.set(part.name, now + backoff_s)
        return [Notice(part.name, f"ended, and is started again in {backoff_s:g} s", event.account)]

    def _cannot_run(self, part: SupervisedChild, event: Exited) -> list[Action]:
        del self._parts[part.name]
        if any(other.role == part.role for other in self._parts.values()):
            return [Notice(part.name, "CANNOT RUN as it was started, and is not started again", event.account)]
        return [GiveUp(f"no {part.role} is left: {part.name} ended: {event.account}", BAD_FLAG)]

    def _next_backoff_s(self, name: str, now: float) -> float:
        since = self._ready_since.pop(name, now)
        backoff_s = FIRST_BACKOFF_S if now - since >= STEADY_S else self._backoff_s.get(name, FIRST_BACKOFF_S)
        self._backoff_s[name] = min(2 * backoff_s, LONGEST_BACKOFF_S)
        return backoff_s
