"""One life of a simulated instance: its real scheduler, worker and transfer loop, over the engine and transport of its fleet.

Owns the loops of the worker and of the transfers' thread, and how full the page pool was over its life. The fleet is told when
the instance ends by itself. Knows no other process.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from common.errors import TandemError
from common.executor import Executor
from common.ids import Incarnation, InstanceId, Role
from common.instance.membership import Memberships
from common.instance.ports import FormerRole, Scheduler, Transfers
from common.instance.request import InstanceLimits
from common.instance.worker import InstanceWorker
from common.messages import InstanceInbox, InstanceInfo, RankInfo
from common.pages.layout import heads_of
from common.pages.pool import PagePool
from common.step_cost import StepCost
from decode.scheduler import DecodeScheduler
from kv_transfer.target_ranks import TargetRanks
from kv_transfer.transfer_loop import TransferLoop
from prefill.scheduler import PrefillScheduler
from simulation.clock import Clock, LocalClock, Loop
from simulation.network import Post

if TYPE_CHECKING:
    from simulation.fleet import SimulatedFleet

STARTUP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class PollIntervals:
    """How often a transfer loop polls its transport."""

    busy_s: float = 0.025
    """While its own pushes are under way."""
    expecting_s: float = 0.2
    """While it has none, and pushes of others may arrive."""
    idle_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class InstanceSize(InstanceLimits):
    """What an instance is made of, with its limits."""

    pages: int = 64
    rows: int = 4
    """Requests that run at once."""
    chunk_tokens: int = 8
    max_waiting: int = 64
    request_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    cost: StepCost = StepCost(step_s=0.001, chunk_token_s=0.0, decode_row_s=0.0)
    verify_pages: bool = False
    polls: PollIntervals = PollIntervals()
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The folders of those that it reads before it joins, by their names."""


@dataclass(frozen=True, slots=True)
class Name:
    """Who an instance is."""

    id: InstanceId
    role: Role
    life: int
    """The number of its incarnation."""
    address: str
    """The address of its inbox."""
    routers: tuple[str, ...]
    """The addresses of the routers at which it registers."""
    began_s: float = 0.0
    """What its clock showed when the simulated one showed 0."""

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.id}-{self.life}")


class PageUse:
    """How much of a page pool was in use over time. Pages change only when their instance acts, so the sum is exact if each act
    is preceded by `look`."""

    def __init__(self, pool: PagePool, now: float) -> None:
        self._pool = pool
        self._looked_s = now
        self.page_s = 0.0
        """Pages in use, times the seconds that they were."""
        self.seconds = 0.0
        """Simulated seconds that were counted so far."""

    @property
    def most(self) -> float:
        """The largest share of the pages that was in use at any moment."""
        return self._pool.most_used / self._pool.total_pages

    def look(self, now: float) -> None:
        """The pages in use now have been in use since the last look."""
        passed_s = now - self._looked_s
        self.page_s += passed_s * self._pool.leased_pages
        self.seconds += passed_s
        self._looked_s = now


class Process(Protocol):
    """The process of a rank."""

    def wake(self) -> None: ...

    def leave(self, error: TandemError | None) -> None: ...


class SimulatedRank:
    """What one rank computes and writes with, and the thread that drives its transfers."""

    def __init__(
        self,
        engine: Executor,
        fleet: "SimulatedFleet[Any, Any]",
        clock: LocalClock,
        process: Process,
        info: RankInfo,
        ranks: int = 1,
    ) -> None:
        self._process, self._polls, self._clock = process, fleet.size.polls, clock
        self.thread = Loop(clock.clock, self)
        self.engine, self.info = engine, info
        self.transport = fleet.make_transport(self.look)
        description = engine.description
        kv_heads = description.model.kv_heads
        first_head = heads_of(info.rank, ranks, kv_heads).start
        self.loop = TransferLoop(
            self.transport, "memory", description.memory, description.layout, fleet.size.pages, clock, first_head=first_head
        )
        """What the thread drives."""
        self.transfers = TargetRanks(self.loop, info.rank, ranks, kv_heads)
        """What the process uses."""
        self.thread.wake(clock.clock.now)

    def act(self) -> None:
        """A turn of the thread."""
        try:
            if self.loop.step():
                self._process.wake()
        except TandemError as error:
            self._process.leave(error)

    def next_deadline(self) -> float:
        loop, polls = self.loop, self._polls
        wait_s = polls.busy_s if loop.active else polls.expecting_s if loop.expecting else polls.idle_s
        polls_s = self._clock() + wait_s
        deadline = loop.next_deadline()
        return self._clock.simulated(polls_s if deadline is None else min(polls_s, deadline))

    def look(self) -> None:
        """The thread acts as soon as may be."""
        self.thread.wake(0.0)


