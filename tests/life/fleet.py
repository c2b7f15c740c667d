"""A simulated fleet whose engine is the toy, whose tokens depend on every byte of its KV, and whose pages move by memmove.

Owns what befalls its processes: they are killed, stopped and started again. Judges nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush

from common.config import RouterConfig
from common.errors import TandemError, Unavailable
from common.executor import Executor
from common.ids import ROUTER, InstanceId, RequestId, Role, ServingRole, pack_ids
from common.messages import AnyMessage
from common.messages.variants import AdapterEntry
from common.sampling_params import SamplingParams
from common.text.detokenizer import Detokenizer
from engine.timed import Pace
from kv_transfer.transport import Transport
from router.adapters import FleetAdapters, Operation
from router.core import RouterCore
from router.members import Member
from router.requests import RequestSpec
from simulation.clock import Clock, LocalClock
from simulation.fleet import SimulatedFleet
from simulation.instance import Instance, Name
from simulation.network import Calm, Letter, Network, Weather
from simulation.processes import FIRST_TEXT_PORT, RouterProcess
from tests.engine.toy import ToyExecutor, ToyRanks
from tests.kv_transfer.memory import MemoryNetwork, MemoryTransport
from tests.life.client import Client, ClientObserver
from tests.life.letters import MEMBERSHIP
from tests.life.ranks import SimulatedFollower, ToyInstance, ToySize


class ToyNetwork(Network):
    """A network that keeps a log, and decodes every message."""

    def __init__(self, clock: Clock, weather: Weather) -> None:
        super().__init__(clock, weather)
        self.decodes_all = True
        self.log: list[tuple[str, str, str]] = []
        """(sender, kind, receiver) of each letter, without membership."""
        self.taps.append(self._note)

    def throw(self, sender: InstanceId, address: str, body: bytes) -> None:
        """These bytes arrive there now, whoever sent them and whatever they are."""
        mailbox = self._at(address)
        self.letters += 1
        letter = Letter(sender, mailbox.owner, "bytes", None, body)
        heappush(mailbox.letters, (self.clock.now, self.letters, letter))
        mailbox.wake(self.clock.now)

    def _note(self, letter: Letter, message: AnyMessage, delays: tuple[float, ...]) -> None:
        if letter.kind not in MEMBERSHIP:
            self.log.append((letter.sender, letter.kind, letter.to))


class ToyRouter(RouterProcess):
    """A life of a router that can be stopped, slowed down and killed. seat: the number of its address, which its successor has
    too. life: the number of this life there."""

    def __init__(
        self,
        seat: int,
        life: int,
        name: InstanceId,
        clock: Clock,
        network: Network,
        config: RouterConfig,
        observer: ClientObserver,
        next_port: int,
    ) -> None:
        super().__init__(name, clock, network, config, observer, seat + 1, next_port)
        self.seat, self.life = seat, life
        self.alive = True
        self.stopped_until_s = 0.0
        self._slow_until_s = self._slow_turn_s = 0.0

    def act(self) -> None:
        super().act()
        if self.clock.now < self._slow_until_s:
            self.loop.stop_until(self.clock.now + self._slow_turn_s)

    def cancel(self, names: Sequence[RequestId]) -> None:
        self.deliver(self.core.requests.cancel(names, self.clock.now))

    def tell_role(
        self, name: InstanceId, role: ServingRole, answer: Callable[[Member | TandemError], object] = lambda _: None
    ) -> None:
        """As POST /cluster/{instance}/role does. Raises what the core raises."""
        self.deliver(self.core.fleet.change_role(name, role, answer, self.clock.now))

    def trace(self, seconds: float) -> None:
        """As POST /cluster/trace does. Raises what the core raises."""
        self.deliver(self.core.traces.start(seconds, self.clock.now))

    def stop_until(self, until_s: float) -> None:
        """Do nothing before then."""
        self.stopped_until_s = max(self.stopped_until_s, until_s)
        self.loop.stop_until(until_s)

    def slow_until(self, until_s: float, turn_s: float) -> None:
        """Take so long for each turn that begins before then."""
        self._slow_until_s, self._slow_turn_s = until_s, turn_s

    def kill(self) -> None:
        """As SIGKILL does: it never acts again, nor do its detokenizers, and its host refuses connections."""
        self.alive = False
        self.loop.end()
        for detokenizer in self.detokenizers:
            detokenizer.kill()
        self.network.close(self.address)

    def restart_detokenizer(self, shard: int) -> None:
        """Another process has taken the place of this detokenizer, which is gone."""
        self.detokenizers[shard].kill()
        successor = self.detokenizers[shard] = self.start_detokenizer(shard)
        self.detokenizer_moved(shard, successor.address)


@dataclass(frozen=True, slots=True)
class World:
    """What is outside of the processes."""

    clock: Clock = field(default_factory=Clock)
    weather: Weather = field(default_factory=Calm)
    memory: MemoryNetwork = field(default_factory=MemoryNetwork)


class ToyFleet(SimulatedFleet[ToyInstance, ToyRouter]):
    """routers: how many; `config` is that of each of them. ranks: of the instances of a role; one where it is not said."""

    size: ToySize
    network: ToyNetwork

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        config: RouterConfig | None = None,
        size: ToySize | None = None,
        world: World | None = None,
        routers: int = 1,
        ranks: Mapping[Role, int] | None = None,
    ) -> None:
        world = world or World()
        super().__init__(world.clock, ToyNetwork(world.clock, world.weather), size or ToySize())
        self.memory = world.memory
        self.observer = ClientObserver()  # type: ignore[abstract]  # of the rest nothing is kept
        self._config = config or RouterConfig()
        self._ranks = ranks or {}
        self.routers += [self._make_router(seat, routers) for seat in range(routers)]
        self.routers_killed = 0
        self._clients: defaultdict[InstanceId, list[Client]] = defaultdict(list)
        """The clients of each life of a router."""
        self.ends: list[tuple[str, str]] = []
        """(name, reason) of instances that ended by themselves."""
        self.rank_ends: list[tuple[str, str]] = []
        """(name, reason) of followers that did."""
        self.start_instances(prefill, decode)

    @property
    def router(self) -> RouterCore:
        return self.router_process.core

    @property
    def detokenizer(self) -> Detokenizer:
        return self.router_process.detokenizers[0].core

    # --- who is there ------------------------------------------------------------------------------------------------------

    def make_instance(self, name: Name) -> ToyInstance:
        return ToyInstance(name, self.clock, self, self._ranks.get(name.role, 1))

    def make_engine(self, clock: LocalClock) -> Executor:
        return self.make_toy(clock, None)

    def make_toy(self, clock: LocalClock, ranks: ToyRanks | None) -> ToyExecutor:
        pace, size = Pace(self.size.cost, clock), self.size
        return ToyExecutor(size.pages, size.rows, pace, prepare_s=size.prepare_s, kv_heads=size.kv_heads, ranks=ranks)

    def make_transport(self, wake: Callable[[], None]) -> Transport:
        return MemoryTransport(self.memory)

    def kill(self, name: str) -> ToyInstance:
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

    def _make_router(self, seat: int, seats: int, former: ToyRouter | None = None) -> ToyRouter:
        """The only router of a fleet has the simplest name: what is written about it then reads well."""
        life, port = (0, FIRST_TEXT_PORT) if former is None else (former.life + 1, former.next_port)
        first_name = ROUTER if seats == 1 else InstanceId(f"router-{seat + 1}")
        name = InstanceId(f"{first_name}-life-{life}") if life else first_name
        return ToyRouter(seat, life, name, self.clock, self.network, self._config, self.observer, port)

    def connection_broken(self, name: str) -> None:
        for router in self.routers:
            if router.alive:
                router.connection_broken(InstanceId(name))

    def follower_ended(self, follower: SimulatedFollower, reason: str) -> None:
        self.rank_ends.append((follower.name, reason))

    def instance_ended(self, instance: Instance, reason: str) -> None:
        self.ends.append((instance.name.id, reason))
        super().instance_ended(instance, reason)

    # --- what clients do ---------------------------------------------------------------------------------------------------

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int, adapter: str = "") -> Client:
        """A client asks for a greedy answer."""
        sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0.0)
        return self.ask(RequestSpec(RequestId(name), 0, pack_ids(prompt), sampling, adapter=adapter))

    def adapt(self, order: Callable[[FleetAdapters], Operation], seat: int = 0) -> list[AdapterEntry | TandemError]:
        """Order something about adapters. What came of it, once that is known."""
        came: list[AdapterEntry | TandemError] = []
        router = self.routers[seat]
        router.deliver(router.core.adapt(order(router.core.fleet.adapters), came.append, self.clock.now))
        return came

    def ask(self, *choices: RequestSpec, seat: int = 0) -> Client:
        """A client asks this router for some choices. Raises what the router raises, and Unavailable when nobody listens."""
        client = Client(*(choice.request_id for choice in choices))
        client.request.owner = choices[0].owner
        router = self.routers[seat]
        if not router.alive:
            raise Unavailable(f"{router.name} is gone")
        router.submit(client.request, choices)
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
        if any(each.alive and len(each.core.requests) for each in self.routers):
            return False
        loads = [instance.scheduler.report().load for instance in self.instances.values()]
        pages = all(load.pages_free == load.pages_total for load in loads)
        return pages and all(load.waiting_requests + load.running_requests + load.reservations == 0 for load in loads)
