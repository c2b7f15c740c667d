"""The watch over the detokenizer, through which every token passes: whether it lives, and what it said of itself last.

Owns the deadline of its silence. Does not know requests, text or processes: whoever started the detokenizer starts it again.
"""

from common.messages import DetokenizerHeartbeat

LEAST_S = 3.0
"""It beats once in a second, however often instances do."""


class DetokenizerWatch:
    """dead_after_s: silence for so long, after it was first heard, is taken for death."""

    def __init__(self, dead_after_s: float) -> None:
        self.dead_after_s = max(dead_after_s, LEAST_S)
        self._silent_at_s: float | None = None
        self.last: DetokenizerHeartbeat | None = None
        self.silent = False

    def heard(self, heartbeat: DetokenizerHeartbeat, now: float) -> bool:
        """Take in a heartbeat; whether it ends a silence."""
        was_silent, self.silent = self.silent, False
        self.last, self._silent_at_s = heartbeat, now + self.dead_after_s
        return was_silent

    def tick(self, now: float) -> None:
        if self._silent_at_s is not None and now >= self._silent_at_s:
            self.silent, self._silent_at_s = True, None

    def next_deadline(self) -> float | None:
        return self._silent_at_s
