"""How an instance leaves: when it began to, and when it stops waiting.

Owns the times of a drain. Knows nothing of requests: the scheduler asks.

    begin ── what runs may finish ──► timeout_s: it is handed off ── its transfers end ──► + LAST_S: it is over anyway
"""

from common.errors import Unavailable
from common.ids import InstanceId

LAST_S = 25.0
"""Longer than any transfer takes to end, or a silent peer to be given up."""


class Drainage:
    """timeout_s: how long what runs may go on. refusal: what those are told that come too late or are handed off."""

    def __init__(self, instance: InstanceId, timeout_s: float) -> None:
        self.refusal = Unavailable(f"{instance} is leaving the fleet")
        self._timeout_s = timeout_s
        self._next_s: float | None = None
        self._handed_off = False
        self.began = False
        self.is_over = False
        """Nothing more is waited for."""

    def begin(self, now: float) -> None:
        """Idempotent."""
        if not self.began:
            self.began = True
            self._next_s = now + self._timeout_s

    def tick(self, now: float) -> bool:
        """Whether what still runs is to be handed off now; true once."""
        if self._next_s is None or now < self._next_s:
            return False
        if self._handed_off:
            self.is_over, self._next_s = True, None
            return False
        self._handed_off, self._next_s = True, now + LAST_S
        return True

    def next_deadline(self) -> float | None:
        return self._next_s
