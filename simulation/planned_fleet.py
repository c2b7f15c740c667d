"""A simulated fleet as a planner describes it: timed engines of a given size, and wires of a given speed.

Owns the engines' busy time and when writes end. Computes nothing and moves no bytes; everything that decides is the real code.

Writes take time, and what is under way shares each host's link. A host sends at full speed what was posted first, and takes in
what arrived first; both directions of its link are independent:

    posted ─► waits for the sender's link ─► leaves ─► waits for the receiver's ─► latency ─► done

The network between the hosts is as fast as all of their links together.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from common.config import RouterConfig
from common.executor import EngineDescription, Executor, StepPlan
from common.ids import ROUTER, Int32Array, Int64Array, Role, Ticket
from common.messages import ModelIdentity, PoolDescriptor
from common.pages.layout import KVLayout, MemoryRegion
from common.step_cost import StepCost
from engine.timed import Pace
from kv_transfer.transport import AgentLost, Connected, ConnectFailed, RunsDone, RunsFailed, Transport, TransportEvent
from router.timelines import Observer, ResumeReason
from simulation.clock import Clock, LocalClock
from simulation.fleet import SimulatedFleet
from simulation.instance import Instance, InstanceSize, Name, PageUse, PollIntervals
from simulation.network import Calm, Network
from simulation.plan import FleetPlan, FrontCosts
from simulation.processes import RouterProcess
from simulation.stretch import LateTokens, SparingExecutor, Stretch


@dataclass(slots=True, eq=False)
class _Host:
    """A host's link."""

    sent_s: float = 0.0
    """When the last write that was posted here has left."""
    arrived_s: float = 0.0
    """When the last write that comes here has arrived."""
    writers: set["WireTransport"] = field(default_factory=set)
    """The transports that are connected to this host."""


class Wires:
    """What the hosts of one fleet share. bytes_per_s: of every host's link, in each direction. latency_s: what any write takes,
    whatever its size."""

    def __init__(self, clock: Clock, bytes_per_s: float, latency_s: float) -> None:
        self.clock = clock
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self.hosts: dict[str, _Host] = {}
        self.names = 0
        self.bytes_written = 0
        """Bytes of the writes that have ended well."""

    def died(self, agent: str) -> None:
        """The process of this agent is gone: those with a link to it see that at once, and what is under way to it fails."""
        host = self.hosts.pop(agent, None)
        if host is not None:
            for writer in sorted(host.writers, key=lambda writer: writer.name):
                writer.lose(agent)

    def arrives_s(self, writer: _Host, reader: _Host, write_bytes: int) -> float:
        """When a write that is posted now ends. It takes its turn on both links."""
        alone_s = write_bytes / self._bytes_per_s
        writer.sent_s = max(self.clock.now, writer.sent_s) + alone_s
        reader.arrived_s = max(writer.sent_s, reader.arrived_s + alone_s)
        return reader.arrived_s + self._latency_s


