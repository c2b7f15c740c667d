"""One life of a simulated instance: its real scheduler, worker and transfer loop, over the engine and transport of its fleet.

Owns the two loops of the process, the worker's and the transfers'. Whoever made it is told when it ends by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from common.engine.executor import Executor
from common.engine.timed import StepCost
from common.errors import TandemError
from common.ids import Incarnation, InstanceId, Role
from common.instance.limits import InstanceLimits
from common.instance.memberships import Memberships
from common.instance.worker import InstanceWorker
from common.messages import DecodeInbox, InstanceInfo, PrefillInbox, RankInfo
from common.pages.pool import PagePool
from decode.scheduler import DecodeScheduler
from kv_transfer.transfer_loop import TransferLoop
from kv_transfer.transport import Transport
from prefill.scheduler import PrefillScheduler
from simulation.clock import Clock, LocalClock, Loop
from simulation.network import Network, Post
from simulation.page_use import PageUse

STARTUP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Looks:
    """How often a transfer loop looks what has become of its pushes, when it has none but awaits others', and when there are
    none."""

    busy_s: float = 0.025
    expecting_s: float = 0.2
    idle_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Size(InstanceLimits):
    """What an instance is made of, with its limits. pages: of 4 tokens each in the toy. rows: requests that run at once.
    prepare_s: how long a grammar takes to be ready."""

    pages: int = 64
    rows: int = 4
    chunk_tokens: int = 8
    max_waiting: int = 64
    request_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    cost: StepCost = StepCost(step_s=0.001, chunk_token_s=0.0, decode_row_s=0.0)
    verify_pages: bool = False
    looks: Looks = Looks()
    prepare_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Name:
    """Who an instance is. life: the number of its incarnation. address: of its inbox. began_s: what its clock showed when the
    simulated one showed 0. routers: the addresses at which it registers."""

    id: InstanceId
    role: Role
    life: int
    address: str
    began_s: float = 0.0
    routers: tuple[str, ...] = ()


class Parts(Protocol):
    """Who makes what an instance computes and writes with."""

    def make_engine(self, clock: LocalClock) -> Executor: ...

    def make_transport(self, wake: Callable[[], None]) -> Transport:
        """wake: makes the instance look at its transfers; for a transport that knows when something has happened."""


class Instance:
    """A process. ended: called with the reason when it has drained or something in it raised a TandemError."""

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
        self._ended = ended
        self.should_drain = False
        self.stopped_until_s = 0.0
        self._clock = LocalClock(clock, name.began_s)
        self._loop = Loop(clock, self)
        self._transfer_thread = Loop(clock, _TransferThread(self, self._clock, size.looks))
        self.engine = parts.make_engine(self._clock)
        self.transport = parts.make_transport(lambda: self._transfer_thread.wake(0.0))
        engine = self.engine.description
        self.transfers = TransferLoop(self.transport, "memory", engine.memory, engine.layout, size.pages, self._clock)
        self.info = InstanceInfo(
            id=name.id,
            incarnation=Incarnation(f"{name.id}-{name.life}"),
            role=name.role,
            inbox=name.address,
            ranks=(RankInfo(rank=0, pid=1, host="here", device="cpu"),),
            model=engine.model,
            pools=(self.transfers.descriptor,),
            max_running=size.rows,
            started_ns=round((clock.now + 1.0) * 1e9),  # 0 would say nothing
        )
        is_prefill = name.role == "prefill"
        kind = PrefillScheduler if is_prefill else DecodeScheduler
        digest = self.engine.digest_pages if size.verify_pages else None
        self.scheduler = kind(self.info, engine, size, digest)
        self.page_use = PageUse(self.pool, clock.now)
        inbox: Any = PrefillInbox if is_prefill else DecodeInbox
        mailbox = network.open(name.address, name.id, self._loop.wake, name.role)
        self._meter = network.meter(name.role)
        self._mail: Post[Any] = Post(name.id, inbox, network, mailbox, {})
        memberships = Memberships(self.info, name.routers, STARTUP_TIMEOUT_S, self._clock())
        self.worker: InstanceWorker[Any] = InstanceWorker(
            memberships, self.scheduler, self.engine, self.transfers, self._mail, unix_s=-name.began_s
        )
        self._loop.wake(clock.now)
        self._transfer_thread.wake(clock.now)

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

    def act(self) -> None:
        """One turn of the worker, as in `common.instance.worker.run`."""
        now = self._clock()
        self.page_use.look(self._clock.clock.now)
        self._meter.begin()
        try:
            if self.should_drain:
                self.worker.drain(now)
            self.worker.turn(now)
            self._meter.lap("turns")
        except TandemError as error:
            self.leave(f"{type(error).__name__}: {error}")
            return
        if self.worker.drained:
            self.leave("drained")
        elif self.transfers.active:
            self._transfer_thread.wake(0.0)

    def next_deadline(self) -> float:
        return min(self._clock.simulated(self.worker.next_deadline()), self._mail.next_deadline())

    def wake(self) -> None:
        """Something has happened: act as soon as may be."""
        self._loop.wake(0.0)

    def drain(self) -> None:
        """As SIGTERM does."""
        self.should_drain = True
        self.wake()

    def stop_until(self, until_s: float) -> None:
        """As SIGSTOP does, and SIGCONT then."""
        self.stopped_until_s = max(self.stopped_until_s, until_s)
        self._loop.stop_until(until_s)
        self._transfer_thread.stop_until(until_s)

    def leave(self, reason: str) -> None:
        """The process ends by itself, and says so."""
        self.worker.leave()
        self.transfers.close()
        self.kill()
        self._ended(self, reason)

    def kill(self) -> None:
        """As SIGKILL does: it never acts again. What is under way from and to its memory is not its own to end."""
        self.page_use.look(self._clock.clock.now)
        self._loop.end()
        self._transfer_thread.end()


class _TransferThread:
    """The thread of an instance that drives its transfers."""

    def __init__(self, instance: Instance, clock: LocalClock, looks: Looks) -> None:
        self._instance = instance
        self._clock = clock
        self._looks = looks

    def act(self) -> None:
        try:
            if self._instance.transfers.step():
                self._instance.wake()
        except TandemError as error:
            self._instance.leave(f"{type(error).__name__}: {error}")

    def next_deadline(self) -> float:
        transfers, looks = self._instance.transfers, self._looks
        pace_s = looks.busy_s if transfers.active else looks.expecting_s if transfers.expecting else looks.idle_s
        looks_s = self._clock() + pace_s
        deadline = transfers.next_deadline()
        return self._clock.simulated(looks_s if deadline is None else min(looks_s, deadline))
