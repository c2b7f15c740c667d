"""`launch local`: a whole fleet on this machine, started together, kept alive, and stopped in order.

Owns the order of start and stop, and the children. Does not know what a child does inside, nor when to start one again: the
supervisor decides that (`launch/supervisor.py`). `launch ray` starts its instances elsewhere (`launch/ray_fleet.py`); all else is
the same.

    start   routers (with their detokenizers), then every instance at once, then wait until each router sees all of them, linked
    watch   a process that ended is started again with the same flags, a router on the same ports
    stop    the routers drain, then prefill, then decode, then the routers and their detokenizers
"""

import argparse
import logging
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Literal

import msgspec

from common.addresses import LOOPBACK, port_of, reachable, require_free
from common.config import AccessConfig, EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig, SecurityConfig
from common.errors import ConfigError
from common.host import core_count, divide_cores, place_on_gpus
from common.options import C, ConfigClass, parse_share, read_config, refuse_without_effect, to_flags
from common.processes.child import Broken, Exited, IntakeClosed, Parent, Progress, Ready, Reported, Running, stop_children
from engine.cpu.lent_cores import make_file
from engine.kv_budget import memory_part
from launch.child import (
    CloseIntake,
    KeepInstances,
    LaunchOrder,
    LaunchReport,
    MeetRouters,
    RoleEvent,
    RoleProcess,
    SpareWanted,
    launch_command,
    watch,
)
from launch.fleet_options import CoresConfig, FleetCounts, divide_by_work
from launch.fleet_page import FleetPage, curl_line
from launch.rank_setup import check_nccl
from launch.supervisor import GivenUp, SupervisedChild, Supervisor

ROUTER = "router"
STOP_S = 10.0
"""How long the processes of one stage may take to stop before they are killed. Instances and the router get their drain time on
top."""
LOOK_EVERY_S = 0.05
STOPPING = "stopping in order; a second Ctrl-C or SIGTERM stops everything at once"

