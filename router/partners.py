"""Partners: which prefill instances link to which decode instances when not every pair may.

Owns the choice. Pure and deterministic: it depends on names only, so several routers over one fleet choose alike. Knows no
messages, loads or links.

Each pair of names has a rank, a hash of both (rendezvous hashing, Thaler and Ravishankar 1998). The favourites of an instance are
those of the other role with the highest ranks. A pair is linked when the decode instance is among the `limit` favourites of the
prefill instance, or the prefill instance among the AT_LEAST favourites of the decode instance. So everyone has partners, one that
dies is replaced by the next favourite, and one that joins changes little. A partner that a newcomer displaces is kept, because
its link is there already, until the prefill instance has more than twice the limit.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.ids import InstanceId, Role

AT_LEAST = 4
"""A decode instance has so many partners, if there are so many."""

Ranks = NDArray[np.uint64]
Table = NDArray[np.bool_]


class Pair(NamedTuple):
    prefill: InstanceId
    decode: InstanceId


@dataclass(frozen=True, slots=True)
class Regrouping:
    """made: pairs that are linked from now on. dropped: pairs of which both are still there, and that are linked no longer."""

    made: list[Pair]
    dropped: list[Pair]


class _Side:
    """The instances of one role. Each keeps its place, a row or column of the tables, until it leaves."""

    def __init__(self) -> None:
        self.at: dict[InstanceId, int] = {}
        self.names: list[InstanceId] = []
        """By place; a free place keeps the name of who was there."""
        self._free: list[int] = []

    def take(self, name: InstanceId) -> int:
        if self._free:
            place = self._free.pop()
            self.names[place] = name
        else:
            place = len(self.names)
            self.names.append(name)
        self.at[name] = place
        return place

    def leave(self, name: InstanceId) -> int:
        place = self.at.pop(name)
        self._free.append(place)
        return place


class Partners:
    """limit: favourites of a prefill instance; 0: all pairs are linked."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._prefill, self._decode = _Side(), _Side()
        self._hashes: dict[Role, Ranks] = {"prefill": np.zeros(0, dtype=np.uint64), "decode": np.zeros(0, dtype=np.uint64)}
        """By place; 0 where it is free."""
        self._ranks: Ranks = np.zeros((0, 0), dtype=np.uint64)
        """[prefill places, decode places]; 0 where one of them is free."""
        self._linked: Table = np.zeros((0, 0), dtype=bool)

    def join(self, name: InstanceId, role: Role) -> None:
        """`settle` makes its pairs."""
        place = self._side(role).take(name)
        other: Role = "decode" if role == "prefill" else "prefill"
        self._make_room()
        self._hashes[role][place] = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") | 1
        ours, theirs = self._hashes[role][place : place + 1], self._hashes[other]
        ranks = _mix(ours ^ _turned(theirs) if role == "prefill" else theirs ^ _turned(ours))
        self._set(role, place, np.where(theirs > 0, ranks, np.uint64(0)))

    def leave(self, name: InstanceId, role: Role) -> None:
        """Its pairs are gone at once; `settle` makes those that take their place."""
        place = self._side(role).leave(name)
        self._hashes[role][place] = 0
        self._set(role, place, np.uint64(0))

    def settle(self) -> Regrouping:
        """Make the pairs that there should be, and drop those for which there is no room."""
        wanted = self._wanted()
        linked = self._linked | wanted
        if self._limit:
            crowded = linked.sum(axis=1) > 2 * self._limit
            linked[crowded] = wanted[crowded]
        made, dropped = self._pairs(linked & ~self._linked), self._pairs(self._linked & ~linked)
        self._linked = linked
        return Regrouping(made, dropped)

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _side(self, role: Role) -> _Side:
        return self._prefill if role == "prefill" else self._decode

    def _wanted(self) -> Table:
        there: Table = self._ranks > 0
        if self._limit == 0:
            return there
        return there & (_favourites(self._ranks, self._limit) | _favourites(self._ranks.T, AT_LEAST).T)

    def _pairs(self, table: Table) -> list[Pair]:
        prefill, decode = self._prefill.names, self._decode.names
        rows, columns = np.nonzero(table)
        return [Pair(prefill[row], decode[column]) for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]

    def _set(self, role: Role, place: int, ranks: Ranks | np.uint64) -> None:
        """A new instance, or none, in this place."""
        line = (place, slice(None)) if role == "prefill" else (slice(None), place)
        self._ranks[line] = ranks
        self._linked[line] = False

    def _make_room(self) -> None:
        """Tables double when they are full."""
        sides = (self._prefill, self._decode)
        shape = tuple(_room(len(side.names), had) for side, had in zip(sides, self._ranks.shape, strict=True))
        more = [(0, new - old) for new, old in zip(shape, self._ranks.shape, strict=True)]
        if shape != self._ranks.shape:
            self._ranks, self._linked = np.pad(self._ranks, more), np.pad(self._linked, more)
            self._hashes = {
                "prefill": np.pad(self._hashes["prefill"], more[0]),
                "decode": np.pad(self._hashes["decode"], more[1]),
            }


def _room(places: int, had: int) -> int:
    return had if places <= had else max(places, 2 * had, 16)


def _favourites(ranks: Ranks, most: int) -> Table:
    """Where the `most` highest ranks of each row are."""
    columns = ranks.shape[1]
    if columns <= most:
        return np.ones(ranks.shape, dtype=bool)
    least = np.partition(ranks, columns - most, axis=1)[:, columns - most]
    chosen: Table = ranks >= least[:, None]
    return chosen


def _turned(hashes: Ranks) -> Ranks:
    """So that two names rank differently when their roles are exchanged."""
    return (hashes << np.uint64(31)) | (hashes >> np.uint64(33))


def _mix(bits: Ranks) -> Ranks:
    """Spread the bits (the finalizer of splitmix64, Steele et al. 2014). Never 0."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))) | np.uint64(1)
