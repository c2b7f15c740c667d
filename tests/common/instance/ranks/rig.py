"""A leader and its followers over lists, on clocks turned by hand.

Owns the mail between them, which travels as bytes, and what is on its way. Knows no test.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from common.executor import Executor
from common.ids import Incarnation
from common.instance.ranks.executor import RankedExecutor
from common.instance.ranks.follower import FollowerLoop
from common.instance.ranks.leader import Followers, RemoteTransfers, remote_transfers
from common.messages import AnyMessage, RankInfo
from common.messages.ranks import RankHello, RankWelcome, ToFollower, ToLeader, rank_name
from tests.common.instance.rig import FakeExecutor, FakeTransfers
from tests.common.mailboxes import FakeMail

LEADER = rank_name("decode-0", 0, Incarnation("a"))
ADDRESS = "tcp://h:1"
"""The address of the leader."""


def rank_hello(rank: int, ranks: int, life: str = "a") -> RankHello:
    info = RankInfo(rank=rank, pid=100 + rank, host="gpu-7", device="auto")
    return RankHello(rank=rank, ranks=ranks, address=f"tcp://h:{rank}{len(life)}", info=info, setup={})


E = TypeVar("E", bound=Executor)


class RanksOf(Generic[E]):
    """make: an executor, of each rank. offsets_s: what each follower's clock shows when the leader's shows 0. One for each
    follower."""

    def __init__(self, make: Callable[[], E], *offsets_s: float) -> None:
        self.now = 0.0
        self.offsets_s = offsets_s or (0.0,)
        ranks = range(1, len(self.offsets_s) + 1)
        self.names = [rank_name("decode-0", rank, Incarnation("a")) for rank in ranks]
        self.mail: FakeMail[ToLeader] = FakeMail()
        self.followers = Followers(self.mail, 1 + len(self.names), {})
        hellos = [rank_hello(rank, 1 + len(self.names)) for rank in ranks]
        for name, hello in zip(self.names, hellos, strict=True):
            self.followers.admit(name, hello, self.now)
        self.followers.welcomed = True
        self.followers.serve(self.now)
        self.own = make()
        self.executor = RankedExecutor(self.own, self.followers)
        self.remote: list[RemoteTransfers] = remote_transfers(self.followers)
        self.executors = [make() for _ in ranks]
        self.transfers = [FakeTransfers() for _ in ranks]
        self.mails: list[FakeMail[ToFollower]] = [FakeMail() for _ in ranks]
        self.loops = [FollowerLoop(mail, ADDRESS, hello) for mail, hello in zip(self.mails, hellos, strict=True)]
        for rank, loop in enumerate(self.loops):
            loop.join(LEADER, RankWelcome(meeting=""), self.offsets_s[rank])
            loop.serve(self.executors[rank], self.transfers[rank])

    def clock(self, rank: int = 0) -> float:
        return self.now + (self.offsets_s[rank - 1] if rank else 0.0)

    def to_followers(self, lost: Callable[[AnyMessage], bool] = lambda message: False) -> None:
        """What the leader has sent arrives, and the followers turn."""
        for to, message in take(self.mail):
            if not lost(message):
                rank = self.names.index(to)
                self.mails[rank].arriving.append((LEADER, travelled(message, ToFollower)))
        for rank, loop in enumerate(self.loops, 1):
            loop.turn(partial(self.clock, rank))

    def to_leader(self, lost: Callable[[AnyMessage], bool] = lambda message: False) -> None:
        """What the followers have sent arrives, and the leader turns."""
        for name, mail in zip(self.names, self.mails, strict=True):
            for _, message in take(mail):
                if not lost(message):
                    self.mail.arriving.append((name, travelled(message, ToLeader)))
        self.followers.turn(self.clock)

    def turn(self) -> None:
        """Everybody hears what was said, and the leader hears the answers."""
        self.followers.turn(self.clock)
        self.to_followers()
        self.to_leader()


class Rig(RanksOf[FakeExecutor]):
    """Ranks whose steps end when they are told to."""

    def __init__(self, *offsets_s: float) -> None:
        super().__init__(FakeExecutor, *offsets_s)


def take(mail: FakeMail[Any]) -> list[tuple[Any, AnyMessage]]:
    sent = list(mail.sent)
    mail.sent.clear()
    return sent


def travelled(message: AnyMessage, inbox: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=inbox)