LocalRole = Literal["prefill", "decode", "both"]
ROLES: tuple[LocalRole, ...] = ("prefill", "decode", "both")
"""In the order in which they are stopped."""
ONE_FOR_ALL = {"host", "tp", "device", "executor", "threads", "sharers", "kv_memory", "quantization"}
ONE_FOR_ALL |= {"startup_timeout_s", "drain_timeout_s"}
"""Flags of instances that this process uses itself: they are the same in every role."""
MakeCommand = Callable[[str, Sequence[str]], list[str]]
OnEvent = Callable[[RoleEvent], object]
StartInstance = Callable[[str, LocalRole, Sequence[str], OnEvent], Running]
"""Start the instance of that name and role with these flags, and tell its events."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """What to start."""

    counts: FleetCounts = FleetCounts()
    router: RouterConfig = RouterConfig()
    instance: InstanceConfig = InstanceConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    log: LogConfig = LogConfig()
    security: SecurityConfig = SecurityConfig()
    access: AccessConfig = AccessConfig()
    of_roles: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Values of flags that hold in one role only, by its name. Those of routers are in `router` and `access` already."""

    def __post_init__(self) -> None:
        """Raises ConfigError, before anything is started."""
        for role, values in self.of_roles.items():
            own: tuple[ConfigClass, ...] = (self.router, self.access) if role == ROUTER else (self.instance, self.engine)
            free = {each.name for config in own for each in fields(config)} - (set() if role == ROUTER else ONE_FOR_ALL)
            for name in values.keys() - free:
                raise ConfigError(f"[{role}] {name}: all roles that this command starts have the same: move it to the top")
            for config in own if role != ROUTER else ():
                self.with_role(role, config)

    def with_role(self, role: str, config: C) -> C:
        """The config as instances of this role have it. Raises ConfigError."""
        try:
            return read_config(type(config), argparse.Namespace(**{**vars(config), **self.of_roles.get(role, {})}))
        except ConfigError as error:
            raise ConfigError(f"[{role}] {error}") from error

    @property
    def router_names(self) -> list[str]:
        return [ROUTER] if self.counts.routers == 1 else [f"{ROUTER}-{number}" for number in range(self.counts.routers)]

    def names(self, role: LocalRole) -> list[str]:
        return [f"{role}-{number}" for number in range(self.counts.of(role))]

    @property
    def instance_names(self) -> list[str]:
        """Those that are started, and the spare ones."""
        started = [name for role in ROLES for name in self.names(role)]
        return [*started, *(f"spare-{number}" for number in range(self.counts.spare))]

    def parts(self) -> list[SupervisedChild]:
        """What is to live."""
        instances = [SupervisedChild(name, role, drains=True) for role in ROLES for name in self.names(role)]
        return [*(SupervisedChild(name, ROUTER, drains=False) for name in self.router_names), *instances]


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """How the instances of a fleet share this host. Raises ConfigError when they cannot."""

    config: FleetConfig
    gpus: int = 0
    """The GPUs of this host."""
    cores: CoresConfig = CoresConfig()

    def __post_init__(self) -> None:
        self._check_cores()
        self._check_shares()
        check_nccl(self.config.instance, on_gpus=not self.on_cpu and self.config.engine.executor == "torch")

    def engines(self) -> dict[str, EngineConfig]:
        """The engine's config of each instance, by name: they share the cores, the GPUs and the memory that is free now."""
        engine, ranks, names = self.config.engine, self.config.instance.tp, self.config.instance_names
        places = place_on_gpus(engine.device, len(names), self.gpus, ranks)
        shared = replace(engine, sharers=max(places[0][1], engine.sharers))
        if self.on_cpu:
            shared = replace(shared, memory_part=memory_part(shared, ranks, len(names) * ranks))
        return {
            name: replace(shared, threads=self._threads(name.startswith("prefill")), device=device)
            for name, (device, _) in zip(names, places, strict=True)
        }

    @property
    def lends_cores(self) -> bool:
        """Whether instances lend each other cores: where several compute on the processor, with one rank each."""
        return self.cores.lend_cores == "on" and not self._why_not_lent

    @property
    def on_cpu(self) -> bool:
        device = self.config.engine.device
        return device == "cpu" or (device == "auto" and not self.gpus)

    @property
    def _why_not_divided(self) -> str:
        """Why cores are not divided by work; "": they are."""
        engine = self.config.engine
        if engine.threads:
            return "with --threads"
        if engine.executor != "torch":
            return f"with --executor {engine.executor}"
        return "" if self.on_cpu else "on GPUs"

    @property
    def _why_not_lent(self) -> str:
        """Why instances cannot lend each other cores; "": they can."""
        if self.config.instance.tp > 1:
            return "with --tp"
        return self._why_not_divided or ("with one instance" if len(self.config.instance_names) == 1 else "")

    def _check_cores(self) -> None:
        """Raises ConfigError."""
        no_prefill = "" if self.config.counts.prefill else "with --prefill 0"
        for name, why in (("workload", self._why_not_divided or no_prefill), ("lend_cores", self._why_not_lent)):
            if why:
                refuse_without_effect(self.cores, (name,), why)

    def _threads(self, is_prefill: bool) -> int:
        counts = self.config.counts
        if self.config.engine.threads:
            return self.config.engine.threads
        if self._why_not_divided:
            return divide_cores(core_count(), len(self.config.instance_names))
        threads = divide_by_work(core_count(), counts.prefill, counts.decoding + counts.spare, self.cores.prefill_share)
        return threads[0] if is_prefill else threads[1]

    def _check_shares(self) -> None:
        """Each instance takes its share of the whole device, so all on a device must fit together. Raises ConfigError."""
        kv_memory, ranks = self.config.engine.kv_memory, self.config.instance.tp
        percent = parse_share(kv_memory, "kv-memory")
        places = place_on_gpus(self.config.engine.device, len(self.config.instance_names), self.gpus, ranks)
        on_gpus = places[0][0].startswith("cuda")
        most = max(Counter(device for device, _ in places).values()) * (1 if on_gpus else ranks)
        if percent is not None and percent * most > 100:
            raise ConfigError(
                f"--kv-memory {kv_memory} is the share of one rank, and {most} ranks are on one device: give at most "
                f"{100 // most}%"
            )


class _StopAsked(Exception):
    """A signal asked for an orderly stop. It waits in the queue of events like the others, and is raised then."""


