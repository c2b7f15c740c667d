"""Candidates: the members by role, so arranged that a choice costs the same for ten of them and for a thousand.

Owns the order and the draw. The fleet says who joins, who leaves, and who may have got into trouble or out of it. Does not know
requests, loads or links.

    line    │ small memory ──────────────► large memory │      who take requests; those that hold a given one are its end
    ailing  │ they stay in the fleet, but take no requests for now
    leaving │ they drain
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from common.ids import Role
from router.members import Member

SAMPLE = 8
"""How many members a choice compares. The least loaded of a few random ones is nearly as good as the least loaded of all, and
routers that choose at the same time do not all choose the same (Mitzenmacher 2001, the power of two choices)."""


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


class Candidates:
    """random: decides who is drawn. The same seed and the same members in the same order make the same draws."""

    def __init__(self, random: Random) -> None:
        self._chance = random.random
        self._sides: dict[Role, _Side] = {"prefill": _Side(), "decode": _Side()}
        self._standing: set[Member] = set()
        """Those in a line."""

    def judge(self, member: Member) -> None:
        """Put a member where it belongs. Call it when the member joined, and after whatever may change its trouble."""
        side = self._sides[member.info.role]
        if member.trouble is None:
            if member not in self._standing:
                self.leave(member)
                self._standing.add(member)
                insort(side.line, member, key=_order)
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

    def rounds(self, members: Pool) -> Iterator[Pool]:
        """Some random ones, at most SAMPLE. Whoever finds nobody among them goes on to the second round: everyone."""
        if len(members) > SAMPLE:
            yield [members[number] for number in {int(self._chance() * len(members)) for _ in range(SAMPLE)}]
        yield members

    def draw(self, members: Pool, suits: Callable[[Member], bool]) -> list[Member]:
        """Random ones that suit, at most SAMPLE; or all that suit, if none of the random ones does."""
        for some in self.rounds(members):
            if suitable := [member for member in some if suits(member)]:
                return suitable
        return []


def _capacity(member: Member) -> int:
    return member.capacity_tokens


def _order(member: Member) -> tuple[int, str]:
    return member.capacity_tokens, member.info.id
