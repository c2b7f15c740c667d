"""One life of a simulated instance: its real scheduler, worker and transfer loops, over the engine and transport of its fleet.

Owns the processes of its ranks: the leader's, with the worker's loop, and those of its followers, which are made at the welcome:
how ranks find each other is not simulated. Whoever made it is told when it ends by itself.

How full the page pool of a simulated instance was, over its life.

Owns the sum over time. Pages change only when their instance acts, so it is exact if each act is preceded by `look`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from common.errors import TandemError
from common.executor import Executor
from common.instance.membership import Memberships
from common.instance.ports import Transfers
from common.instance.ranks.executor import RankedExecutor
from common.instance.ranks.leader import Followers, remote_transfers
from common.instance.ranks.line import Line
from common.instance.worker import InstanceWorker
from common.messages import DecodeInbox, InstanceInfo, PrefillInbox
from common.messages.ranks import ToLeader, rank_name
from common.pages.pool import PagePool
from decode.scheduler import DecodeScheduler
from engine.toy import ToyRanks
from kv_transfer.target_ranks import RankedTransfers
from prefill.scheduler import PrefillScheduler
from simulation.clock import Clock, LocalClock, Loop
from simulation.network import Network, Post
from simulation.rank import Name, Parts, SimulatedFollower, SimulatedRank, Size


class PageUse:
    """page_s: pages in use times the seconds they were. seconds: counted so far. now: simulated time at which counting begins."""

    def __init__(self, pool: PagePool, now: float) -> None:
        self._pool = pool
        self._looked_s = now
        self.page_s = self.seconds = 0.0

    @property
    def most(self) -> float:
        """The largest share of the pages that was in use at any moment."""
        return self._pool.most_used / self._pool.total_pages

    def look(self, now: float) -> None:
        """The pages in use now have been in use since the last look."""
        passed_s = now - self._looked_s
        self.page_s += passed_s * (self._pool.leased_pages)
        self.seconds += passed_s
        self._looked_s = now


STARTUP_TIMEOUT_S = 60.0


class Instance:
    """The leader's process. ended: called with the reason when it has drained or something in it raised a TandemError."""

    def __init__(
        self,
        name: Name,
        size: Size,
        clock: Clock,
        network: Network,
        parts: Parts,
        ended: Callable[["Instance", str], None],
    ) -> None:
        self.name = name
        self._ended, self._network = ended, network
        self._leads: Followers | None = None
        self._rank_mail: Post[Any] | None = None
        self.should_drain = False
        self.stopped_until_s = 0.0
        self._clock = LocalClock(clock, name.began_s)
        self._loop = Loop(clock, self)
        share = None if name.ranks == 1 else ToyRanks(name.ranks, self._wake_ranks)
        self.rank = SimulatedRank(0, share, size, self._clock, parts, self, name.host(size))
        self.engine, self.transport = self.rank.engine, self.rank.transport
        self.followers = [
            SimulatedFollower(number, share, name, size, clock, network, parts) for number in range(1, name.ranks) if share
        ]
        executor, transfers = self._spread()
        engine = executor.description
        ranks = [self.rank, *(follower.rank for follower in self.followers)]
        self.info = InstanceInfo(
            id=name.id,
            incarnation=name.incarnation,
            role=name.role,
            inbox=name.address,
            ranks=tuple(rank.info for rank in ranks),
            model=engine.model,
            pools=tuple(rank.loop.descriptor for rank in ranks),
            max_running=size.rows,
            started_ns=round((clock.now + 1.0) * 1e9),  # 0 would say nothing
            caches_prefixes=size.prefix_cache,
            verifies_pages=size.verify_pages,
        )
        is_prefill = name.role == "prefill"
        kind = PrefillScheduler if is_prefill else DecodeScheduler
        digest = executor.digest_pages if size.verify_pages else None
        self.scheduler = kind(self.info, engine, size, digest)
        self.page_use = PageUse(self.pool, clock.now)
        inbox: Any = PrefillInbox if is_prefill else DecodeInbox
        mailbox = network.open(name.address, name.id, self._loop.wake, name.role)
        self._meter = network.meter(name.role)
        self._mail: Post[Any] = Post(name.id, inbox, network, mailbox, {})
        memberships = Memberships(self.info, name.routers, STARTUP_TIMEOUT_S, self._clock())
        self.worker: InstanceWorker[Any] = InstanceWorker(
            memberships, self.scheduler, executor, transfers, self._mail, unix_s=-name.began_s
        )
        self._loop.wake(clock.now)

    def _spread(self) -> tuple[Executor, Transfers]:
        """The executor and the transfers over all ranks."""
        if not self.followers:
            return self.engine, self.rank.transfers
        me, address, now = rank_name(self.name.id, 0, self.name.incarnation), self.name.rank_address(0), self._clock()
        inbox: Any = ToLeader
        mail: Post[Any] = Post(me, inbox, self._network, self._network.open(address, me, self._loop.wake, "rank"), {})
        for follower in self.followers:
            mail.route(follower.name, follower.address, watch=True)
        lines = [Line(follower.name, f"rank {number}", now) for number, follower in enumerate(self.followers, 1)]
        self._leads, self._rank_mail = Followers(mail, lines, now), mail
        transfers = RankedTransfers([self.rank.transfers, *remote_transfers(self._leads)])
        return RankedExecutor(self.engine, self._leads), transfers

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

    def act(self) -> None:
        """One turn of the worker, as in `common.instance.worker.run`."""
        now = self._clock()
        self.page_use.look(self._clock.clock.now)
        self._meter.begin()
        try:
            if self._leads is not None:
                self._leads.turn(self._clock)
            if self.should_drain or (self._leads is not None and self._leads.drain_asked):
                self.worker.drain(now)
            self.worker.turn(now)
            self._meter.lap("turns")
        except TandemError as error:
            self.leave(f"{type(error).__name__}: {error}")
            return
        if self.worker.drained:
            self.leave("drained")
        elif self.rank.loop.active:
            self.rank.look()

    def next_deadline(self) -> float:
        deadline = min(self._clock.simulated(self.worker.next_deadline()), self._mail.next_deadline())
        if self._leads is None or self._rank_mail is None:
            return deadline
        return min(deadline, self._clock.simulated(self._leads.next_deadline()), self._rank_mail.next_deadline())

    def _wake_ranks(self) -> None:
        """All ranks have written a step, as a collective ends on all of them."""
        self.wake()
        for follower in self.followers:
            follower.wake()

    def wake(self) -> None:
        """Something has happened: act as soon as may be."""
        self._loop.wake(0.0)

    @property
    def processes(self) -> "Sequence[Instance | SimulatedFollower]":
        """Of all ranks, in order."""
        return [self, *self.followers]

    @property
    def is_up(self) -> bool:
        """The processes of all ranks run."""
        now = self._clock.clock.now
        return now >= self.stopped_until_s and all(each.alive and now >= each.stopped_until_s for each in self.followers)

    def drain(self) -> None:
        """As SIGTERM does."""
        self.should_drain = True
        self.wake()

    def stop_until(self, until_s: float) -> None:
        """As SIGSTOP does to the leader, and SIGCONT then."""
        self.stopped_until_s = max(self.stopped_until_s, until_s)
        self._loop.stop_until(until_s)
        self.rank.stop_until(until_s)

    def leave(self, reason: str) -> None:
        """The process ends by itself, and says so."""
        self.worker.leave("" if reason == "drained" else reason)
        if self._leads is not None:
            self._leads.end(reason, orderly=reason == "drained")
        self.rank.transfers.close()
        self.kill()
        self._ended(self, reason)

    def kill(self) -> None:
        """As SIGKILL does to the leader: it never acts again. What is under way from and to its memory is not its own to end."""
        self.page_use.look(self._clock.clock.now)
        self._loop.end()
        self.rank.end()
        self._network.close(self.name.address)
        if self._leads is not None:
            self._network.close(self.name.rank_address(0))
