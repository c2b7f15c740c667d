"""What has happened to the fleet: who joined, left, changed or was refused, and why.

Owns the latest events, for `/cluster` and the live page, and their lines in the router's log. Told
by whoever decides; tells nobody. Knows no requests, and costs nothing for them. Reads no clock.
"""

import logging
from collections import deque
from typing import Literal, TypeAlias

import msgspec

MOST_KEPT = 256
MOST_LOGGED = 20
"""How many events of one second get a line of their own: a thousand instances may join at once."""
MOST_WARNED = 200
"""The same of warnings, which are not to be lost among those."""
WHO_CHARS = 128
TEXT_CHARS = 200

EventKind: TypeAlias = Literal["joined", "left", "state", "role", "resumed", "refused"]
_log = logging.getLogger(__name__)


class FleetEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened."""

    at: float
    """UNIX time."""
    kind: EventKind
    who: str
    """The instance; "": none in particular."""
    text: str


class FleetHistory:
    """The latest MOST_KEPT events, the oldest first. unix_s: what to add to the caller's times."""

    def __init__(self, unix_s: float = 0.0) -> None:
        self.events: deque[FleetEvent] = deque(maxlen=MOST_KEPT)
        self._unix_s = unix_s
        self._second = 0
        self._logged = 0
        """How many events of that second were told."""

    def tell(self, kind: EventKind, who: str, text: str, now: float, *, level: int = logging.INFO) -> None:
        """Keep the event, and write it into the log. level: of `logging`; NOTSET writes nothing."""
        at = now + self._unix_s
        event = FleetEvent(round(at, 3), kind, who[:WHO_CHARS], text[:TEXT_CHARS])
        self.events.append(event)
        if level == logging.NOTSET:
            return
        if int(at) != self._second:
            if self._logged > MOST_LOGGED:
                more = self._logged - MOST_LOGGED
                _log.info("%d more changes of the fleet in that second: see /cluster", more)
            self._second = int(at)
            self._logged = 0
        self._logged += 1
        if self._logged <= (MOST_WARNED if level >= logging.WARNING else MOST_LOGGED):
            _log.log(level, "%s %s", event.who, event.text)