class ChildFleet:
    """Routers on this host, and instances where `start_instance` starts them.

    `signalled` is called on a thread of its own, so that nothing delays a second signal.
    """

    def __init__(
        self,
        config: FleetConfig,
        engines: Callable[[], Mapping[str, EngineConfig]],
        command: MakeCommand = launch_command,
        start_instance: StartInstance | None = None,
        here: str = LOOPBACK,
        *,
        lends_cores: bool = False,
    ) -> None:
        """engines: the engine of each instance, asked once the routers run. command: what runs a role with its flags.
        start_instance: without it, instances are children too. here: the address of this host, as instances reach it.
        lends_cores: instances of this host lend each other cores."""
        self._config = config
        self._engines = engines
        self._command = command
        self._start_instance = start_instance or self._start_here
        self._here = here
        self._lends_cores = lends_cores
        self._events: queue.SimpleQueue[RoleEvent | _StopAsked] = queue.SimpleQueue()
        self._supervisor = Supervisor(config.parts(), self._spawn, self._tell)
        self._starts: dict[str, Callable[[], Running]] = {}
        """How each part is started, the first time and again."""
        self._children: dict[str, Running] = {}
        self._routers: dict[str, RoleProcess] = {}
        self._own_urls: dict[str, str] = {}
        """The address of each of several routers by which the others ask it."""
        self._inherited: tuple[int, ...] = ()
        """Open files that children on this host have too."""
        self._roles: dict[str, LocalRole] = {}
        """The role in which each instance was started last."""
        self._instance_flags: Callable[[str, LocalRole], list[str]] | None = None
        """The flags of the instance of that name in that role; None until the routers run."""
        self._signals = 0
        self._serving = self._is_complete = False

    @property
    def killed(self) -> bool:
        return self._signals > 1

    def signalled(self) -> None:
        """First: stop in order. Second: kill. On the thread that takes signals."""
        self._signals += 1
        if self._signals == 1:
            self._events.put(_StopAsked())
            return
        for child in list(self._children.values()):
            child.kill()

    def start(self) -> None:
        """Returns once every instance can serve requests. Raises GivenUp, _StopAsked."""
        config, counts, began = self._config, self._config.counts, time.monotonic()
        deadline = began + config.instance.startup_timeout_s
        routers = self._start_routers(deadline)
        self._serving = True
        controls = ",".join(reachable(addresses["control"], self._here) for addresses in routers)
        lent_cores = ""
        if self._lends_cores:
            self._inherited = (make_file(len(config.instance_names)),)
            lent_cores = f"/dev/fd/{self._inherited[0]}"
        engines = self._engines()

        def flags(name: str, role: LocalRole) -> list[str]:
            instance, engine = replace(config.instance, router=controls, name=name), replace(engines[name], lent_cores=lent_cores)
            of_role = config.with_role(role, instance), config.with_role(role, engine)
            return to_flags(*of_role, config.model, config.log, config.security)

        self._instance_flags = flags
        for role in ROLES:
            for name in config.names(role):
                self._start_as(name, role)
        prefill, decode = config.names("prefill"), [*config.names("decode"), *config.names("both")]
        self._wait_until_ready([*prefill, *decode], deadline)
        for addresses in routers:
            self._wait_until_linked(reachable(addresses.get("own", addresses["http"]), LOOPBACK), prefill, decode, deadline)
        self._supervisor.started()
        self._is_complete = True
        self._tell_kept()
        url, several = routers[0]["http"], f"{counts.routers} routers, " if counts.routers > 1 else ""
        both = f", {counts.both} both" if counts.both else ""
        parts = f"{several}{counts.prefill} prefill, {counts.decode} decode{both} on {url}"
        print(f"ready in {time.monotonic() - began:.1f} s: {parts}\n\n{curl_line(url, config.access)}\n", flush=True)

    def _start_routers(self, deadline: float) -> list[Mapping[str, str]]:
        """Their addresses. The first of several finds the port that they share; their control ports follow each other."""
        names, config = self._config.router_names, self._config.router
        if len(names) > 1:
            require_free(config.host, config.port)
            require_free(config.host, int(config.grpc_port or 0), "--grpc-port")
            config = replace(config, share_port="on")
        found: list[Mapping[str, str]] = []
        for group in (names[:1], names[1:]):
            for name in group:
                number = names.index(name)
                control_port = config.control_port and config.control_port + number
                self._starts[name] = partial(self._start_router, name, replace(config, control_port=control_port))
                self._spawn(name)
            ready = self._wait_until_ready(group, deadline)
            for name in group:
                addresses = ready[name].addresses
                grpc_port = str(port_of(addresses["grpc"])) if "grpc" in addresses else ""
                config = replace(config, port=port_of(addresses["http"]), grpc_port=grpc_port)
                own = port_of(addresses["own"]) if "own" in addresses else 0
                same_ports = replace(config, control_port=port_of(addresses["control"]), own_port=own)
                self._starts[name] = partial(self._start_router, name, same_ports)
                found.append(addresses)
        return found

    def watch(self) -> None:
        """Keep the fleet alive; return when a signal asks to stop. Raises GivenUp when it cannot go on."""
        try:
            while True:
                self._next_event(None)
        except _StopAsked:
            return

    def stop(self) -> None:
        """Stop every child in order. Kill those that do not stop in time."""
        if self._serving:
            self._close_intake([self._routers[name] for name in self._config.router_names])
        drained_s = self._config.instance.drain_timeout_s + STOP_S
        for role in ROLES:
            self._stop_stage([name for name, started in self._roles.items() if started == role], drained_s)
        self._stop_stage(self._config.router_names, STOP_S)
        print("stopped", flush=True)
        for file in self._inherited:
            os.close(file)
        self._inherited = ()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _start_here(self, name: str, role: LocalRole, flags: Sequence[str], on_event: OnEvent) -> Running:
        return RoleProcess(name, self._command(role, flags), on_event, inherited=self._inherited)

    def _start_router(self, name: str, config: RouterConfig) -> Running:
        flags = to_flags(config, self._config.model, self._config.log, self._config.security, self._config.access)
        router = self._routers[name] = RoleProcess(name, self._command(ROUTER, flags), self._events.put)
        return router

    def _start_as(self, name: str, role: LocalRole) -> None:
        assert self._instance_flags is not None
        self._roles[name] = role
        self._starts[name] = partial(self._start_instance, name, role, self._instance_flags(name, role), self._events.put)
        self._spawn(name)

    @property
    def _spare(self) -> list[str]:
        """Instances that could be started: those that never were, and those that left as they were told."""
        kept = self._supervisor.names
        return [name for name in self._config.instance_names if name not in kept]

    def _start_spare(self, role: LocalRole) -> None:
        """A router asks for one more. Two may have asked for the same one."""
        if not self._spare:
            _log.warning("a router wants one more %s instance, and no spare one is left: it is not started", role)
        elif self._is_complete:
            name = self._spare[0]
            self._supervisor.keep(SupervisedChild(name, role, drains=True))
            self._start_as(name, role)
            self._tell_kept()

    def _tell_kept(self) -> None:
        """Routers show which instances are or will be there: a planner need not remember whom it has asked for."""
        names = tuple(name for name in self._supervisor.names if name in self._roles)
        for router in self._routers.values() if self._is_complete else ():
            router.order(KeepInstances(names=names, spare=len(self._spare)))

    def _spawn(self, name: str) -> None:
        child = self._children[name] = self._starts[name]()
        if self.killed:  # the second signal may have come too early for this one
            child.kill()

    def _stop_stage(self, names: list[str], deadline_s: float) -> None:
        children = [self._children[name] for name in names if name in self._children and not self._children[name].wait(0)]
        _say_waiting([child.name for child in children], deadline_s)
        for name in stop_children(children, deadline_s):
            _log.warning("%s did not stop within %g s and was killed", name, deadline_s)

    def _wait_until_ready(self, names: list[str], deadline: float) -> dict[str, Ready]:
        """What each of them reported when it was ready."""
        ready: dict[str, Ready] = {}
        while missing := [name for name in names if name not in ready]:
            event = self._next_event(deadline)
            if event is None:
                accounts = "\n".join(f"{name} was not ready in time; {self._children[name].account()}" for name in missing)
                raise GivenUp(f"the start took longer than --startup-timeout-s allows\n{accounts}")
            if isinstance(event, Reported) and isinstance(event.report, Ready):
                ready[event.child] = event.report
        return ready

    def _wait_until_linked(self, url: str, prefill: list[str], decode: list[str], deadline: float) -> None:
        page = FleetPage(url, self._config.access)
        while missing := page.missing(prefill, decode):
            if time.monotonic() >= deadline:
                raise GivenUp("the start took longer than --startup-timeout-s allows: " + "; ".join(missing))
            self._next_event(min(deadline, time.monotonic() + LOOK_EVERY_S))

    def _next_event(self, deadline: float | None) -> RoleEvent | None:
        """The next event of a child, or None at the deadline or the supervisor's; what it calls for is done.

        Raises GivenUp, _StopAsked.
        """
        until = min((at for at in (deadline, self._supervisor.next_deadline()) if at is not None), default=None)
        try:
            event = self._events.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            event = None
        if isinstance(event, _StopAsked):
            raise event
        if isinstance(event, Reported):
            self._show(event.child, event.report)
            if isinstance(event.report, Ready) and "own" in event.report.addresses:
                self._introduce(event.child, reachable(event.report.addresses["own"], LOOPBACK))
            if isinstance(event.report, SpareWanted):
                self._start_spare(event.report.role)
        self._supervisor.turn(event, time.monotonic())
        if isinstance(event, Exited) or (event is not None and isinstance(event.report, Ready)):
            self._tell_kept()
        return event

    def _introduce(self, router: str, own_url: str) -> None:
        """Tell every router at the shared port who the others are. One that comes back must be told again."""
        self._own_urls[router] = own_url
        for name in self._own_urls:
            self._routers[name].order(MeetRouters(urls=tuple(url for other, url in self._own_urls.items() if other != name)))

    def _tell(self, name: str, became: str, account: str, level: int) -> None:
        reason, _, _ = account.partition("\n")
        print(f"{name:<12} {became}: {reason}", flush=True)
        _log.log(level, "%s %s: %s", name, became, account)

    def _show(self, child: str, report: LaunchReport) -> None:
        match report:
            case Progress(text=text):
                print(f"{child:<12} {text}", flush=True)
            case Ready(addresses=addresses):
                print(f"{child:<12} ready: " + ", ".join(f"{use} {address}" for use, address in addresses.items()), flush=True)
            case IntakeClosed() | Broken() | SpareWanted():
                return  # a person need not read these: the exit that follows Broken gives the reason

    def _close_intake(self, routers: Sequence[RoleProcess]) -> None:
        """Return when each router has drained or exited, or at the deadline."""
        limit_s = self._config.router.drain_timeout_s + STOP_S
        deadline = time.monotonic() + limit_s
        _say_waiting([f"the open answers of {router.name}" for router in routers if router.status is None], limit_s)
        for router in routers:
            router.order(CloseIntake())
        drained: set[str] = set()
        while any(router.status is None and router.name not in drained for router in routers):
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                _log.warning("a router did not end its open answers within %g s", limit_s)
                return
            if isinstance(event, Reported) and isinstance(event.report, IntakeClosed):
                drained.add(event.child)


