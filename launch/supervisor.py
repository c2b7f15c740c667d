"""Supervision: what happens to a part that ended. It is restarted, after a longer pause each time, or stays away.

Owns the back-off. Reads no clock and knows no process: fed with events of children and the time, it calls what starts a part and
what tells people. Does not know what a part is for.

    first start   when any part ends, everything ends: a bad flag must not loop
    after it      status 0 of a part that drains    it was told to leave: not started again
                  BAD_FLAG                          it can never run as it is: not started again, and the end of all when
                                                    nobody else has its role
                  anything else, also too little    started again after 0.5 s, 1 s, … 30 s; from 0.5 s again when it had
                  free memory                       been ready for a minute
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.deadlines import DeadlineWheel
from common.errors import TandemError
from common.processes.child import Exited, Ready
from launch.child import BAD_FLAG, RoleEvent

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
STEADY_S = 60.0
"""A part that was ready for so long is well: its next end is the first of a new row."""


class GivenUp(TandemError):
    """The whole cannot go on; the message says why. exit_status: of the whole, BAD_FLAG or 1."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclass(frozen=True, slots=True)
class SupervisedChild:
    """A child that is to live."""

    name: str
    role: str
    drains: bool
    """It ends with status 0 when it was told to leave in order, and only then."""

    @property
    def kind(self) -> str:
        """Those of one kind can stand in for each other: who serves whole requests too also decodes."""
        return "decode" if self.role == "both" else self.role


class Supervisor:
    """The parts of a whole, each of which somebody else starts for the first time.

    start: starts the part of that name again, as it was started before; raises OSError when it cannot. tell: what became of the
    part of that name, what is known of the reason in one or more lines, and the level at which logs have it.
    """

    def __init__(
        self, parts: Sequence[SupervisedChild], start: Callable[[str], object], tell: Callable[[str, str, str, int], object]
    ) -> None:
        self._parts = {part.name: part for part in parts}
        self._start = start
        self._tell = tell
        self._started = False
        self._ready_since: dict[str, float] = {}
        self._backoff_s: dict[str, float] = {}
        self._restarts: DeadlineWheel[str] = DeadlineWheel()

    @property
    def names(self) -> list[str]:
        """Those that are to live."""
        return list(self._parts)

    def keep(self, part: SupervisedChild) -> None:
        """One more, which somebody else starts for the first time."""
        self._parts[part.name] = part

    def started(self) -> None:
        """The first start is complete: from now on what ends is started again."""
        self._started = True

    def turn(self, event: RoleEvent | None, now: float) -> None:
        """Take in an event, if there is one, and start the parts whose time has come. Raises GivenUp."""
        if isinstance(event, Exited):
            self._ended(event, now)
        elif event is not None and isinstance(event.report, Ready):
            self._ready_since[event.child] = now
        for name in self._restarts.expired(now):
            try:
                self._start(name)
            except OSError as error:  # it counts as one that has ended
                self._ended(Exited(name, 1, f"it cannot be started: {error}"), now)

    def next_deadline(self) -> float | None:
        return self._restarts.next_deadline()

    def _ended(self, event: Exited, now: float) -> None:
        """Raises GivenUp."""
        part, reason = self._parts[event.child], f"{event.child} ended: {event.account}"
        level = logging.ERROR
        if not self._started:
            raise GivenUp(reason, BAD_FLAG if event.status == BAD_FLAG else 1)
        if event.status == 0 and part.drains:
            del self._parts[part.name]
            became, level = "has left as it was told, and is not started again", logging.INFO
        elif event.status == BAD_FLAG:
            del self._parts[part.name]
            if all(other.kind != part.kind for other in self._parts.values()):
                raise GivenUp(f"no {part.role} is left: {reason}", BAD_FLAG)
            became = "CANNOT RUN as it was started, and is not started again"
        else:
            since = self._ready_since.pop(part.name, now)
            backoff_s = FIRST_BACKOFF_S if now - since >= STEADY_S else self._backoff_s.get(part.name, FIRST_BACKOFF_S)
            self._backoff_s[part.name] = min(2 * backoff_s, LONGEST_BACKOFF_S)
            self._restarts.set(part.name, now + backoff_s)
            became = f"ended, and is started again in {backoff_s:g} s"
        self._tell(part.name, became, event.account, level)
