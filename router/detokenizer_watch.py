"""The watch over the detokenizer, through which every token passes: whether it is alive, and what it last reported.

Owns the deadline of its silence. Does not know requests, text or processes: the launcher restarts a dead detokenizer.
"""

import math

from common.messages import DetokenizerHeartbeat

LEAST_S = 3.0
"""It sends a heartbeat every second, however often instances send theirs."""


class DetokenizerWatch:
    """dead_after_s: how long the detokenizer, once heard, may be silent before it is taken for dead.

    silent: it is taken for dead. silent_at_s: when it will be unless it is heard; None before its first heartbeat, and while it
    is silent. last: its last report. heard_s: when it was last heard; infinite before its first heartbeat, when nothing can be
    said, and minus infinite while it is silent.
    """

    def __init__(self, dead_after_s: float) -> None:
        self.dead_after_s = max(dead_after_s, LEAST_S)
        self.silent_at_s: float | None = None
        self.last: DetokenizerHeartbeat | None = None
        self.silent = False
        self.heard_s = math.inf
        self._excused = False
        """It has got more time since it was last heard."""

    def heard(self, heartbeat: DetokenizerHeartbeat, now: float) -> bool:
        """Take in a heartbeat. Returns whether it ends a silence."""
        was_silent, self.silent, self._excused = self.silent, False, False
        self.last, self.silent_at_s, self.heard_s = heartbeat, now + self.dead_after_s, now
        return was_silent

    def excuse(self, now: float) -> None:
        """This router was held up: a detokenizer whose time is over gets as long as it takes to be heard, once in a silence."""
        if self.silent_at_s is not None and now >= self.silent_at_s and not self._excused:
            self.silent_at_s, self._excused = now + LEAST_S, True

    def tick(self, now: float) -> None:
        if self.silent_at_s is not None and now >= self.silent_at_s:
            self.silent, self.silent_at_s, self.heard_s = True, None, -math.inf
