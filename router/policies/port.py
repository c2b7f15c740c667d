"""The port of a policy: it ranks the members of one role for a request.

Owns the port, and how many members a ranking is made of. A policy is told who can serve the request. It does not know why
another cannot, nor what becomes of a placement that is not its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from router.ask import Ask
from router.candidates import Pool
from router.members import Member

CANDIDATES = 4
"""How many decode instances a placement names: the next one is asked when the best has no room by then."""

Suits: TypeAlias = Callable[[Member], bool]
"""Whether a member can serve the request."""


def others(
    some: Sequence[Member], pool: Pool, suits: Suits, rank: Callable[[Member], float | tuple[float, ...]]
) -> Iterator[Sequence[Member]]:
    """All that suit but these, the least first, as a group for whoever could use none of these."""
    if rest := sorted((member for member in pool if suits(member) and member not in some), key=rank):
        yield rest


class Policy(Protocol):
    """Ranks the members of one role. Its cost must not grow with the fleet while most members suit."""

    def groups(self, pool: Pool, suits: Suits, ask: Ask, source: Member | None) -> Iterator[Sequence[Member]]:
        """Those that suit, in groups that are not empty, each with its best member first. Whoever can use nobody of a group takes
        the next. Together the groups hold all that suit.

        pool: members of which all that suit are part. source: the prefill member that is to push KV to them; None for prefill
        members, and for a decode member that is to serve the request alone.
        """

    def chose(self, member: Member) -> None:
        """The request goes to this member."""
