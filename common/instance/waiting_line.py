"""The waiting line: who waits on an instance, the most urgent first.

Owns the order: by priority, then by age; among equals first come, first served. Knows nothing of pages, rows or time. A request
that is resumed keeps its age, so on every instance it stands before all that came after it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from common.ids import Key

T = TypeVar("T")


class Rank(NamedTuple):
    """Lower ranks are served first. arrived_s: when the client's request arrived at the router, on the instance's clock."""

    priority: int
    arrived_s: float


class _Place(NamedTuple):
    rank: Rank
    serial: int
    key: Key


class WaitingLine(Generic[T]):
    """Items by key, in the order of their ranks. Joining and leaving move O(n) pointers; n is bounded and small."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._items: dict[Key, tuple[_Place, T]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """In order. This is a snapshot, so the line may change meanwhile."""
        return iter([self._items[place.key][1] for place in self._places])

    def join(self, key: Key, rank: Rank, item: T) -> None:
        assert key not in self._items, f"{key} waits already"
        self._serial += 1
        place = _Place(rank, self._serial, key)
        insort(self._places, place)
        self._items[key] = (place, item)

    def leave(self, key: Key) -> bool:
        """True when the key was waiting."""
        known = self._items.pop(key, None)
        if known is None:
            return False
        del self._places[bisect_left(self._places, known[0])]
        return True

    def head(self) -> T | None:
        return self._items[self._places[0].key][1] if self._places else None

    def first(self, test: Callable[[T], bool]) -> T | None:
        """The first one that passes the test."""
        return next((item for place in self._places if test(item := self._items[place.key][1])), None)
