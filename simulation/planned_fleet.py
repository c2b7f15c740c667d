"""A simulated fleet as a planner describes it: timed engines of a given size, and wires of a given speed.

Owns the engines' busy time. Computes nothing and moves no bytes; everything that decides is the real code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.config import RouterConfig, parse_step_cost
from common.executor import EngineDescription, Executor, Plan
from common.ids import Role
from common.messages import ModelIdentity
from common.pages.layout import KVLayout, MemoryRegion
from engine.timed import Pace, StepCost, TimedExecutor
from engine.toy import ToyRanks
from kv_transfer.transport import Transport
from simulation.client import Observer
from simulation.clock import Clock, LocalClock
from simulation.fleet import Fleet, World
from simulation.instance import Instance
from simulation.network import Calm
from simulation.page_use import PageUse
from simulation.plan import FleetPlan
from simulation.size import Looks, Size
from simulation.wires import Wires, WireSpeed, WireTransport

VOCAB_SIZE = 128_256
WORD, END = 10, 11
"""The tokens of an answer: its last one may be the end-of-text token."""
BASE_ADDRESS = 2**40
"""Of every pool. Nobody reads or writes there."""
LOOKS = Looks(busy_s=0.025, expecting_s=10.0, idle_s=10.0)
"""The wires wake who waits for them, so nobody needs to look often. Who looks more rarely than that counts as stuck."""
WARM_UP_S = 5.0
"""After which every instance has its links, and has said so."""


def size_of(plan: FleetPlan, config: RouterConfig) -> Size:
    return Size(
        pages=plan.kv_pages,
        rows=plan.max_running,
        chunk_tokens=plan.chunk_tokens,
        max_waiting=plan.max_waiting,
        request_timeout_s=config.max_request_timeout_s,
        drain_timeout_s=config.drain_timeout_s,
        cost=StepCost(*parse_step_cost(plan.step_cost)),
        looks=LOOKS,
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


@dataclass(slots=True, eq=False)
class Work:
    """What the engines of a role have done. busy_s: the sum of their steps."""

    steps: int = 0
    busy_s: float = 0.0


class BusyPace(Pace):
    """A pace that counts."""

    def __init__(self, cost: StepCost, clock: Callable[[], float], work: Work) -> None:
        super().__init__(cost, clock)
        self._work = work

    def add(self, plan: Plan) -> float:
        self._work.steps += 1
        self._work.busy_s += self.cost.seconds(plan)
        return super().add(plan)


class Resumes(Observer):
    """Counts endings and resumes only: the clients measure the rest (`simulation/measured.py`)."""

    def first_token(self, seconds: float) -> None:
        """Not kept."""

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """Not kept."""


class PlannedFleet(Fleet):
    """The fleet of a plan, ready for its load. config: of its router."""

    def __init__(self, plan: FleetPlan, config: RouterConfig) -> None:
        clock = Clock()
        self.wires = Wires(clock, WireSpeed(bytes_per_s=plan.link_gbit * 1e9 / 8, latency_s=plan.link_latency_s))
        self.work: dict[Role, Work] = {"prefill": Work(), "decode": Work()}
        self._description = describe(plan)
        self._role: Role = "prefill"
        self._words = np.full(plan.context_tokens, WORD, dtype=np.int32)
        self._words[0] = END
        world = World(clock=clock, weather=Calm(plan.message_s), brief=True, observer=Resumes())
        super().__init__(plan.prefill, plan.decode, config, size_of(plan, config), world)
        self.run_for(WARM_UP_S)
        for instance in self.instances.values():
            instance.page_use = PageUse(instance.pool, clock.now)
        self.network.traffic.clear()
        for meter in self.network.meters.values():
            meter.clear()

    def seed_that_ends(self, tokens: int) -> int:
        """The seed with which the end-of-text token is the last of a prompt and its answer, of so many tokens together."""
        return 1 - tokens % len(self._words)

    def start(self, name: str, role: Role, address: str | None = None, began_s: float = 0.0) -> Instance:
        self._role = role
        return super().start(name, role, address, began_s)

    def make_engine(self, clock: LocalClock, ranks: ToyRanks | None) -> Executor:
        return TimedExecutor(self._description, BusyPace(self.size.cost, clock, self.work[self._role]), self._words)

    def make_transport(self, wake: Callable[[], None]) -> Transport:
        return WireTransport(self.wires, wake)

    def kill(self, name: str) -> Instance:
        """The process is gone. Its connections break at once."""
        instance = self.instances.pop(name)
        instance.kill()
        self.wires.died(instance.info.pools[0].agent)
        self.connection_broken(name)
        return instance

    def instance_ended(self, instance: Instance, reason: str) -> None:
        super().instance_ended(instance, reason)
        self.wires.died(instance.info.pools[0].agent)
