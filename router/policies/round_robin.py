"""Round robin: the members in turn, whatever they have to do.

Owns whose turn it is. Does not know loads, caches or times.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from common.ids import Role
from router.ask import Ask
from router.candidates import Candidates, Pool
from router.members import Member
from router.policies.port import CANDIDATES, Suits


class RoundRobin:
    """In the order of their memory and names, from the one behind the last that was chosen."""

    def __init__(self, candidates: Candidates, role: Role) -> None:
        self._candidates = candidates
        self._role = role
        self._last: Member | None = None

    def groups(self, pool: Pool, suits: Suits, ask: Ask, source: Member | None) -> Iterator[Sequence[Member]]:
        in_turn = filter(suits, self._candidates.after(self._role, self._last))
        while group := list(islice(in_turn, CANDIDATES)):
            yield group

    def chose(self, member: Member) -> None:
        self._last = member