class WireTransport:
    """Implements `kv_transfer.transport.Transport` over the wires. wake: called when `poll` has news."""

    def __init__(self, wires: Wires, wake: Callable[[], None]) -> None:
        self._wires = wires
        self._wake = wake
        wires.names += 1
        self.name = f"wire-{wires.names}"
        self._linked: set[str] = set()
        self._writes: dict[Ticket, str] = {}
        """What is under way, and to whom."""
        self._events: list[TransportEvent] = []

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        self._wires.hosts[self.name] = _Host()
        return self.name, b""

    def connect(self, pool: PoolDescriptor) -> None:
        host = self._wires.hosts.get(pool.agent)
        if host is None:
            self._report(ConnectFailed(pool.agent, f"agent {pool.agent} is gone"))
            return
        host.writers.add(self)
        self._linked.add(pool.agent)
        self._report(Connected(pool.agent, "simulated"))

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        reader = self._wires.hosts.get(agent)
        if reader is None or agent not in self._linked:
            self._report(RunsFailed(ticket, f"no link to {agent}", quiescent=True))
            return
        write_bytes = int(runs[:, 2].sum())
        self._writes[ticket] = agent
        arrives_s = self._wires.arrives_s(self._wires.hosts[self.name], reader, write_bytes)
        self._wires.clock.at(arrives_s, lambda: self._arrived(ticket, write_bytes))

    def poll(self) -> list[TransportEvent]:
        events, self._events = self._events, []
        return events

    def close(self, agent: str | None = None) -> None:
        """What is under way on a closed link arrives all the same."""
        if agent is None:
            self._wires.died(self.name)
        for peer in self._linked.copy() if agent is None else {agent} & self._linked:
            self._linked.discard(peer)
            if peer in self._wires.hosts:
                self._wires.hosts[peer].writers.discard(self)

    def lose(self, agent: str) -> None:
        """The process of this agent is gone."""
        self._linked.discard(agent)
        for ticket in [ticket for ticket, reader in self._writes.items() if reader == agent]:
            del self._writes[ticket]
            self._events.append(RunsFailed(ticket, "the agent died", quiescent=True))
        self._report(AgentLost(agent, "the agent died"))

    def _arrived(self, ticket: Ticket, write_bytes: int) -> None:
        if self._writes.pop(ticket, None) is not None and self.name in self._wires.hosts:
            self._wires.bytes_written += write_bytes
            self._report(RunsDone(ticket))

    def _report(self, event: TransportEvent) -> None:
        self._events.append(event)
        self._wake()


VOCAB_SIZE = 128_256
WORD, END = 10, 11
"""The tokens of an answer: its last one may be the end-of-text token."""
BASE_ADDRESS = 2**40
"""The address of every pool. Nobody reads or writes there."""
POLLS = PollIntervals(busy_s=0.025, expecting_s=10.0, idle_s=10.0)
"""The wires wake the processes that wait for them, so none needs to poll often. One that polls more rarely counts as stuck."""
WARM_UP_S = 5.0
"""After which every instance has its links, and has said so."""


def size_of(plan: FleetPlan, config: RouterConfig) -> InstanceSize:
    return InstanceSize(
        pages=plan.kv_pages,
        rows=plan.max_running,
        chunk_tokens=plan.chunk_tokens,
        max_waiting=plan.max_waiting,
        request_timeout_s=config.max_request_timeout_s,
        drain_timeout_s=config.drain_timeout_s,
        polls=POLLS,
        prefix_cache=plan.prefix_cache == "on",
    )


def describe(plan: FleetPlan) -> EngineDescription:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=plan.kv_token_bytes // 2, page_size=plan.page_size, dtype="uint8")
    model = ModelIdentity(
        name="simulated",
        fingerprint="simulated",
        architecture="simulated",
        dtype="bfloat16",
        vocab_size=VOCAB_SIZE,
        context_tokens=plan.context_tokens,
        kv_heads=1,
    )
    memory = MemoryRegion(address=BASE_ADDRESS, region_bytes=plan.kv_pages * layout.page_bytes, device="cpu")
    return EngineDescription(model, layout, plan.kv_pages, plan.max_running, memory, eos_token_ids=(END,), device="simulated")


class CountedPace(Pace):
    """A pace that counts the steps of its role, and the seconds that they take. The instance keeps its role up to date."""

    def __init__(self, clock: Callable[[], float], role: Role, fleet: "PlannedFleet") -> None:
        super().__init__(fleet.costs[role], clock)
        self._role, self._fleet = role, fleet

    def serve(self, role: Role) -> None:
        self._role, self.cost = role, self._fleet.costs[role]

    def add(self, plan: StepPlan) -> float:
        self._fleet.steps[self._role] += 1
        self._fleet.busy_s[self._role] += self.cost.seconds(plan.chunk_tokens, plan.decoding, plan.held_tokens)
        return super().add(plan)

    def repeat(self, rows: Int32Array, steps: int, held_tokens: int) -> float:
        seconds = super().repeat(rows, steps, held_tokens)
        self._fleet.steps[self._role] += steps
        self._fleet.busy_s[self._role] += seconds
        return seconds


