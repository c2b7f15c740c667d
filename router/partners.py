"""Partners: which prefill instances link to which decode instances when not every pair may.

Owns the choice. Pure and deterministic: it depends on names only, so several routers over one fleet choose alike. Knows no
messages, loads or links.

Each pair of names has a rank, a hash of both (rendezvous hashing, Thaler and Ravishankar 1998). The favourites of an instance are
those of the other role with the highest ranks. A pair is linked when the decode instance is among the `limit` favourites of the
prefill instance, or the prefill instance among the AT_LEAST favourites of the decode instance. So everyone has partners, one that
dies is replaced by the next favourite, and one that joins changes little. A partner that a newcomer displaces is kept, because
its link is there already. When a prefill instance has more than twice the limit, those of the lowest ranks go that are too
many.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.ids import InstanceId, Role

AT_LEAST = 4
"""A decode instance has so many partners, if there are so many."""

CELLS_AT_ONCE = 2**14
"""So many pairs one call of `settle` looks at, from either side: a millisecond each."""
ABOVE_ALL = np.uint64(2**64 - 1)

Ranks = NDArray[np.uint64]
Flags = NDArray[np.bool_]
Places = NDArray[np.intp]


class Pair(NamedTuple):
    prefill: InstanceId
    decode: InstanceId


@dataclass(frozen=True, slots=True)
class Regrouping:
    """made: pairs that are linked from now on. dropped: pairs of which both are still there, and that are linked no longer.
    settled: nothing is left to do."""

    made: list[Pair]
    dropped: list[Pair]
    settled: bool


class _Side:
    """The instances of one role. Each keeps its place, a row or column of the tables, until it leaves.

    names, hashes, least, stale: by place; a free place keeps the name of who was there. hashes: 0 where the place is free.
    least: the lowest rank among its favourites; ABOVE_ALL before they are chosen. stale: its favourites may have changed.
    """

    def __init__(self) -> None:
        self.at: dict[InstanceId, int] = {}
        self.names: list[InstanceId] = []
        self.hashes: Ranks = np.zeros(0, dtype=np.uint64)
        self.least: Ranks = np.zeros(0, dtype=np.uint64)
        self.stale: Flags = np.zeros(0, dtype=bool)
        self._free: list[int] = []

    def take(self, name: InstanceId) -> int:
        if self._free:
            place = self._free.pop()
            self.names[place] = name
        else:
            place = len(self.names)
            self.names.append(name)
            self._make_room()
        self.at[name] = place
        self.hashes[place] = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") | 1
        self.stale[place] = True
        return place

    def leave(self, name: InstanceId) -> int:
        place = self.at.pop(name)
        self._free.append(place)
        self.hashes[place], self.least[place], self.stale[place] = 0, ABOVE_ALL, False
        return place

    def take_stale(self, most: int) -> Places:
        """Places that are stale, and are to be brought up to date now."""
        places = np.flatnonzero(self.stale)[: max(1, most)]
        self.stale[places] = False
        return places

    def _make_room(self) -> None:
        """Room doubles when it is full."""
        more = 0 if len(self.names) <= len(self.hashes) else max(len(self.hashes), 16)
        if more:
            self.hashes, self.stale = np.pad(self.hashes, (0, more)), np.pad(self.stale, (0, more))
            self.least = np.pad(self.least, (0, more), constant_values=ABOVE_ALL)


class Partners:
    """limit: favourites of a prefill instance; 0: all pairs are linked."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._prefill, self._decode = _Side(), _Side()
        self._ranks: Ranks = np.zeros((0, 0), dtype=np.uint64)
        """[prefill places, decode places]; 0 where one of them is free."""
        self._linked: Flags = np.zeros((0, 0), dtype=bool)
        """[prefill places, decode places]."""

    def join(self, name: InstanceId, role: Role) -> None:
        """`settle` makes its pairs."""
        ours, theirs = self._sides(role)
        place = ours.take(name)
        self._make_room()
        hashes = ours.hashes[place : place + 1]
        ranks = _mix(hashes ^ _turned(theirs.hashes) if role == "prefill" else theirs.hashes ^ _turned(hashes))
        self._set(role, place, np.where(theirs.hashes > 0, ranks, np.uint64(0)))

    def leave(self, name: InstanceId, role: Role) -> None:
        """Its pairs are gone at once; `settle` makes those that take their place."""
        ours, _ = self._sides(role)
        self._set(role, ours.leave(name), np.zeros(1, dtype=np.uint64))

    def settle(self) -> Regrouping:
        """Make the pairs that there should be, and drop those for which there is no room: as many as one call may. Instances may
        come and go before the next call.

        Favourites of decode instances are chosen first: a prefill instance with too many partners keeps those that want it."""
        rows, columns = self._ranks.shape
        self._choose_for_decode(self._decode.take_stale(CELLS_AT_ONCE // max(1, rows)))
        if self._decode.stale.any():
            return Regrouping([], [], settled=False)
        places = self._prefill.take_stale(CELLS_AT_ONCE // max(1, columns))
        had, linked = self._linked[places], self._link(places)
        made, dropped = self._pairs(places, linked & ~had), self._pairs(places, had & ~linked)
        return Regrouping(made, dropped, settled=not self._prefill.stale.any())

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _sides(self, role: Role) -> tuple[_Side, _Side]:
        """Those of this role, and those of the other."""
        return (self._prefill, self._decode) if role == "prefill" else (self._decode, self._prefill)

    def _choose_for_decode(self, places: Places) -> None:
        """Choose the favourites of these decode instances. The prefill instances whom that concerns are stale then."""
        ranks, before = self._ranks[:, places], self._decode.least[places]
        now = self._decode.least[places] = _least(ranks.T, AT_LEAST)
        self._prefill.stale |= ((ranks > 0) & ((ranks >= before) != (ranks >= now))).any(axis=1)

    def _link(self, places: Places) -> Flags:
        """Choose the favourites of these prefill instances, and link them. Returns with whom each is linked now."""
        ranks = self._ranks[places]
        least = self._prefill.least[places] = _least(ranks, self._limit or ranks.shape[1])
        wanted = (ranks > 0) & ((ranks >= least[:, None]) | (ranks >= self._decode.least))
        linked: Flags = self._linked[places] | wanted
        too_many = linked.sum(axis=1) - 2 * self._limit if self._limit else np.zeros(len(places), dtype=np.intp)
        for row in np.flatnonzero(too_many > 0):
            spare = np.flatnonzero(linked[row] & ~wanted[row])
            linked[row, spare[np.argsort(ranks[row, spare])[: too_many[row]]]] = False
        self._linked[places] = linked
        return linked

    def _pairs(self, places: Places, table: Flags) -> list[Pair]:
        """table: [places, decode places]."""
        prefill, decode = self._prefill.names, self._decode.names
        rows, columns = np.nonzero(table)
        return [Pair(prefill[row], decode[column]) for row, column in zip(places[rows].tolist(), columns.tolist(), strict=True)]

    def _set(self, role: Role, place: int, ranks: Ranks) -> None:
        """A new instance, or none, in this place. It was or is now among the favourites of those who are stale then."""
        line = (place, slice(None)) if role == "prefill" else (slice(None), place)
        _, theirs = self._sides(role)
        theirs.stale |= np.maximum(self._ranks[line], ranks) >= theirs.least
        self._ranks[line] = ranks
        self._linked[line] = False

    def _make_room(self) -> None:
        shape = len(self._prefill.hashes), len(self._decode.hashes)
        if shape != self._ranks.shape:
            more = [(0, new - old) for new, old in zip(shape, self._ranks.shape, strict=True)]
            self._ranks, self._linked = np.pad(self._ranks, more), np.pad(self._linked, more)


def _least(ranks: Ranks, most: int) -> Ranks:
    """The rank of the last of the `most` highest in each row; 0 where the row is not that long."""
    columns = ranks.shape[1]
    if columns <= most:
        return np.zeros(len(ranks), dtype=np.uint64)
    least: Ranks = np.partition(ranks, columns - most, axis=1)[:, columns - most]
    return least


def _turned(hashes: Ranks) -> Ranks:
    """So that two names rank differently when their roles are exchanged."""
    return (hashes << np.uint64(31)) | (hashes >> np.uint64(33))


def _mix(bits: Ranks) -> Ranks:
    """Spread the bits (the finalizer of splitmix64, Steele et al. 2014). Never 0."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))) | np.uint64(1)
