"""The waiting line: who waits on an instance, and whose turn is next.

Owns the order. More urgent requests are first. Among equally urgent ones owners take turns: the next is the one that holds the
least of the instance, and among those that hold the same, the one that has been given the least work (`Shares`). What one owner
has waiting stands by age, and among equals first come, first served. A request that is resumed keeps its age. So with one owner
the line is in the order of ranks. Knows nothing of pages, rows or time.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Set
from heapq import heapify, heappop, heapreplace
from typing import Generic, NamedTuple, TypeVar

from common.ids import Key
from common.instance.shares import Owned, Shares

T = TypeVar("T", bound=Owned)


class Rank(NamedTuple):
    """Lower ranks are served first. arrived_s: when the client's request arrived at the router, on the instance's clock."""

    priority: int
    arrived_s: float


class _Place(NamedTuple):
    rank: Rank
    serial: int
    key: Key


class Turn(NamedTuple):
    """When the first request of an owner is next: the lowest is. held: of the instance. work: that the owner was given."""

    priority: int
    held: int
    work: int
    place: _Place


class Turns(Generic[T]):
    """The line in order, while requests leave it: what is held is looked at anew for each turn."""

    def __init__(self, places: dict[str, list[_Place]], items: dict[Key, T], turn: Callable[[str, _Place], Turn]) -> None:
        self._places, self._items, self._turn = places, items, turn
        self._now: str | None = None
        self._dropped: str | None = None

    def drop(self) -> None:
        """No more of the owner whose turn it is."""
        self._dropped = self._now

    def __iter__(self) -> Iterator[T]:
        heap = [(self._turn(owner, places[0]), 0, owner) for owner, places in self._places.items()]
        heapify(heap)
        while heap:
            turn, at, owner = heap[0]
            self._now, places = owner, self._places[owner]
            yield self._items[turn.place.key]
            at += at < len(places) and places[at] is turn.place
            if self._dropped == owner or at >= len(places):
                heappop(heap)
            else:
                heapreplace(heap, (self._turn(owner, places[at]), at, owner))


class WaitingLine(Generic[T]):
    """Items by key, in the order of their turns. Joining and leaving move O(n) pointers; n is bounded and small."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._places: dict[str, list[_Place]] = {}
        """By owner; of those that wait."""
        self._items: dict[Key, T] = {}
        self._ranks: dict[Key, _Place] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """Owner by owner, each in order. This is a snapshot, so the line may change meanwhile."""
        return iter([self._items[place.key] for places in self._places.values() for place in places])

    @property
    def owners(self) -> Set[str]:
        """Those that wait."""
        return self._places.keys()

    def of(self, owner: str) -> int:
        """How many requests of this owner wait."""
        return len(self._places.get(owner, ()))

    def turns(self) -> Turns[T]:
        return Turns(self._places, self._items, self._turn)

    def join(self, key: Key, rank: Rank, item: T) -> None:
        assert key not in self._items, f"{key} waits already"
        self._serial += 1
        place = _Place(rank, self._serial, key)
        insort(self._places.setdefault(item.owner, []), place)
        self._items[key], self._ranks[key] = item, place

    def leave(self, key: Key) -> bool:
        """True when the key was waiting."""
        item = self._items.pop(key, None)
        if item is None:
            return False
        places = self._places[item.owner]
        del places[bisect_left(places, self._ranks.pop(key))]
        if not places:
            del self._places[item.owner]
        return True

    def head(self) -> T | None:
        return next(iter(self.turns()), None)

    def first(self, test: Callable[[T], bool]) -> T | None:
        """The first one that passes the test."""
        return next(filter(test, self.turns()), None)

    def is_before(self, owner: str, rank: Rank, item: T) -> bool:
        """Whether a request of this owner and rank is served before the one that waits."""
        place = self._ranks[item.key]
        if owner == item.owner:
            return rank < place.rank
        return self._turn(owner, _Place(rank, 0, item.key)) < self._turn(item.owner, place)

    def _turn(self, owner: str, place: _Place) -> Turn:
        return Turn(place.rank.priority, self._shares.of(owner), self._shares.work_of(owner), place)