class Instance:
    """The process of an instance, or of its first rank."""

    def __init__(self, name: Name, clock: Clock, fleet: "SimulatedFleet[Any, Any]") -> None:
        size, network = fleet.size, fleet.network
        self.name = name
        self._fleet, self._network = fleet, network
        self.clock = LocalClock(clock, name.began_s)
        self.loop = Loop(clock, self)
        self.rank = self.make_rank()
        executor, transfers = self.join_ranks()
        engine, ranks = executor.description, self.ranks
        info = InstanceInfo(
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
            max_adapters=engine.max_adapters,
        )
        digest = executor.digest_pages if size.verify_pages else None

        def make_scheduler(life: InstanceInfo, former: FormerRole | None) -> Scheduler[Any]:
            kind = PrefillScheduler if life.role == "prefill" else DecodeScheduler
            return kind(life, dataclasses.replace(engine, weights=executor.weights), size, digest, former)

        inbox: Any = InstanceInbox
        self._meter = network.meter(name.role)
        self.mail: Post[Any] = Post(name.id, inbox, network, network.open(name.address, name.id, self.loop.wake, name.role))
        self._memberships = Memberships(info, name.routers, STARTUP_TIMEOUT_S, self.clock())
        self.worker: InstanceWorker = InstanceWorker(
            self._memberships, make_scheduler, executor, transfers, self.mail, unix_s=-name.began_s, adapters=size.adapters
        )
        self.page_use = PageUse(self.pool, clock.now)
        self.loop.wake(clock.now)

    def make_rank(self) -> SimulatedRank:
        """The rank of this process."""
        info, fleet = RankInfo(rank=0, pid=1, host="here", device="cpu"), self._fleet
        return SimulatedRank(fleet.make_engine(self.clock), fleet, self.clock, self, info)

    def join_ranks(self) -> tuple[Executor, Transfers]:
        """The executor and the transfers over all ranks."""
        return self.rank.engine, self.rank.transfers

    @property
    def ranks(self) -> Sequence[SimulatedRank]:
        return [self.rank]

    @property
    def info(self) -> InstanceInfo:
        """Its present life."""
        return self._memberships.info

    @property
    def scheduler(self) -> Scheduler[Any]:
        """That of its present role."""
        return self.worker.scheduler

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

    def act(self) -> None:
        """One turn of the worker, as in `common.instance.worker.run`."""
        self.page_use.look(self.clock.clock.now)
        self._meter.begin()
        try:
            self.turn(self.clock())
            self._meter.lap("turns")
        except TandemError as error:
            self.leave(error)
            return
        if self.worker.drained:
            self.leave(None)
        elif self.rank.loop.active:
            self.rank.look()

    def turn(self, now: float) -> None:
        self.worker.turn(now)

    def next_deadline(self) -> float:
        return min(self.clock.simulated(self.worker.next_deadline()), self.mail.next_deadline())

    def wake(self) -> None:
        """Something has happened: act as soon as may be."""
        self.loop.wake(0.0)

    def leave(self, error: TandemError | None) -> None:
        """The process ends by itself, and says so. None: it has drained."""
        reason = "drained" if error is None else f"{type(error).__name__}: {error}"
        self.worker.leave(error)
        self.end_ranks(reason)
        self.kill()
        self._fleet.instance_ended(self, reason)

    def end_ranks(self, reason: str) -> None:
        self.rank.transfers.close()

    def kill(self) -> None:
        """As SIGKILL does: it never acts again. What is under way from and to its memory is not its own to end."""
        self.page_use.look(self.clock.clock.now)
        self.loop.end()
        self.rank.thread.end()
        self._network.close(self.name.address)
