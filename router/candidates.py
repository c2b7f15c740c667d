"""Candidates: the members by role, so arranged that a choice costs the same for ten of them and for a thousand.

Owns the order and the draw. The fleet says who joins, who leaves, and who may have got into trouble or out of it. Does not know
requests, loads or links.

    line    │ small memory ──────────────► large memory │      who take requests; those that hold a given one are its end
    ailing  │ they stay in the fleet, but take no requests for now
    leaving │ they drain
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from common.ids import Role
from router.members import Member


class Pool(Protocol):
    """Members from which one can draw by number: a list, or a SampleSet."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Member: ...

    def __iter__(self) -> Iterator[Member]: ...


@dataclass(slots=True)
class _Side:
    """The members of one role, each in one of the three."""

    line: list[Member] = field(default_factory=list)
    ailing: dict[Member, None] = field(default_factory=dict)
    leaving: dict[Member, None] = field(default_factory=dict)
    changes: int = 0
    """Of the line."""


class Candidates:
    """random: decides who is drawn. The same seed and the same members in the same order make the same draws."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._sides: dict[Role, _Side] = {"prefill": _Side(), "decode": _Side()}
        self._standing: set[Member] = set()
        """Those in a line."""
        self._choices = 0

    def judge(self, member: Member) -> None:
        """Put a member where it belongs. Call it when the member joined, and after whatever may change its trouble."""
        side = self._sides[member.info.role]
        if member.trouble is None:
            if member not in self._standing:
                self.leave(member)
                self._standing.add(member)
                insort(side.line, member, key=_order)
                side.changes += 1
            return
        group = side.leaving if member.draining else side.ailing
        if member not in group:
            self.leave(member)
            group[member] = None

    def leave(self, member: Member) -> None:
        """Take out a member that has left. Idempotent."""
        side = self._sides[member.info.role]
        side.ailing.pop(member, None)
        side.leaving.pop(member, None)
        if member in self._standing:
            self._standing.remove(member)
            del side.line[bisect_left(side.line, _order(member), key=_order)]
            side.changes += 1

    def line(self, role: Role) -> list[Member]:
        """All of this role that take requests, those with the least memory first. Only to look at."""
        return self._sides[role].line

    def able(self, role: Role, tokens: int) -> list[Member]:
        """Those of them whose memory holds so many tokens when it is empty."""
        line = self._sides[role].line
        first = bisect_left(line, tokens, key=_capacity)
        return line[first:] if first else line

    def ailing(self, role: Role) -> Set[Member]:
        """Those that take no requests, but do not drain."""
        return self._sides[role].ailing.keys()

    def leaving(self, role: Role) -> Set[Member]:
        """Those that drain."""
        return self._sides[role].leaving.keys()

    def chose(self, member: Member) -> None:
        """A request goes to this member."""
        self._choices += 1
        member.chosen = self._choices

    def after(self, role: Role, last: Member | None) -> Iterator[Member]:
        """All of this role that take requests, each once, from the one behind this member on. None: from the first."""
        line = self._sides[role].line
        first = 0 if last is None else bisect_right(line, _order(last), key=_order)
        return (line[number % len(line)] for number in range(first, first + len(line)))

    def changes(self, role: Role) -> int:
        """How often the line has changed."""
        return self._sides[role].changes

    def some(self, members: Pool, most: int) -> list[Member]:
        """Random ones, in random order; all of them, if there are no more than so many."""
        count, random = len(members), self._random.random
        if count < 2 * most:
            return [members[number] for number in self._random.sample(range(count), min(most, count))]
        numbers: dict[int, None] = {}  # `sample` takes three times as long
        while len(numbers) < most:
            numbers[int(random() * count)] = None
        return [members[number] for number in numbers]


def _capacity(member: Member) -> int:
    return member.capacity_tokens


def _order(member: Member) -> tuple[int, str]:
    return member.capacity_tokens, member.info.id
