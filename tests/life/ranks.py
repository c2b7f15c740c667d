"""Instances of the toy fleet: over the toy engine, with one rank or several, each of which can be stopped and killed.

Owns the processes of followers, which are made at the welcome: how ranks find each other is not simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import TandemError
from common.executor import Executor, ExecutorFailed
from common.instance.ports import Transfers
from common.instance.ranks.executor import RankedExecutor
from common.instance.ranks.follower import FollowerLoop
from common.instance.ranks.leader import Followers, remote_transfers
from common.messages import RankInfo
from common.messages.ranks import RankHello, RankWelcome, ToFollower, ToLeader, rank_name
from kv_transfer.target_ranks import RankedTransfers
from simulation.clock import Clock, LocalClock, Loop
from simulation.instance import Instance, InstanceSize, Name, Process, SimulatedRank
from simulation.network import Network, Post
from tests.engine.toy import TOY_HEADS, ToyExecutor, ToyRanks
from tests.kv_transfer.memory import MemoryTransport

if TYPE_CHECKING:
    from tests.life.fleet import ToyFleet

FIRST_RANK_PORT, MOST_RANKS = 20_000, 16
CLOCK_STEP_S = 37.0
"""The clocks of neighbouring ranks show times that differ by so much."""


@dataclass(frozen=True, kw_only=True)
class ToySize(InstanceSize):
    """What an instance is made of; its pages have 4 tokens each."""

    apart: bool = False
    """Each instance has a host of its own."""
    prepare_s: float = 0.0
    """How long a grammar takes to be ready."""
    kv_heads: int = TOY_HEADS


def rank_address(name: Name, rank: int) -> str:
    """The address of a rank's inbox for messages between ranks."""
    return f"tcp://127.0.0.1:{FIRST_RANK_PORT + MOST_RANKS * name.life + rank}"


def make_toy_rank(
    number: int, name: Name, share: ToyRanks | None, clock: LocalClock, fleet: "ToyFleet", process: Process
) -> SimulatedRank:
    info = RankInfo(rank=number, pid=1, host=name.id if fleet.size.apart else "here", device="cpu")
    ranks = 1 if share is None else share.ranks
    return SimulatedRank(fleet.make_toy(clock, share), fleet, clock, process, info, ranks)


class ToyInstance(Instance):
    """The process of an instance's leader, and its followers."""

    def __init__(self, name: Name, clock: Clock, fleet: "ToyFleet", ranks: int) -> None:
        self.should_drain = False
        self.stopped_until_s = 0.0
        self._parts = fleet
        self._leads: Followers | None = None
        self.rank_mail: Post[Any] | None = None
        self._share = None if ranks == 1 else ToyRanks(ranks, self._wake_ranks)
        self.followers: list[SimulatedFollower] = []
        super().__init__(name, clock, fleet)

    def make_rank(self) -> SimulatedRank:
        leader = make_toy_rank(0, self.name, self._share, self.clock, self._parts, self)
        if self._share is not None:
            self.followers = [
                SimulatedFollower(number, self._share, self.name, self.clock.clock, self._parts)
                for number in range(1, self._share.ranks)
            ]
        return leader

    def join_ranks(self) -> tuple[Executor, Transfers]:
        if not self.followers:
            return super().join_ranks()
        network, address, now = self._parts.network, rank_address(self.name, 0), self.clock()
        me = rank_name(self.name.id, 0, self.name.incarnation)
        inbox: Any = ToLeader
        mail: Post[Any] = Post(me, inbox, network, network.open(address, me, self.loop.wake, "rank"))
        self._leads, self.rank_mail = Followers(mail, len(self.ranks), {}), mail
        for follower in self.followers:
            self._leads.admit(follower.name, follower.hello, now)
        self._leads.welcomed = True
        self._leads.serve(now)
        transfers = RankedTransfers([self.rank.transfers, *remote_transfers(self._leads)])
        return RankedExecutor(self.rank.engine, self._leads), transfers

    @property
    def ranks(self) -> Sequence[SimulatedRank]:
        return [self.rank, *(follower.rank for follower in self.followers)]

    @property
    def processes(self) -> "Sequence[ToyInstance | SimulatedFollower]":
        """The processes of all ranks, in order."""
        return [self, *self.followers]

    @property
    def is_up(self) -> bool:
        """The processes of all ranks run."""
        now = self.clock.clock.now
        return now >= self.stopped_until_s and all(each.alive and now >= each.stopped_until_s for each in self.followers)

    def turn(self, now: float) -> None:
        if self._leads is not None:
            self._leads.turn(self.clock)
        if self.should_drain or (self._leads is not None and self._leads.drain_asked):
            self.worker.drain(now)
        super().turn(now)

    def next_deadline(self) -> float:
        deadline = super().next_deadline()
        if self._leads is None or self.rank_mail is None:
            return deadline
        return min(deadline, self.clock.simulated(self._leads.next_deadline()), self.rank_mail.next_deadline())

    def drain(self) -> None:
        """As SIGTERM does."""
        self.should_drain = True
        self.wake()

    def stop_until(self, until_s: float) -> None:
        """As SIGSTOP does to the leader, and SIGCONT then."""
        self.stopped_until_s = max(self.stopped_until_s, until_s)
        self.loop.stop_until(until_s)
        self.rank.thread.stop_until(until_s)

    def end_ranks(self, reason: str) -> None:
        if self._leads is not None:
            self._leads.end(reason, orderly=reason == "drained")
        super().end_ranks(reason)

    def kill(self) -> None:
        super().kill()
        if self._leads is not None:
            self._parts.network.close(rank_address(self.name, 0))

    def _wake_ranks(self) -> None:
        """All ranks have written a step, as a collective ends on all of them."""
        self.wake()
        for follower in self.followers:
            follower.wake()


