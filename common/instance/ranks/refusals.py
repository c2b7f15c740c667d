"""Those who say that they are a rank of the instance and cannot be one: they are told why.

Owns whom it has told, and the routes to them, of which it keeps the latest. Opens no socket and reads no clock.

A process that says it is a rank which is there already may be that one's successor. It is refused when the first is heard again
after it; until then it gets no answer and asks again.
"""

from common.ids import InstanceId
from common.instance.ports import Mail
from common.messages.ranks import RankHello, RankRefused, ToLeader

MOST_KEPT = 64
"""So many routes are kept, and reasons."""


class Refusals:
    """The leader's."""

    def __init__(self, mail: Mail[ToLeader]) -> None:
        self._mail = mail
        self._told: dict[InstanceId, tuple[int, str]] = {}
        """Rank and reason, for people. The oldest first."""
        self._rivals: dict[int, tuple[InstanceId, RankHello, float]] = {}
        """Rank → who says that it is this rank too, and since when."""

    def refuse(self, sender: InstanceId, hello: RankHello, reason: str) -> None:
        self._told.pop(sender, None)
        self._told[sender] = hello.rank, f"{describe(hello)} was refused: {reason}"
        self._mail.route(sender, hello.address)
        self._mail.send(sender, RankRefused(reason=reason))
        if len(self._told) > MOST_KEPT:
            oldest = next(iter(self._told))
            del self._told[oldest]
            self._mail.route(oldest, None)

    def wait(self, sender: InstanceId, hello: RankHello, now: float) -> None:
        """This rank is there already."""
        known = self._rivals.get(hello.rank)
        if known is None or known[0] != sender:
            self._rivals[hello.rank] = sender, hello, now

    def joined(self, rank: int) -> None:
        """Another one than before is this rank."""
        self._rivals.pop(rank, None)

    def heard(self, rank: int, who: str, now: float) -> None:
        """The rank that is there has been heard. What came in the same turn may be older than its rival."""
        rival = self._rivals.get(rank)
        if rival is not None and rival[2] < now:
            del self._rivals[rank]
            self.refuse(rival[0], rival[1], f"{who} is there already")

    def reasons(self, ranks: int, there: set[int]) -> list[str]:
        """Why those were refused who could be the rest of `ranks` ranks, or no rank at all: the latest of each number. There are:
        there."""
        latest = {rank: reason for rank, reason in self._told.values() if rank not in there or not 1 <= rank < ranks}
        return list(latest.values())


def describe(hello: RankHello) -> str:
    """A rank, for people."""
    return f"rank {hello.rank} (pid {hello.info.pid} on {hello.info.host})"
