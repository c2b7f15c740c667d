"""The ring of consistent hashing (Karger et al. 1997): every key has an order of the members, of which all routers agree.

Owns the points of the members. Each has many, so that all get equal parts; a member that joins or leaves moves only the keys that
it gets or had. Pure: it depends on names only. Does not know what a key stands for.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from hashlib import shake_128

from router.candidates import Pool
from router.members import Member

POINTS = 64
"""Of each member. The parts of members then differ by an eighth (the root of 1 / POINTS)."""
POINT_BYTES = 16
"""So many that no two points are ever equal."""
CIRCLE = 1 << 8 * POINT_BYTES


class Ring:
    """Members and their points, in the order of the points."""

    def __init__(self) -> None:
        self._points: list[int] = []
        self._owners: dict[int, Member] = {}
        self._members: dict[Member, list[int]] = {}
        """The points of each, in order."""

    def become(self, members: Iterable[Member]) -> None:
        """From now on it has these members. The points are sorted once, whoever came and went."""
        wanted = set(members)
        for gone in self._members.keys() - wanted:  # first: a later life of an instance has the points of the former
            for point in self._members.pop(gone):
                del self._owners[point]
        self._points = [point for point in self._points if point in self._owners]
        for new in wanted - self._members.keys():
            points = self._members[new] = sorted(_hash(new.info.id, POINTS))
            self._owners.update(dict.fromkeys(points, new))
            self._points += points
        self._points.sort()

    def order(self, key: str, pool: Pool) -> Iterator[Member]:
        """Every member once, in the order of this key; if few are in the pool, only these."""
        (start,) = _hash(key, 1)
        if len(pool) ** 2 < len(self._members):
            yield from sorted(self._members.keys() & set(pool), key=lambda member: _distance(self._members[member], start))
            return
        points, seen = self._points, set[Member]()
        first = bisect_left(points, start)
        for number in range(first, first + len(points)):
            owner = self._owners[points[number % len(points)]]
            if owner not in seen:
                seen.add(owner)
                yield owner


def _distance(points: list[int], start: int) -> int:
    """From the start to the first of these points that lies behind it. points: in order."""
    point = points[bisect_left(points, start) % len(points)]
    return (point - start) % CIRCLE


def _hash(text: str, count: int) -> list[int]:
    """So many points."""
    digest = shake_128(text.encode()).digest(count * POINT_BYTES)
    return [int.from_bytes(digest[at : at + POINT_BYTES], "big") for at in range(0, len(digest), POINT_BYTES)]
