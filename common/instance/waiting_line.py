"""The waiting line: who waits on an instance, and whose turn is next.

Owns the order, and what each owner of requests holds. Knows pages, rows and steps only as numbers, and no time.

More urgent requests are first. Among equally urgent ones owners take turns: the next is the one that holds the least of the
instance, and among those that hold the same, the one that has been given the least work. What one owner has waiting stands by
age, and among equals first come, first served. A request that is resumed keeps its age. So with one owner the line is in the
order of ranks.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Set
from heapq import heapify, heappop, heapreplace
from typing import Generic, NamedTuple, Protocol, TypeVar

from common.ids import AttemptId

PATIENCE_S = 2.0
"""Nobody whose turn is later passes a request that has waited this long."""
REMEMBERED = 1024
"""The work of so many owners, those with the latest turns."""
SHARE = 4


def has_place(free: int, mine: int, count: int = 1) -> bool:
    """Whether an owner that has `mine` places may take `count` more of those that are free: it may have fewer than SHARE times as
    many as are free then. So some stay free for an owner that comes later (dynamic thresholds, see `router/requests.py`)."""
    return mine + count - 1 < SHARE * (free - count + 1)  # the last of them is judged as if the others were taken


class Rank(NamedTuple):
    """Lower ranks are served first. arrived_s: when the client's request arrived at the router, on the instance's clock."""

    priority: int
    arrived_s: float


class Owned(Protocol):
    """What waits, or holds a part of the instance."""

    key: AttemptId
    rank: Rank
    owner: str
    held_rows: int
    held_pages: int


T = TypeVar("T", bound=Owned)


class Shares:
    """What each owner holds of an instance, and the work that it was given while others waited. rows, pages: of the instance.

    An owner that had nothing waiting gets no credit for that: its work is then counted as that of the one whose turn was last
    (start-time fair queueing, Goyal et al. 1996).
    """

    def __init__(self, rows: int, pages: int) -> None:
        self._most_rows, self._most_pages = rows, pages
        self.rows: Counter[str] = Counter()
        self.pages: Counter[str] = Counter()
        self._work: dict[str, int] = {}
        """The one whose turn was last is the last."""
        self._last_turn = 0

    def hold(self, request: Owned, rows: int, pages: int) -> None:
        """From now on the request holds so much. pages: those that nobody else has."""
        owner = request.owner
        for counted, more in ((self.rows, rows - request.held_rows), (self.pages, pages - request.held_pages)):
            counted[owner] += more
            if not counted[owner]:
                del counted[owner]
        request.held_rows, request.held_pages = rows, pages

    def of(self, owner: str, rows: int = 0, pages: int = 0) -> int:
        """The owner's part of the rows or the pages, the larger of the two, if it had so many more. A part is counted in
        1 / (rows * pages) of the instance."""
        return max((self.rows[owner] + rows) * self._most_pages, (self.pages[owner] + pages) * self._most_rows)

    def work_of(self, owner: str) -> int:
        return max(self._work.get(owner, 0), self._last_turn)

    def given(self, owner: str, tokens: int) -> None:
        """It was the owner's turn, and this was the work."""
        self._last_turn = max(self._work.pop(owner, 0), self._last_turn)
        self._work[owner] = self._last_turn + tokens
        if len(self._work) > REMEMBERED:
            del self._work[next(iter(self._work))]


class _Place(NamedTuple, Generic[T]):
    rank: Rank
    serial: int
    item: T


class _Turn(NamedTuple, Generic[T]):
    """When the first request of an owner is next: the lowest is. held: of the instance. work: that the owner was given."""

    priority: int
    held: int
    work: int
    place: _Place[T]


class WaitingLine(Generic[T]):
    """Items by key, in the order of their turns. Joining and leaving move O(n) pointers; n is bounded and small."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._places: dict[str, list[_Place[T]]] = {}
        """By owner; of those that wait."""
        self.owners: Set[str] = self._places.keys()
        """Those that wait, at any time."""
        self._waiting: dict[AttemptId, _Place[T]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        """Owner by owner, each in order. This is a snapshot, so the line may change meanwhile."""
        return iter([place.item for places in self._places.values() for place in places])

    def of(self, owner: str) -> int:
        """How many requests of this owner wait."""
        return len(self._places.get(owner, ()))

    def turns(self, passed: Set[str] = frozenset()) -> Iterator[T]:
        """The line in order, while requests leave it: what is held is looked at anew for each turn. passed: owners whose requests
        are left out; more may be added meanwhile."""
        heap = [(self._turn(places[0]), 0, owner) for owner, places in self._places.items()]
        heapify(heap)
        while heap:
            turn, at, owner = heap[0]
            places = self._places[owner]
            if owner not in passed:
                yield turn.place.item
                at += at < len(places) and places[at] is turn.place
            if owner in passed or at >= len(places):
                heappop(heap)
            else:
                heapreplace(heap, (self._turn(places[at]), at, owner))

    def join(self, item: T) -> None:
        assert item.key not in self._waiting, f"{item.key} waits already"
        self._serial += 1
        self._waiting[item.key] = place = _Place(item.rank, self._serial, item)
        insort(self._places.setdefault(item.owner, []), place)

    def leave(self, key: AttemptId) -> bool:
        """True when the key was waiting."""
        place = self._waiting.pop(key, None)
        if place is None:
            return False
        places = self._places[place.item.owner]
        del places[bisect_left(places, place)]
        if not places:
            del self._places[place.item.owner]
        return True

    def first(self, test: Callable[[T], bool]) -> T | None:
        """The first one that passes the test."""
        return next(filter(test, self.turns()), None)

    def is_before(self, away: T, item: T) -> bool:
        """Whether a request that is away would be served before the one that waits."""
        if away.owner == item.owner:
            return away.rank < item.rank
        return self._turn(_Place(away.rank, 0, away)) < self._turn(self._waiting[item.key])

    def _turn(self, place: _Place[T]) -> _Turn[T]:
        owner = place.item.owner
        return _Turn(place.rank.priority, self._shares.of(owner), self._shares.work_of(owner), place)
