"""`launch ray`: routers on this host, and prefill and decode instances on the nodes of a Ray cluster.

Owns everything that calls Ray, and the joining of an instance's hosts, each of which runs a part of its ranks, to one life with
one end. Start, watch and stop of the fleet are those of `launch local`; to them an instance is like a child process.

    placement group   one for each instance: a bundle of processors and GPUs on each of its nodes. Ray keeps it when the instance
                      dies, moves its bundles when a node is lost and another has room, and gets it back when the instance has
                      left as it was told, or this process ends
    actor             one for each bundle and life (`RankHost`): it starts the ranks there as a child process

    wait for a place ─► start every host's ranks ─► pass on what rank 0's host reports ─► one has ended ─► so do the others

Only texts and numbers cross to the actors and back: Ray itself would unpickle anything.
"""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from common.addresses import LOOPBACK, free_port, is_loopback
from common.config import EngineConfig
from common.errors import ConfigError, TandemError
from common.extras import install_command
from common.processes.child import KILL_S, Exited, JsonLine, Progress, Ready, Reported
from launch import child
from launch.child import LaunchReport, RoleEvent, RoleProcess, launch_command
from launch.fleet_options import Bundle, RayConfig, bundles_of, check_gpus
from launch.local import ROLES, ChildFleet, FleetConfig, LocalRole, OnEvent, run_fleet
from launch.rank_setup import check_nccl

OTHERS_S = 15.0
"""How long the other hosts of an instance may take to end when one has ended: the ranks miss each other much sooner."""

ANSWER_S = 30.0
"""How long an actor may take to answer, after which it counts as lost."""
ACTOR_KILL_S = 6.0
"""How long it may take to end its process before Ray ends the actor."""
LOOK_S = 0.5
"""How often a wait looks whether it is given up. A wait for a place that takes longer is worth a line."""
CALLS_AT_ONCE = 4
"""Calls that one actor takes at once: it waits for events while it is told to stop."""


# --- on a node -----------------------------------------------------------------------------------------------------------------

LONG_POLL_S = 5.0
"""How long a question for events may wait for one."""


class Ended(JsonLine, frozen=True):
    """The process has ended. status, account: as in `common.processes.child.Exited`."""

    status: int
    account: str


HostEvent = LaunchReport | Ended