class PlannedInstance(Instance):
    """An instance that takes steps which are all alike at once, if the plan says so."""

    stretch: Stretch | None = None

    def __init__(self, name: Name, clock: Clock, fleet: "PlannedFleet") -> None:
        super().__init__(name, clock, fleet)
        self._pace = fleet.paces[name.id]
        engine = self.rank.engine
        if fleet.skips_steps and isinstance(engine, SparingExecutor):
            self.stretch = Stretch(self.worker, engine, fleet.late_s)

    def turn(self, now: float) -> None:
        self._pace.serve(self.info.role)
        if self.stretch is None:
            super().turn(now)
            return
        self.stretch.end(now)
        super().turn(now)
        self.stretch.begin(now)

    def kill(self) -> None:
        if self.stretch is not None:
            self.stretch.end(self.clock())
        super().kill()


class PlannedObserver(Observer):
    """Keeps the resumes and the predictions of the router: its clients measure the rest (`simulation/run.py`)."""

    def __init__(self) -> None:
        self.resumes: list[ResumeReason] = []
        self.predictions: list[tuple[float, float]] = []
        """Times to first tokens as predicted, each with the real one."""

    def resumed(self, reason: ResumeReason) -> None:
        self.resumes.append(reason)

    def first_token(self, seconds: float, predicted_s: float | None) -> None:
        if predicted_s is not None:
            self.predictions.append((predicted_s, seconds))


class PlannedFleet(SimulatedFleet[PlannedInstance, RouterProcess]):
    """The fleet of a plan, ready for its load. config: of its router."""

    def __init__(self, plan: FleetPlan, config: RouterConfig) -> None:
        clock = Clock()
        super().__init__(clock, Network(clock, Calm(plan.message_s)), size_of(plan, config))
        self.wires = Wires(clock, plan.link_gbit * 1e9 / 8, plan.link_latency_s)
        self.observer = PlannedObserver()  # type: ignore[abstract]  # of the rest nothing is kept
        self.steps: Counter[Role] = Counter()
        """How many steps the engines of a role have begun."""
        self.busy_s: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        """The seconds that these steps take."""
        self.skips_steps = plan.skip_steps == "on"
        self.late_s: LateTokens = {}
        """How late tokens were told, where they were."""
        self.costs: dict[Role, StepCost] = {"prefill": plan.cost("prefill"), "decode": plan.cost("decode")}
        self.paces: dict[str, CountedPace] = {}
        self._starting: Name
        self._description = describe(plan)
        self._words = np.full(plan.context_tokens, WORD, dtype=np.int32)
        self._words[0] = END
        self.routers.append(RouterProcess(ROUTER, clock, self.network, config, self.observer, front=FrontCosts.parse(plan.front)))
        self.start_instances(plan.prefill, plan.decode)
        self.run_for(WARM_UP_S)
        for instance in self.instances.values():
            instance.page_use = PageUse(instance.pool, clock.now)
        self.network.clear()

    def seed_that_ends(self, tokens: int) -> int:
        """The seed with which the end-of-text token is the last of a prompt and its answer, of so many tokens together."""
        return 1 - tokens % len(self._words)

    def make_instance(self, name: Name) -> PlannedInstance:
        self._starting = name
        return PlannedInstance(name, self.clock, self)

    def make_engine(self, clock: LocalClock) -> Executor:
        pace = self.paces[self._starting.id] = CountedPace(clock, self._starting.role, self)
        return SparingExecutor(self._description, pace, self._words)

    def make_transport(self, wake: Callable[[], None]) -> Transport:
        return WireTransport(self.wires, wake)

    def kill(self, name: str) -> PlannedInstance:
        """The process is gone. Its connections break at once."""
        instance = self.instances.pop(name)
        instance.kill()
        self.wires.died(instance.info.pools[0].agent)
        self.connection_broken(name)
        return instance

    def instance_ended(self, instance: Instance, reason: str) -> None:
        super().instance_ended(instance, reason)
        self.wires.died(instance.info.pools[0].agent)
