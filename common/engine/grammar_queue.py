"""Which grammar is compiled next: owners take turns by the work that they ask for, and each may have only so much waiting.

Owns the order and the bounds. Pure: knows no threads, compilers or clocks.

An owner's turn begins where its turn before has ended, on a clock that counts work instead of time, but not in the past. The turn
that begins first is next; among equals the shorter, then the older (start-time fair queueing; Goyal, Vin and Cheng, 1996). So who
has asked for nothing yet comes before all who have, however much they have waiting.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.errors import Overloaded
from common.sampling_params import Grammar

T = TypeVar("T")

MAX_OWNED, MAX_OWNED_S = 64, 120.0
"""So many grammars of one owner wait at most, and so much work, as it is estimated."""
LEAST_WORK_S, CHARACTER_S = 0.02, 1e-4
"""Estimated work of a grammar: its least, and what each character adds."""


def work_of(grammar: Grammar) -> float:
    """The estimated work of compiling it, in seconds of a processor."""
    return LEAST_WORK_S + CHARACTER_S * len(grammar.text)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A grammar that waits. serial: counts all of them, in the order in which they came."""

    work_s: float
    serial: int


@dataclass(slots=True, eq=False)
class _Owner(Generic[T]):
    waiting: dict[T, _Waiting] = field(default_factory=dict)
    """First come, first served."""
    begins_s: float = 0.0
    """When its next turn begins, on the clock of work."""
    compiling: int = 0

    @property
    def waiting_s(self) -> float:
        return sum(asked.work_s for asked in self.waiting.values())


class CompileQueue(Generic[T]):
    """Items that wait for one of so many compilers. One that several owners wait for is compiled at the first of their turns.

    The owner "" stands for everybody when nobody has a key: it has no bounds of its own, and all compilers. Every other owner
    leaves one compiler to the others, where there are several: what it has there may take long."""

    def __init__(self, compilers: int) -> None:
        self._compilers = compilers
        self._owners: dict[str, _Owner[T]] = {}
        self._taken: dict[T, tuple[str, float]] = {}
        """What is being compiled: at whose turn, and the work that was estimated."""
        self._now_s = 0.0
        self._serial = 0

    def __len__(self) -> int:
        """How many wait or are being compiled."""
        return len({item for owner in self._owners.values() for item in owner.waiting}) + len(self._taken)

    def turns(self) -> list[tuple[str, T]]:
        """Who waits for what."""
        return [(name, item) for name, owner in self._owners.items() for item in owner.waiting]

    def join(self, item: T, owner: str, work_s: float) -> None:
        """Wait for a compiler. An item that waits for this owner already, or is being compiled, stays where it is. Raises
        Overloaded when the owner has too much waiting."""
        mine = self._owners.setdefault(owner, _Owner())
        if item in mine.waiting or item in self._taken:
            return
        waiting, waiting_s = len(mine.waiting), mine.waiting_s
        if owner and (waiting >= MAX_OWNED or (waiting and waiting_s + work_s > MAX_OWNED_S)):
            bounds = f"{waiting} grammars wait to be compiled for the API key {owner}, about {waiting_s:.0f} s of work"
            raise Overloaded(f"{bounds}: send this one when they are done, or send smaller ones")
        self._serial += 1
        mine.waiting[item] = _Waiting(work_s, self._serial)

    def leave(self, item: T, owner: str) -> bool:
        """This owner waits for it no longer. Returns whether another does."""
        self._owners[owner].waiting.pop(item, None)
        return any(item in each.waiting for each in self._owners.values())

    def take(self) -> T | None:
        """The next one, which is compiled now; None while there is none that may be."""
        ready = [
            (max(owner.begins_s, self._now_s), asked.work_s, asked.serial, name)
            for name, owner in self._owners.items()
            if owner.waiting and owner.compiling < self._most_compilers(name)
            for asked in [next(iter(owner.waiting.values()))]
        ]
        if not ready:
            return None
        self._now_s, work_s, _, name = min(ready)
        mine = self._owners[name]
        item = next(iter(mine.waiting))
        for owner in self._owners.values():
            owner.waiting.pop(item, None)
        mine.begins_s = self._now_s + work_s
        mine.compiling += 1
        self._taken[item] = name, work_s
        return item

    def finish(self, item: T, spent_s: float) -> None:
        """It is compiled, or never will be. spent_s: the work that it was, which is counted in place of the estimate."""
        name, work_s = self._taken.pop(item)
        mine = self._owners[name]
        mine.compiling -= 1
        mine.begins_s += spent_s - work_s
        if len(self) == 0:
            self._owners.clear()
            self._now_s = 0.0

    def _most_compilers(self, owner: str) -> int:
        return max(1, self._compilers - 1) if owner else self._compilers