def run(plan: LocalPlan, command: MakeCommand = launch_command) -> int:
    """Start a fleet of this host, watch and stop it. command: what runs a role with its flags. Returns the exit status."""
    return run_fleet(ChildFleet(plan.config, plan.engines, command, lends_cores=plan.lends_cores))


def run_fleet(fleet: ChildFleet) -> int:
    """Start, watch and stop.

    Returns the exit status: 0 after an orderly stop, 1 when a part failed, BAD_FLAG when it can never run as it was started, 130
    when a second signal forced it to stop.
    """
    parent: Parent[LaunchOrder] = Parent(msgspec.json.Decoder[LaunchOrder](LaunchOrder))
    watch(lambda number: fleet.signalled())
    if parent.exists:
        threading.Thread(target=_stop_without, args=(parent, fleet), name="lifeline", daemon=True).start()
    status = 0
    reason = ""
    try:
        fleet.start()
        fleet.watch()
        print(STOPPING, flush=True)
    except _StopAsked:
        print(f"the start was not complete; {STOPPING}", flush=True)
    except GivenUp as error:
        _log.error("%s", error)
        status = error.exit_status
        reason, _, _ = str(error).partition("\n")
    finally:
        fleet.stop()
    if reason:  # what the fleet says as it stops should not hide it
        print(f"failed: {reason}", file=sys.stderr)
    return 130 if fleet.killed else status


def _say_waiting(names: Sequence[str], limit_s: float) -> None:
    if names:
        print(f"stopping     waiting for {', '.join(names)}, {limit_s:g} s at most", flush=True)


def _stop_without(parent: Parent[LaunchOrder], fleet: ChildFleet) -> None:
    """Stop the fleet in order when the process that started it is gone."""
    while parent.read_orders() is not None:
        pass
    fleet.signalled()