class SimulatedFollower:
    """The process of a rank other than the leader. name: of its instance."""

    def __init__(self, number: int, ranks: ToyRanks, name: Name, clock: Clock, fleet: "ToyFleet") -> None:
        self.name = rank_name(name.id, number, name.incarnation)
        self.address = rank_address(name, number)
        self.alive = True
        self.stopped_until_s = 0.0
        self._network: Network = fleet.network
        self._parts = fleet
        self._clock = LocalClock(clock, name.began_s + number * CLOCK_STEP_S)
        self._loop = Loop(clock, self)
        self.rank = make_toy_rank(number, name, ranks, self._clock, fleet, self)
        inbox: Any = ToFollower
        mailbox = self._network.open(self.address, self.name, self._loop.wake, "rank")
        self.mail: Post[Any] = Post(self.name, inbox, self._network, mailbox)
        leader = rank_name(name.id, 0, name.incarnation)
        self.hello = RankHello(rank=number, ranks=ranks.ranks, address=self.address, info=self.rank.info, setup={})
        self._follower = FollowerLoop(self.mail, rank_address(name, 0), self.hello)
        self._follower.join(leader, RankWelcome(meeting=""), self._clock())
        self._follower.serve(self.rank.engine, self.rank.transfers)
        self._loop.wake(clock.now)

    def act(self) -> None:
        try:
            self._follower.turn(self._clock)
        except TandemError as error:
            self.leave(error)
            return
        if self._follower.ending is not None:
            self.leave(None)
        elif self.rank.loop.active:
            self.rank.look()

    def next_deadline(self) -> float:
        return min(self._clock.simulated(self._follower.next_deadline()), self.mail.next_deadline())

    def wake(self) -> None:
        self._loop.wake(0.0)

    def drain(self) -> None:
        """As SIGTERM does."""
        self._follower.ask_drain()

    def stop_until(self, until_s: float) -> None:
        """As SIGSTOP does, and SIGCONT then."""
        self.stopped_until_s = max(self.stopped_until_s, until_s)
        self._loop.stop_until(until_s)
        self.rank.thread.stop_until(until_s)

    def leave(self, error: TandemError | None) -> None:
        """The process ends by itself. None: the leader has told it to."""
        if error is None:
            assert self._follower.ending is not None
            reason = self._follower.ending.reason
        else:
            reason = f"{type(error).__name__}: {error}"
            self._follower.end(reason, error.step if isinstance(error, ExecutorFailed) else None)
        self.rank.transfers.close()
        self.kill()
        self._parts.follower_ended(self, reason)

    def kill(self) -> None:
        """As SIGKILL does. Idempotent."""
        if self.alive:
            self.alive = False
            self._loop.end()
            self.rank.thread.end()
            self._network.close(self.address)


def toy_of(instance: ToyInstance) -> ToyExecutor:
    assert isinstance(instance.rank.engine, ToyExecutor)
    return instance.rank.engine


def toys_of(instance: ToyInstance) -> list[ToyExecutor]:
    """Those of all ranks."""
    engines = [rank.engine for rank in instance.ranks]
    return [engine for engine in engines if isinstance(engine, ToyExecutor)]


def transport_of(instance: ToyInstance) -> MemoryTransport:
    assert isinstance(instance.rank.transport, MemoryTransport)
    return instance.rank.transport