class RankHost:
    """What runs in an actor: the process of some ranks, on their node. Its methods may be called at the same time from several
    threads. When the actor is gone, so is the process's parent: the process ends like any other child."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._child: RoleProcess | None = None

    def node(self) -> str:
        """The address of this node, as Ray knows it."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())

    def free_port(self) -> int:
        """A port that nobody listens at now."""
        return free_port()

    def start(self, role: str, flags: Sequence[str]) -> None:
        """Start the process. Called once. Raises OSError."""
        self._child = RoleProcess(self._name, launch_command(role, flags), self._keep)

    def next_events(self) -> list[bytes]:
        """Each a HostEvent as JSON. Waits LONG_POLL_S for the first one."""
        try:
            events = [self._events.get(timeout=LONG_POLL_S)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """Returns when the process is gone."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(KILL_S)

    def _keep(self, event: RoleEvent) -> None:
        line = event.report if isinstance(event, Reported) else Ended(status=event.status, account=event.account)
        self._events.put(msgspec.json.encode(line))


# --- here ----------------------------------------------------------------------------------------------------------------------


class HostLost(TandemError):
    """The node or the actor that ran ranks of an instance is gone, or does not answer."""


class RankNode(Protocol):
    """Some ranks of an instance, on one node. Methods that return something, and `start`, raise HostLost."""

    node: str
    """The address by which other nodes reach its ranks."""

    def free_port(self) -> int:
        """A port of the node that nobody listens at."""

    def start(self, role: str, flags: Sequence[str]) -> None:
        """Start the process of these ranks."""

    def next_events(self) -> list[HostEvent]:
        """Waits some seconds for the first one."""

    def terminate(self) -> None:
        """Ask its process to stop in order. Waits for no answer."""

    def kill(self) -> None:
        """End its process and give the node's resources to the next host."""


class ReservedNodes(Protocol):
    """What the cluster keeps for an instance, life after life: a bundle of resources on each of its nodes."""

    bundles: Sequence[Bundle]

    def hosts(self, given_up: Callable[[], bool], waits: Callable[[str], object]) -> Sequence[RankNode]:
        """A new host in each bundle, in order; none when `given_up` says so. waits: told once what is waited for, if that takes
        long. Raises HostLost."""


class RayInstance:
    """One life of an instance. Implements `common.processes.child.Running`."""

    def __init__(self, name: str, role: LocalRole, flags: Sequence[str], place: ReservedNodes, on_event: OnEvent) -> None:
        """flags: without those that follow from where the ranks are."""
        self.name = name
        self._role, self._flags, self._place, self._on_event = role, flags, place, on_event
        self._is_stopping = self._killed = False
        self._hosts: Sequence[RankNode] = ()
        self._account = "it waits for a place on the Ray cluster"
        self._lock = threading.Lock()
        """Held while hosts are started, so that each is told to stop once: a second time would mean at once."""
        self._gone = threading.Event()
        threading.Thread(target=self._live, name=f"{name} on Ray", daemon=True).start()

    def terminate(self) -> None:
        with self._lock:
            self._is_stopping = True
            for host in self._hosts:
                host.terminate()

    def kill(self) -> None:
        self._killed = True  # what is started after this is ended by `_live`
        for host in self._hosts:
            host.kill()

    def wait(self, timeout_s: float) -> bool:
        return self._gone.wait(timeout_s)

    def account(self) -> str:
        return self._account

    # --- the thread of this life -----------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            end = self._run()
        except HostLost as error:
            end = Ended(status=1, account=str(error))
        for host in self._hosts:
            host.kill()
        self._account = end.account
        self._on_event(Exited(self.name, end.status, end.account))
        self._gone.set()

    def _run(self) -> Ended:
        """Raises HostLost."""
        hosts = self._place.hosts(self._given_up, lambda what: self._show(Progress(text=what)))
        if not hosts:
            return Ended(status=0, account="it was stopped while it waited for a place on the Ray cluster")
        with self._lock:
            self._hosts = hosts
            if self._given_up():
                return Ended(status=0, account="it was stopped before its ranks were started")
            for host, flags in zip(hosts, self._flags_of(hosts), strict=True):
                host.start(self._role, flags)
        if self._killed:
            return Ended(status=1, account="it was killed while its ranks were started")
        ends: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        for host in hosts:
            arguments = (host, host is hosts[0], ends)
            threading.Thread(target=self._listen, args=arguments, name=f"{self.name} on {host.node}", daemon=True).start()
        ended = [ends.get()]
        until = time.monotonic() + OTHERS_S
        with contextlib.suppress(queue.Empty):
            while len(ended) < len(hosts):
                ended.append(ends.get(timeout=max(0.0, until - time.monotonic())))
        return next((end for end in ended if end.status != 0), ended[0])  # the first that failed is the reason for the others

    def _flags_of(self, hosts: Sequence[RankNode]) -> list[list[str]]:
        """Raises HostLost."""
        common = [[*self._flags, f"--host={host.node}"] for host in hosts]
        if len(hosts) == 1:
            return common
        leader = f"--leader=tcp://{hosts[0].node}:{hosts[0].free_port()}"
        ranks = [f"--rank={bundle.first}-{bundle.last}" for bundle in self._place.bundles]
        return [[*flags, which, leader] for flags, which in zip(common, ranks, strict=True)]

    def _listen(self, host: RankNode, leads: bool, ends: "queue.SimpleQueue[Ended]") -> None:
        """Pass on what this host reports, until its process has ended. leads: it has rank 0, which says when all are ready."""
        try:
            while True:
                for event in host.next_events():
                    if isinstance(event, Ended):
                        ends.put(event)
                        return
                    if leads or not isinstance(event, Ready):
                        self._show(event)
        except HostLost as error:
            ends.put(Ended(status=1, account=str(error)))

    def _show(self, report: LaunchReport) -> None:
        if isinstance(report, Progress):
            self._account = f"its last report was: {report.text}"
        self._on_event(Reported(self.name, report))

    def _given_up(self) -> bool:
        return self._is_stopping or self._killed


class RayHost:
    """An actor that runs a RankHost. Implements `launch.ray_fleet.RankNode`."""

    def __init__(self, ray: Any, actor: Any, node: str) -> None:
        self._ray, self._actor, self.node = ray, actor, node
        self._events: msgspec.json.Decoder[HostEvent] = msgspec.json.Decoder(HostEvent)

    def free_port(self) -> int:
        return int(self._answer(self._actor.free_port.remote()))

    def start(self, role: str, flags: Sequence[str]) -> None:
        self._answer(self._actor.start.remote(role, list(flags)))

    def next_events(self) -> list[HostEvent]:
        lines: list[bytes] = self._answer(self._actor.next_events.remote(), LONG_POLL_S + ANSWER_S)
        return [self._events.decode(line) for line in lines]

    def terminate(self) -> None:
        self._actor.terminate.remote()  # who listens to the host learns when it is lost

    def kill(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # it is gone, or held up: Ray ends it in either case
            self._ray.get(self._actor.kill.remote(), timeout=ACTOR_KILL_S)
        self._ray.kill(self._actor)  # an actor that does not answer takes its process with it

    def _answer(self, call: Any, timeout_s: float = ANSWER_S) -> Any:
        """Raises HostLost."""
        try:
            return self._ray.get(call, timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise HostLost(f"its ranks on the Ray node {self.node} are lost: {reason}") from error


class RayPlace:
    """A placement group. Implements `launch.ray_fleet.ReservedNodes`."""

    def __init__(self, ray: Any, name: str, bundles: Sequence[Bundle], only: str) -> None:
        """only: the one node that can be used, because the router listens on loopback; "" when all can."""
        from ray.util.placement_group import placement_group

        self.bundles = bundles
        self._ray, self._name, self._only = ray, name, only
        self._group = placement_group([bundle.resources for bundle in bundles], strategy="STRICT_SPREAD")

    def give_back(self) -> None:
        """Others may have its resources. Nothing runs there any more."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)

    def hosts(self, given_up: Callable[[], bool], waits: Callable[[str], object]) -> list[RayHost]:
        is_told = False
        while not self._group.wait(LOOK_S):
            if given_up():
                return []
            if not is_told:
                is_told = True
                waits(self._needs())
        actors = [self._actor(number, bundle) for number, bundle in enumerate(self.bundles)]
        hosts: list[RayHost] = []
        for actor in actors:
            node = self._node_of(actor, given_up)
            if not node:
                for each in actors:
                    self._ray.kill(each)
                return []
            hosts.append(RayHost(self._ray, actor, self._address(node)))
        return hosts

    def _actor(self, number: int, bundle: Bundle) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        kind = self._ray.remote(RankHost).options(
            num_cpus=bundle.cpus, num_gpus=bundle.gpus, max_concurrency=CALLS_AT_ONCE, scheduling_strategy=strategy
        )
        return kind.remote(self._name)

    def _node_of(self, actor: Any, given_up: Callable[[], bool]) -> str:
        """The address of the actor's node, as soon as it runs; "" when that is given up. Raises HostLost."""
        call = actor.node.remote()
        while not given_up():
            try:
                return str(self._ray.get(call, timeout=LOOK_S))
            except self._ray.exceptions.GetTimeoutError:
                continue
            except self._ray.exceptions.RayError as error:
                reason = " ".join(str(error).split())
                raise HostLost(f"Ray could not start an actor for it: {reason}") from error
        return ""

    def _address(self, node: str) -> str:
        """Raises HostLost."""
        if self._only and node != self._only:
            raise HostLost(
                f"Ray placed it on {node}, from where nobody reaches a router that listens on loopback: start with --host "
                f"{self._only} (or 0.0.0.0) and --cluster-key"
            )
        return LOOPBACK if self._only else node

    def _needs(self) -> str:
        resources = " and ".join(f"{amount:g} {kind}" for kind, amount in self.bundles[0].resources.items())
        nodes = "a node" if len(self.bundles) == 1 else f"each of {len(self.bundles)} nodes"
        return f"waiting until {nodes} of the Ray cluster has {resources} free"


def run(config: FleetConfig, cluster: RayConfig) -> int:
    """Start, watch and stop. Returns the exit status, as `launch.local.run_fleet` does. Raises ConfigError, also when ranks
    cannot be divided among nodes."""
    engine = config.engine
    check_nccl(config.instance, on_gpus=engine.device.startswith("cuda") and engine.executor == "torch")
    bundles = bundles_of(cluster, config.instance.tp, on_gpus=engine.device != "cpu" and engine.executor != "timed")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"launch ray needs Ray, which is not installed here: on every node, with the same version: {install_command('ray')}"
        ) from error
    signal.pthread_sigmask(signal.SIG_BLOCK, child.STOP_SIGNALS)  # before Ray starts threads, which would take them
    try:
        ray.init(address=cluster.ray_address, logging_level="warning")
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"--ray-address {cluster.ray_address}: no Ray cluster answers ({error}). Start one with `ray start --head` here and "
            "`ray start --address HEAD:6379` on the other nodes"
        ) from error
    check_gpus(bundles[0], engine.device, ray.nodes())
    here = str(ray.util.get_node_ip_address())
    only = here if is_loopback(f"tcp://{config.router.host}:0") else ""
    places = {name: RayPlace(ray, name, bundles, only) for role in ROLES for name in config.names(role)}

    def engines() -> dict[str, EngineConfig]:
        """The ranks of an instance on one node share the processors that Ray reserves for them there."""
        return dict.fromkeys(config.instance_names, replace(engine, threads=engine.threads or bundles[0].cpus))

    def start(name: str, role: LocalRole, flags: Sequence[str], on_event: OnEvent) -> RayInstance:
        if name not in places:
            places[name] = RayPlace(ray, name, bundles, only)

        def tell(event: RoleEvent) -> None:
            if isinstance(event, Exited) and event.status == 0:  # it has left: others may have its place
                places.pop(name).give_back()
            on_event(event)

        return RayInstance(name, role, flags, places[name], tell)

    try:
        return run_fleet(ChildFleet(config, engines, start_instance=start, here=here))
    finally:
        ray.shutdown()
