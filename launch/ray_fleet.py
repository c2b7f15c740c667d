"""`launch ray`: routers on this host, and prefill and decode instances on the nodes of a Ray cluster.

Owns everything that calls Ray. Start, watch and stop are those of `launch local`; the instances are children in Ray actors.

    placement group   one for each instance: a bundle of processors and GPUs on each of its nodes. Ray keeps it when the instance
                      dies, moves its bundles when a node is lost and another has room, and gives it back when this process ends
    actor             one for each bundle and life: it starts the ranks there as a child process (`launch/rank_host.py`)

Only texts and numbers cross to the actors and back: Ray itself would unpickle anything.
"""

import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import msgspec

from common.addresses import LOOPBACK, is_loopback
from common.config import EngineConfig
from common.errors import ConfigError
from launch import local, signals
from launch.local import ROLES, LocalPlan, OnEvent, Role
from launch.rank_host import LONG_POLL_S, HostEvent, RankHost
from launch.ray_instance import HostLost, RayInstance
from launch.ray_plan import Bundle, RayConfig, bundles_of, check_gpus

ANSWER_S = 30.0
"""How long an actor may take to answer, after which it counts as lost."""
KILL_S = 6.0
"""How long it may take to end its process before Ray ends the actor."""
LOOK_S = 0.5
SHOW_AFTER_S = 5.0
"""When a wait for a place is worth a line."""
CALLS_AT_ONCE = 4
"""On one actor: it waits for events while it is told to stop."""


@dataclass(frozen=True, kw_only=True)
class RayPlan(LocalPlan):
    """What to start. Raises ConfigError, also when the ranks of an instance cannot be divided among its nodes."""

    ray: RayConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bundles()

    def engines(self) -> dict[str, EngineConfig]:
        """The ranks of an instance on one node share the processors that Ray reserves for them there."""
        engine = replace(self.engine, threads=self.engine.threads or self.bundles()[0].cpus)
        return {name: engine for role in ROLES for name in self.names(role)}

    @property
    def lends_cores(self) -> bool:
        """Ray reserves cores for each instance."""
        return False

    def bundles(self) -> list[Bundle]:
        """Of one instance."""
        return bundles_of(self.ray, self.instance.tp, on_gpus=self.engine.device != "cpu" and self.engine.executor != "timed")

    def _check_shares(self) -> None:
        """Only GPUs count, which Ray gives to one rank each."""


class RayHost:
    """An actor that runs a RankHost. Implements `launch.ray_instance.Host`."""

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
        end_actor(self._ray, self._actor)

    def _answer(self, call: Any, timeout_s: float = ANSWER_S) -> Any:
        """Raises HostLost."""
        try:
            return self._ray.get(call, timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise HostLost(f"its ranks on the Ray node {self.node} are lost: {reason}") from error


def end_actor(ray: Any, actor: Any) -> None:
    """End its process, then the actor itself. An actor that does not answer takes its process with it."""
    with contextlib.suppress(ray.exceptions.RayError):  # it is gone, or held up: Ray ends it in either case
        ray.get(actor.kill.remote(), timeout=KILL_S)
    ray.kill(actor)


class RayPlace:
    """A placement group. Implements `launch.ray_instance.Place`."""

    def __init__(self, ray: Any, name: str, bundles: Sequence[Bundle], only: str) -> None:
        """only: the one node that can be used, because the router listens on loopback; "" when all can."""
        from ray.util.placement_group import placement_group

        self.bundles = bundles
        self._ray, self._name, self._only = ray, name, only
        self._group = placement_group([bundle.resources for bundle in bundles], strategy="STRICT_SPREAD")

    def hosts(self, given_up: Callable[[], bool], waits: Callable[[str], object]) -> list[RayHost]:
        patience = Patience(given_up, waits, self._needs())
        while not self._group.wait(LOOK_S):
            if patience.ended():
                return []
        actors = [self._actor(number, bundle) for number, bundle in enumerate(self.bundles)]
        hosts: list[RayHost] = []
        for actor in actors:
            node = self._node_of(actor, patience)
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

    def _node_of(self, actor: Any, patience: "Patience") -> str:
        """The address of the actor's node, as soon as it runs; "" when that is given up. Raises HostLost."""
        call = actor.node.remote()
        while not patience.ended():
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


class Patience:
    """How long somebody waits for a place: until it is given up; and that this is said once."""

    def __init__(self, given_up: Callable[[], bool], waits: Callable[[str], object], what: str) -> None:
        self._given_up, self._waits, self._what = given_up, waits, what
        self._show_at: float | None = monotonic() + SHOW_AFTER_S

    def ended(self) -> bool:
        if self._show_at is not None and monotonic() >= self._show_at:
            self._show_at = None
            self._waits(self._what)
        return self._given_up()


def import_ray() -> Any:
    """Raises ConfigError."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "launch ray needs Ray, which is not installed here: pip install 'tandem-serve[ray]' on every node, the same version"
        ) from error
    return ray


def run(plan: RayPlan) -> int:
    """Start, watch and stop. Returns the exit status, as `launch.local.run` does. Raises ConfigError."""
    ray = import_ray()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)  # before Ray starts threads, which would take them
    try:
        ray.init(address=plan.ray.ray_address, logging_level="warning")
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"--ray-address {plan.ray.ray_address}: no Ray cluster answers ({error}). Start one with `ray start --head` here and "
            "`ray start --address HEAD:6379` on the other nodes"
        ) from error
    check_gpus(plan.bundles()[0], plan.engine.device, ray.nodes())
    here = str(ray.util.get_node_ip_address())
    only = here if is_loopback(f"tcp://{plan.router.host}:0") else ""
    places = {name: RayPlace(ray, name, plan.bundles(), only) for role in ROLES for name in plan.names(role)}

    def start(name: str, role: Role, flags: Sequence[str], on_event: OnEvent) -> RayInstance:
        return RayInstance(name, role, flags, places[name], on_event)

    try:
        return local.run(replace(plan, here=here), start_instance=start)
    finally:
        ray.shutdown()
