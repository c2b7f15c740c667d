"""A set from which a random item is drawn in constant time.

Owns the order of its items, which says nothing. Knows no members.
"""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class SampleSet(Generic[T]):
    """`len` and `[number]` serve to draw: numbers below `len` name each item once, until the set changes."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._at: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._at

    def __getitem__(self, number: int) -> T:
        return self._items[number]

    def add(self, item: T) -> None:
        """Idempotent."""
        if item not in self._at:
            self._at[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: T) -> None:
        """Idempotent. The last item takes its place."""
        place = self._at.pop(item, None)
        if place is None:
            return
        last = self._items.pop()
        if place < len(self._items):
            self._items[place] = last
            self._at[last] = place
