"""One rank of a simulated instance: what it computes and writes with, and its process when it is a follower.

Owns the loop that drives the rank's transfers. Knows no scheduler: the leader's is in `simulation/instance.py`.

What a simulated instance is made of.

Owns the numbers. Pure data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import TandemError
from common.executor import Executor
from common.ids import Incarnation, InstanceId, Role
from common.instance.ranks.follower import FollowerLoop
from common.instance.ranks.line import Line
from common.instance.requests import InstanceLimits
from common.messages import RankInfo
from common.messages.ranks import ToFollower, rank_name
from common.pages.layout import heads_of
from common.step_cost import StepCost
from engine.toy import ToyRanks
from kv_transfer.target_ranks import TargetRanks
from kv_transfer.transfer_loop import TransferLoop
from kv_transfer.transport import Transport
from simulation.clock import Clock, LocalClock, Loop
from simulation.network import Network, Post


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
    prepare_s: how long a grammar takes to be ready. apart: each instance has a host of its own."""

    pages: int = 64
    rows: int = 4
    chunk_tokens: int = 8
    max_waiting: int = 64
    request_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    cost: StepCost = StepCost(step_s=0.001, chunk_token_s=0.0, decode_row_s=0.0)
    verify_pages: bool = False
    apart: bool = False
    looks: Looks = Looks()
    prepare_s: float = 0.0


FIRST_RANK_PORT, MOST_RANKS = 20_000, 16
APART_S = 37.0
"""The clocks of neighbouring ranks show times that differ by so much."""


@dataclass(frozen=True, slots=True)
class Name:
    """Who an instance is. life: the number of its incarnation. address: of its inbox. began_s: what its clock showed when the
    simulated one showed 0. routers: the addresses at which it registers. ranks: how many it has."""

    id: InstanceId
    role: Role
    life: int
    address: str
    began_s: float = 0.0
    routers: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.id}-{self.life}")

    def host(self, size: Size) -> str:
        return self.id if size.apart else "here"

    def rank_address(self, rank: int) -> str:
        """Of its inbox for what ranks say to each other."""
        return f"tcp://127.0.0.1:{FIRST_RANK_PORT + MOST_RANKS * self.life + rank}"


class Parts(Protocol):
    """Who makes what an instance computes and writes with."""

    def make_engine(self, clock: LocalClock, ranks: ToyRanks | None) -> Executor:
        """ranks: what the engine's instance has; None: one."""

    def make_transport(self, wake: Callable[[], None]) -> Transport:
        """wake: makes the rank look at its transfers; for a transport that knows when something has happened."""

    def follower_ended(self, follower: "SimulatedFollower", reason: str) -> None:
        """Its process has ended by itself."""


class Process(Protocol):
    """Whose rank it is."""

    def wake(self) -> None: ...

    def leave(self, reason: str) -> None: ...


class SimulatedRank:
    """ranks: those of the instance, of which it is number `number`; None: it is the only one. transfers: what the process uses;
    loop: what the thread drives."""

    def __init__(
        self, number: int, ranks: ToyRanks | None, size: Size, clock: LocalClock, parts: Parts, process: Process, host: str
    ) -> None:
        self._process, self._looks, self._clock = process, size.looks, clock
        self._thread = Loop(clock.clock, self)
        self.engine = parts.make_engine(clock, ranks)
        self.transport = parts.make_transport(self.look)
        engine, in_all = self.engine.description, 1 if ranks is None else ranks.ranks
        kv_heads = engine.model.kv_heads
        first_head = heads_of(number, in_all, kv_heads).start
        self.loop = TransferLoop(self.transport, "memory", engine.memory, engine.layout, size.pages, clock, first_head=first_head)
        self.transfers = TargetRanks(self.loop, number, in_all, kv_heads)
        self.info = RankInfo(rank=number, pid=1, host=host, device="cpu")
        self._thread.wake(clock.clock.now)

    def act(self) -> None:
        """A turn of the thread."""
        try:
            if self.loop.step():
                self._process.wake()
        except TandemError as error:
            self._process.leave(f"{type(error).__name__}: {error}")

    def next_deadline(self) -> float:
        loop, looks = self.loop, self._looks
        pace_s = looks.busy_s if loop.active else looks.expecting_s if loop.expecting else looks.idle_s
        looks_s = self._clock() + pace_s
        deadline = loop.next_deadline()
        return self._clock.simulated(looks_s if deadline is None else min(looks_s, deadline))

    def look(self) -> None:
        """The thread acts as soon as may be."""
        self._thread.wake(0.0)

    def stop_until(self, until_s: float) -> None:
        self._thread.stop_until(until_s)

    def end(self) -> None:
        """The thread never acts again."""
        self._thread.end()


class SimulatedFollower:
    """The process of a rank other than the leader. name: of its instance."""

    def __init__(
        self, number: int, ranks: ToyRanks, name: Name, size: Size, clock: Clock, network: Network, parts: Parts
    ) -> None:
        self.name = rank_name(name.id, number, name.incarnation)
        self.address = name.rank_address(number)
        self.alive = True
        self.stopped_until_s = 0.0
        self._network, self._parts = network, parts
        self._clock = LocalClock(clock, name.began_s + number * APART_S)
        self._loop = Loop(clock, self)
        self.rank = SimulatedRank(number, ranks, size, self._clock, parts, self, name.host(size))
        inbox: Any = ToFollower
        self._mail: Post[Any] = Post(
            self.name, inbox, network, network.open(self.address, self.name, self._loop.wake, "rank"), {}
        )
        leader = rank_name(name.id, 0, name.incarnation)
        self._mail.route(leader, name.rank_address(0), watch=True)
        line = Line(leader, "rank 0", self._clock())
        self._follower = FollowerLoop(self.rank.engine, self.rank.transfers, self._mail, line)
        self._loop.wake(clock.now)

    def act(self) -> None:
        try:
            self._follower.turn(self._clock())
        except TandemError as error:
            self.leave(f"{type(error).__name__}: {error}")
            return
        if self._follower.end is not None:
            self.leave(self._follower.end.reason)
        elif self.rank.loop.active:
            self.rank.look()

    def next_deadline(self) -> float:
        return min(self._clock.simulated(self._follower.next_deadline()), self._mail.next_deadline())

    def wake(self) -> None:
        self._loop.wake(0.0)

    def drain(self) -> None:
        """As SIGTERM does."""
        self._follower.ask_drain()

    def stop_until(self, until_s: float) -> None:
        """As SIGSTOP does, and SIGCONT then."""
        self.stopped_until_s = max(self.stopped_until_s, until_s)
        self._loop.stop_until(until_s)
        self.rank.stop_until(until_s)

    def leave(self, reason: str) -> None:
        """The process ends by itself; if the leader does not know why, it is told."""
        if self._follower.end is None:
            self._follower.fail(reason)
        self.rank.transfers.close()
        self.kill()
        self._parts.follower_ended(self, reason)

    def kill(self) -> None:
        """As SIGKILL does. Idempotent."""
        if self.alive:
            self.alive = False
            self._loop.end()
            self.rank.end()
            self._network.close(self.address)
