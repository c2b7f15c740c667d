"""The ring of consistent hashing (Karger et al. 1997): every key has an order of the members, of which all routers agree.

Owns the points of the members. Each has many, so that all get equal parts; a member that joins or leaves moves only the keys that
it gets or had. Pure: it depends on names only. Does not know what a key stands for.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from router.members import Member

POINTS = 64
"""Of each member. The parts of members then differ by an eighth (the root of 1 / POINTS)."""


class Ring:
    """Members and their points, in the order of the points."""

    def __init__(self) -> None:
        self._points: list[int] = []
        self._owners: dict[int, Member] = {}
        self._members: set[Member] = set()

    def become(self, members: Iterable[Member]) -> None:
        """From now on it has these members."""
        wanted = set(members)
        for gone in self._members - wanted:  # first: a later life of an instance has the points of the former
            for point in _points(gone):
                del self._owners[point]
                del self._points[bisect_left(self._points, point)]
        for new in wanted - self._members:
            for point in _points(new):
                self._owners[point] = new
                insort(self._points, point)
        self._members = wanted

    def order(self, key: str) -> Iterator[Member]:
        """Every member once, in the order of this key."""
        points, seen = self._points, set[Member]()
        first = bisect_left(points, _hash(key))
        for number in range(first, first + len(points)):
            owner = self._owners[points[number % len(points)]]
            if owner not in seen:
                seen.add(owner)
                yield owner


def _points(member: Member) -> list[int]:
    return [_hash(f"{member.info.id}#{number}") for number in range(POINTS)]


def _hash(text: str) -> int:
    """128 bits: no two points are ever equal."""
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "big")
