"""A follower that computes nothing, as a process: `python -m bench.ranks.follower LEADER RANK RANKS`.

Owns its loop. Ends when the leader says so, or is gone.
"""

import contextlib
import os
import sys
import time

from bench.ranks.parts import MODEL, POOL, NoTransfers, executor
from common.ids import Incarnation
from common.instance.ranks.follower import FollowerLoop
from common.instance.ranks.joining import Joining
from common.instance.ranks.line import RankLost
from common.messages import RankInfo
from common.messages.ranks import RankHello, ToFollower, rank_name
from common.wire import Mailbox


def main(leader: str, rank: int, ranks: int) -> None:
    """Raises RankLost."""
    name = rank_name("bench", rank, Incarnation(str(os.getpid())))
    with contextlib.closing(Mailbox[ToFollower](name, ToFollower, "tcp://127.0.0.1:0")) as mailbox:
        info = RankInfo(rank=rank, pid=os.getpid(), host="here", device="cpu")
        joining = Joining(mailbox, leader, RankHello(rank=rank, ranks=ranks, address=mailbox.address, info=info, setup={}))
        while not joining.complete:
            joining.turn(time.monotonic)
            if joining.welcome is not None:
                joining.ready(MODEL, POOL)
            else:
                mailbox.wait(joining.next_deadline(time.monotonic()) - time.monotonic())
        loop = FollowerLoop(executor(), NoTransfers(), mailbox, joining.line)
        while loop.end is None:
            loop.turn(time.monotonic())
            mailbox.wait(max(0.0, loop.next_deadline() - time.monotonic()))


if __name__ == "__main__":
    with contextlib.suppress(RankLost):
        main(sys.argv[1], *map(int, sys.argv[2:]))
