"""The deadline wheel: what must happen by when, in one process.

Owns the times. Reads no clock: the time is an argument. Every deadline has a key, and setting it again moves it.
"""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

SPARE_ENTRIES = 64

K = TypeVar("K", bound=Hashable)


def earliest(*deadlines: float | None) -> float | None:
    """The earliest of some deadlines, or None when there is none."""
    return min((at for at in deadlines if at is not None), default=None)


class DeadlineWheel(Generic[K]):
    """Keyed deadlines; O(log n) to set, O(1) to clear, both amortized.

    A deadline that is moved or cleared leaves a stale entry in the heap. Stale entries are swept out when they outnumber the
    others, so memory depends on the number of deadlines, not on how often one is moved.
    """

    def __init__(self) -> None:
        self._at: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: K) -> bool:
        return key in self._at

    def set(self, key: K, at_s: float) -> None:
        self._serial += 1
        self._at[key] = (at_s, self._serial)
        heapq.heappush(self._heap, (at_s, self._serial, key))
        if len(self._heap) > 2 * len(self._at) + SPARE_ENTRIES:
            self._heap = [(at, serial, key) for key, (at, serial) in self._at.items()]
            heapq.heapify(self._heap)

    def hasten(self, key: K, at_s: float) -> None:
        """Bring a deadline forward to `at_s`, if there is one and it is later."""
        known = self._at.get(key)
        if known is not None and at_s < known[0]:
            self.set(key, at_s)

    def clear(self, key: K) -> None:
        """Forget the deadline. It may already have passed, or never have been set."""
        self._at.pop(key, None)

    def next_deadline(self) -> float | None:
        """When the earliest deadline passes, or None when there is none."""
        while self._heap:
            at_s, serial, key = self._heap[0]
            known = self._at.get(key)
            if known is not None and known[1] == serial:
                return at_s
            heapq.heappop(self._heap)
        return None

    def expired(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline has passed, earliest first."""
        keys: list[K] = []
        if not self._heap or self._heap[0][0] > now:
            return keys  # a stale entry is never later than the true deadline
        while (at := self.next_deadline()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._at[key]
            keys.append(key)
        return keys
