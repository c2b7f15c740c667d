"""Session: the requests of one session go to one member, which has what came before in its cache.

Owns the ring of those that take requests. Requests without a session go to the least loaded. Does not know what is in the caches.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from common.ids import Role
from router.ask import Ask
from router.candidates import Candidates, Pool
from router.members import Member
from router.policies.load import LeastLoaded
from router.policies.port import CANDIDATES, Suits
from router.policies.ring import Ring


class BySession:
    """The member that consistent hashing gives to the session, so that all routers agree, and a member that joins or leaves moves
    few sessions."""

    def __init__(self, candidates: Candidates, role: Role) -> None:
        self._candidates = candidates
        self._role = role
        self._without = LeastLoaded(candidates, role)
        self._ring = Ring()
        self._changes = -1
        """As many there were when the ring got its members."""

    def groups(self, pool: Pool, suits: Suits, ask: Ask, source: Member | None) -> Iterator[Sequence[Member]]:
        if not ask.session:
            yield from self._without.groups(pool, suits, ask, source)
            return
        if self._changes != (changes := self._candidates.changes(self._role)):
            self._ring.become(self._candidates.line(self._role))
            self._changes = changes
        in_order = filter(suits, self._ring.order(ask.session, pool))
        while group := list(islice(in_order, CANDIDATES)):
            yield group

    def chose(self, member: Member) -> None:
        """The ring stays as it is."""
