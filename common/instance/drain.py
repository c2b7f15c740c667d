"""How an instance leaves: when its drain began, and when it stops waiting.

Owns the times of a drain. Knows nothing of requests: the request table asks.

    begin ── requests may finish ──► timeout_s: they are ended ── their transfers finish ──► + LAST_S: over in any case
"""

from common.errors import Unavailable
from common.ids import InstanceId

LAST_S = 25.0
"""Longer than any transfer takes to end, and than it takes to give up a silent peer."""


class Drainage:
    """timeout_s: how long running requests may go on."""

    def __init__(self, instance: InstanceId, timeout_s: float) -> None:
        self._instance = instance
        self._timeout_s = timeout_s
        self._next_s: float | None = None
        self._handed_off = False
        self.began = False
        self.is_over = False
        """The instance waits for nothing more."""

    def refusal(self) -> Unavailable:
        """The error for a request that comes too late or still runs when the time is over. Each gets its own: one that is raised
        holds what its callers held."""
        return Unavailable(f"{self._instance} is leaving the fleet")

    def begin(self, now: float) -> None:
        """Idempotent."""
        if not self.began:
            self.began = True
            self._next_s = now + self._timeout_s

    def tick(self, now: float) -> bool:
        """Whether to end the requests that still run; true once."""
        if self._next_s is None or now < self._next_s:
            return False
        if self._handed_off:
            self.is_over, self._next_s = True, None
            return False
        self._handed_off, self._next_s = True, now + LAST_S
        return True

    def next_deadline(self) -> float | None:
        return self._next_s
