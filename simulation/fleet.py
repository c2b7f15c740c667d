"""A whole fleet in one process on simulated time: the real router core, schedulers, workers, handoff and detokenizer.

Owns the list of routers and instances, and their start. Only the rims are replaced: mail is a heap of messages that arrive a
moment later, and a kind of fleet makes engines and transports of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from common.executor import Executor
from common.ids import InstanceId, Role
from kv_transfer.transport import Transport
from simulation.clock import Clock, LocalClock
from simulation.instance import Instance, InstanceSize, Name
from simulation.network import Network
from simulation.processes import RouterProcess

FIRST_PORT = 1000
JOIN_S, JOIN_LOOK_S = 5.0, 0.01
"""The time within which the fleet is ready, and how often it is looked whether it is."""

InstanceT = TypeVar("InstanceT", bound=Instance)
RouterT = TypeVar("RouterT", bound=RouterProcess)


class SimulatedFleet(ABC, Generic[InstanceT, RouterT]):
    """Routers, detokenizers and instances. `clock.turn` moves the clock to what happens next, and the processes to which it
    happens act. size: what each instance is made of."""

    def __init__(self, clock: Clock, network: Network, size: InstanceSize) -> None:
        self.clock = clock
        self.network = network
        self.size = size
        self.routers: list[RouterT] = []
        """The last life of each."""
        self.instances: dict[str, InstanceT] = {}
        """Those whose processes live."""
        self.lives: list[InstanceT] = []
        """Every incarnation that there was."""

    @property
    def router_process(self) -> RouterT:
        """The first router, or the only one."""
        return self.routers[0]

    @abstractmethod
    def make_engine(self, clock: LocalClock) -> Executor: ...

    @abstractmethod
    def make_transport(self, wake: Callable[[], None]) -> Transport:
        """wake: makes the rank look at its transfers; for a transport that knows when something has happened."""

    @abstractmethod
    def make_instance(self, name: Name) -> InstanceT: ...

    def start_instances(self, prefill: int, decode: int) -> None:
        """Start so many of each role, and wait until every router can serve."""
        for number in range(prefill):
            self.start(f"prefill-{number}", "prefill")
        for number in range(decode):
            self.start(f"decode-{number}", "decode")
        until_s = self.clock.now + JOIN_S
        while lacks := [reason for each in self.routers for reason in (*each.core.unready(), *each.core.degraded())]:
            assert self.clock.now < until_s, lacks
            self.run_for(JOIN_LOOK_S)

    def start(self, name: str, role: Role, address: str | None = None, began_s: float = 0.0) -> InstanceT:
        """An instance starts, or starts again. address: that of a former incarnation, whose mail it gets. began_s: see `Name`."""
        life = len(self.lives)
        inbox, routers = address or f"tcp://127.0.0.1:{FIRST_PORT + life}", tuple(each.address for each in self.routers)
        instance = self.make_instance(Name(InstanceId(name), role, life, inbox, routers, began_s))
        self.instances[name] = instance
        self.lives.append(instance)
        return instance

    def instance_ended(self, instance: Instance, reason: str) -> None:
        """The instance has drained, or something in it raised a TandemError."""
        if self.instances.get(instance.name.id) is instance:  # it may have a successor already
            del self.instances[instance.name.id]

    def connection_broken(self, name: str) -> None:
        """Every router sees its connection to this instance break."""
        for router in self.routers:
            router.connection_broken(InstanceId(name))

    def run_for(self, seconds: float) -> None:
        ends_s = self.clock.now + seconds
        while self.clock.next_deadline() < ends_s:
            self.clock.turn()
        self.clock.now = ends_s
