"""A whole fleet in one process on simulated time: the real router core, schedulers, workers, handoff and detokenizer.

Owns who is there. Replaced are only the rims: mail is a heap of messages that arrive a moment later, the model is the toy whose
tokens depend on every byte of its KV, and pages move by memmove. A fleet of another kind makes other engines and transports.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.config import RouterConfig
from common.errors import Unavailable
from common.executor import Executor
from common.ids import InstanceId, RequestId, Role, pack_ids
from common.sampling_params import SamplingParams
from common.text.detokenizer import Detokenizer
from engine.timed import Pace
from engine.toy import ToyExecutor, ToyRanks
from kv_transfer.memory import MemoryNetwork, MemoryTransport
from kv_transfer.transport import Transport
from router.core import RouterCore
from router.requests import RequestSpec
from simulation.client import Client, ClientObserver
from simulation.clock import Clock, LocalClock
from simulation.instance import Instance
from simulation.network import Calm, Network, Weather
from simulation.processes import FIRST_TEXT_PORT, RouterProcess, RouterSeat, router_name
from simulation.rank import Name, SimulatedFollower, Size

FIRST_PORT = 1000
JOIN_S, JOIN_LOOK_S = 5.0, 0.01
"""Within which the fleet is ready, and how often it is looked whether it is."""


@dataclass(frozen=True, slots=True)
class World:
    """What is outside of the processes: time, the weather on the network, and what moves memory. brief: see `Network`.
    observer: what the router measures."""

    clock: Clock = field(default_factory=Clock)
    weather: Weather = field(default_factory=Calm)
    memory: MemoryNetwork = field(default_factory=MemoryNetwork)
    brief: bool = False
    observer: ClientObserver = field(default_factory=ClientObserver)


class SimulatedFleet:
    """Routers, detokenizers and instances. `clock.turn` moves the clock to what happens next, and those to whom it happens act.

    size: what each instance is made of. routers: how many; `config` is that of each of them. ranks: of the instances of a role;
    one where it is not said.
    """

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        config: RouterConfig | None = None,
        size: Size | None = None,
        world: World | None = None,
        routers: int = 1,
        ranks: Mapping[Role, int] | None = None,
    ) -> None:
        world = world or World()
        self.clock = world.clock
        self.network = Network(world.clock, world.weather, world.brief)
        self.memory = world.memory
        self.observer = world.observer
        self.size = size or Size()
        self._config = config or RouterConfig()
        self._ranks = ranks or {}
        self.routers = [self._make_router(seat, routers) for seat in range(routers)]
        """The last life of each."""
        self.routers_killed = 0
        self._clients: defaultdict[InstanceId, list[Client]] = defaultdict(list)
        """Who asked which life of a router."""
        self.instances: dict[str, Instance] = {}
        """Those whose processes live."""
        self.lives: list[Instance] = []
        """Every incarnation that there was."""
        self.ends: list[tuple[str, str]] = []
        """(name, reason) of instances that ended by themselves."""
        self.rank_ends: list[tuple[str, str]] = []
        """(name, reason) of followers that did."""
        for number in range(prefill):
            self.start(f"prefill-{number}", "prefill")
        for number in range(decode):
            self.start(f"decode-{number}", "decode")
        while unready := [reason for each in self.routers for reason in each.core.unready()]:
            assert self.clock.now < JOIN_S, unready
            self.run_for(JOIN_LOOK_S)

    @property
    def router_process(self) -> RouterProcess:
        """The first router, or the only one."""
        return self.routers[0]

    @property
    def router(self) -> RouterCore:
        return self.router_process.core

    @property
    def detokenizer(self) -> Detokenizer:
        return self.router_process.detokenizers[0].core

    # --- who is there ------------------------------------------------------------------------------------------------------

    def start(self, name: str, role: Role, address: str | None = None, began_s: float = 0.0) -> Instance:
        """An instance starts, or starts again. address: that of a former incarnation, whose mail it gets. began_s: see `Name`."""
        life = len(self.lives)
        inbox, routers = address or f"tcp://127.0.0.1:{FIRST_PORT + life}", tuple(each.address for each in self.routers)
        full_name = Name(InstanceId(name), role, life, inbox, began_s, routers, self._ranks.get(role, 1))
        instance = Instance(full_name, self.size, self.clock, self.network, self, self.instance_ended)
        self.instances[name] = instance
        self.lives.append(instance)
        return instance

    def kill(self, name: str) -> Instance:
        """The processes of all its ranks are gone, and their memory with them."""
        instance = self.instances.pop(name)
        instance.kill()
        for follower in instance.followers:
            follower.kill()
        for pool in instance.info.pools:
            self.memory.regions.pop(pool.agent, None)
        return instance

    def kill_rank(self, name: str, rank: int) -> None:
        """The process of a follower is gone; the instance ends by itself."""
        instance = self.instances[name]
        instance.followers[rank - 1].kill()
        self.memory.regions.pop(instance.info.pools[rank].agent, None)

    def kill_router(self, seat: int) -> None:
        """The process is gone, with its detokenizers. Its clients get nothing more."""
        router = self.routers[seat]
        router.kill()
        self.routers_killed += 1
        for client in self._clients.pop(router.name, ()):
            client.cut_off = not client.ended

    def start_router(self, seat: int) -> None:
        """Another life begins at the address of one that was killed."""
        self.routers[seat] = self._make_router(seat, len(self.routers), self.routers[seat])

    def _make_router(self, seat: int, seats: int, former: RouterProcess | None = None) -> RouterProcess:
        life, port = (0, FIRST_TEXT_PORT) if former is None else (former.life + 1, former.next_port)
        place = RouterSeat(seat, router_name(seat, seats, life), life, port)
        return RouterProcess(place, self.clock, self.network, self._config, self.observer)

    def connection_broken(self, name: str) -> None:
        """Every router sees its connection to this instance break."""
        for router in self.routers:
            if router.alive:
                router.connection_broken(InstanceId(name))

    def make_engine(self, clock: LocalClock, ranks: ToyRanks | None) -> Executor:
        pace = Pace(self.size.cost, clock)
        return ToyExecutor(self.size.pages, self.size.rows, pace, prepare_s=self.size.prepare_s, ranks=ranks)

    def make_transport(self, wake: Callable[[], None]) -> Transport:
        return MemoryTransport(self.memory)

    def follower_ended(self, follower: SimulatedFollower, reason: str) -> None:
        self.rank_ends.append((follower.name, reason))

    def instance_ended(self, instance: Instance, reason: str) -> None:
        self.ends.append((instance.name.id, reason))
        if self.instances.get(instance.name.id) is instance:  # it may have a successor already
            del self.instances[instance.name.id]

    # --- what clients do ---------------------------------------------------------------------------------------------------

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int) -> Client:
        """A client asks for a greedy answer."""
        sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0.0)
        return self.ask(RequestSpec(RequestId(name), 0, pack_ids(prompt), sampling))

    def ask(self, *choices: RequestSpec, seat: int = 0) -> Client:
        """A client asks this router for some choices. Raises what the router raises, and Unavailable when nobody listens."""
        client = Client(*(choice.request_id for choice in choices))
        router = self.routers[seat]
        if not router.alive:
            raise Unavailable(f"{router.name} is gone")
        router.submit(choices, client)
        self._clients[router.name].append(client)
        return client

    def leave(self, *names: str) -> None:
        """The client of these requests hangs up."""
        for router in self.routers:
            if router.alive:
                router.cancel([RequestId(name) for name in names])

    def pause(self, name: str, seconds: float) -> None:
        """The instance does nothing for so long, as a stopped process; what is sent to it waits."""
        self.instances[name].stop_until(self.clock.now + seconds)
        self.run_for(seconds)

    def stop_router(self, seconds: float) -> None:
        """The router's process is stopped for so long, or its loop is busy; what is sent to it waits."""
        self.router_process.stop_until(self.clock.now + seconds)
        self.run_for(seconds)

    def restart_router(self, seat: int = 0) -> None:
        """The router's process is killed, and another life starts at its address, which knows nothing."""
        self.kill_router(seat)
        self.start_router(seat)

    # --- time --------------------------------------------------------------------------------------------------------------

    def run_for(self, seconds: float) -> None:
        ends_s = self.clock.now + seconds
        while self.clock.next_deadline() < ends_s:
            self.clock.turn()
        self.clock.now = ends_s

    def turn_until(self, done: Callable[[], bool], seconds: float = 10.0) -> None:
        """Turn until the condition holds. Raises AssertionError when it does not within so many seconds of simulated time."""
        ends_s = self.clock.now + seconds
        while not done():
            assert self.clock.next_deadline() <= ends_s, f"not within {seconds:g} s; last messages: {self.network.log[-10:]}"
            self.clock.turn()

    def run(self, *clients: Client) -> None:
        """Turn until every client has its ending, and then until everything has come home."""
        self.turn_until(lambda: all(client.ended for client in clients))
        self.turn_until(self.is_home)

    def is_home(self) -> bool:
        """Every page in its pool, no request anywhere."""
        loads = [instance.scheduler.report().load for instance in self.instances.values()]
        pages = all(load.pages_free == load.pages_total for load in loads)
        idle = all(load.waiting_requests + load.running_requests + load.reservations == 0 for load in loads)
        return pages and idle and not any(each.alive and len(each.core.requests) for each in self.routers)
