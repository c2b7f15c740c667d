"""`launch local`: a whole fleet on this machine, started together, watched, and stopped in order.

Owns the order of start and stop, and the children. Does not know what a child does inside.

    start   router (with its detokenizer), then every instance at once, then wait until the router sees each of them and its links
    stop    the router's HTTP intake, then prefill, then decode, then the router and its detokenizer

The first child that dies takes the fleet down.
"""

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from common.config import EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig
from common.errors import ConfigError, TandemError
from launch import environment, logs, signals
from launch.addresses import LOOPBACK, reachable
from launch.flags import to_flags
from launch.fleet_page import FleetPage, curl_line
from launch.processes import Child, ChildEvent, Exited, Reported, launch_command, stop_children
from launch.reports import Broken, CloseIntake, IntakeClosed, Progress, Ready

ROUTER = "router"
INTAKE_S = 10.0
"""How long the router may take to end open answers: more than the grace it gives them itself."""
STOP_S = 10.0
"""How long the processes of one stage may take to stop before they are killed."""
LOOK_EVERY_S = 0.05

Command = Callable[[str, Sequence[str]], list[str]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """What to start. Raises ConfigError for counts that make no fleet."""

    prefill: int
    decode: int
    router: RouterConfig
    instance: InstanceConfig
    model: ModelConfig
    engine: EngineConfig
    log: LogConfig

    def __post_init__(self) -> None:
        if self.prefill < 0:
            raise ConfigError(f"--prefill must be 0 or more, is {self.prefill}")
        if self.decode < 1:
            raise ConfigError(f"--decode must be at least 1, is {self.decode}")

    def names(self, role: Literal["prefill", "decode"]) -> list[str]:
        return [f"{role}-{number}" for number in range(self.prefill if role == "prefill" else self.decode)]

    def engine_of_each(self) -> EngineConfig:
        """The engine's config of each instance: they share the cores."""
        if self.engine.threads:
            return self.engine
        return replace(self.engine, threads=environment.divide_cores(environment.core_count(), self.prefill + self.decode))


class FleetFailed(TandemError):
    """A part of the fleet did not start, or died; the message says which and why."""


class _StopAsked(Exception):
    """A signal asked for an orderly stop."""


@dataclass(frozen=True, slots=True)
class _Signal:
    """A signal arrived; its place in the line of events is as good as any."""

    number: int


class LocalFleet:
    """The children of `launch local`. `signalled` comes from a thread of its own, so that nothing holds up a second signal."""

    def __init__(self, plan: LocalPlan, command: Command) -> None:
        self._plan = plan
        self._command = command
        self._events: queue.SimpleQueue[ChildEvent | _Signal] = queue.SimpleQueue()
        self._children: dict[str, Child] = {}
        self._signals = 0
        self._serving = False

    @property
    def killed(self) -> bool:
        return self._signals > 1

    def signalled(self, number: int) -> None:
        """First: stop in order. Second: kill. On the thread that takes signals."""
        self._signals += 1
        if self._signals == 1:
            self._events.put(_Signal(number))
            return
        for child in list(self._children.values()):
            child.kill()

    def start(self) -> str:
        """Returns the URL once a request could be served by every instance. Raises FleetFailed, _StopAsked."""
        plan = self._plan
        deadline = time.monotonic() + plan.instance.startup_timeout_s
        self._spawn(ROUTER, ROUTER, to_flags(plan.router, plan.model, plan.log))
        addresses = self._wait_until_ready([ROUTER], deadline)[ROUTER].addresses
        self._serving = True
        control = reachable(addresses["control"], LOOPBACK)
        names = {role: plan.names(role) for role in ("prefill", "decode")}
        for role, members in names.items():
            for name in members:
                config = replace(plan.instance, router=control, name=name)
                self._spawn(name, role, to_flags(config, plan.model, plan.engine_of_each(), plan.log))
        self._wait_until_ready([*names["prefill"], *names["decode"]], deadline)
        self._wait_until_linked(reachable(addresses["http"], LOOPBACK), names["prefill"], names["decode"], deadline)
        return addresses["http"]

    def watch(self) -> None:
        """Return when a signal asks to stop. Raises FleetFailed when a child has died."""
        try:
            while True:
                self._next_event(None)
        except _StopAsked:
            return

    def stop(self) -> None:
        """Stop every child in order; what does not stop in time is killed."""
        router = self._children.get(ROUTER)
        if router is not None and self._serving:
            self._close_intake(router)
        instances = [child for name, child in self._children.items() if name != ROUTER]
        prefill = [child for child in instances if child.name.startswith("prefill")]
        decode = [child for child in instances if child not in prefill]
        for stage in (prefill, decode, [router] if router is not None else []):
            for name in stop_children(stage, STOP_S):
                _log.warning("%s did not stop within %g s and was killed", name, STOP_S)

    # --- inside --------------------------------------------------------------------------------------------------------

    def _spawn(self, name: str, role: str, flags: list[str]) -> None:
        self._children[name] = Child(name, self._command(role, flags), self._events.put)

    def _wait_until_ready(self, names: list[str], deadline: float) -> dict[str, Ready]:
        """What each of them reported when it was ready."""
        ready: dict[str, Ready] = {}
        while missing := [name for name in names if name not in ready]:
            event = self._next_event(deadline)
            if event is None:
                accounts = "\n".join(f"{name} was not ready in time; {self._children[name].account()}" for name in missing)
                raise FleetFailed(f"the start took longer than --startup-timeout-s allows\n{accounts}")
            if isinstance(event.report, Ready):
                ready[event.child] = event.report
        return ready

    def _wait_until_linked(self, url: str, prefill: list[str], decode: list[str], deadline: float) -> None:
        page = FleetPage(url)
        while missing := page.missing(prefill, decode):
            if time.monotonic() >= deadline:
                raise FleetFailed("the start took longer than --startup-timeout-s allows: " + "; ".join(missing))
            self._next_event(min(deadline, time.monotonic() + LOOK_EVERY_S))

    def _next_event(self, deadline: float | None) -> Reported | None:
        """The next report, or None at the deadline. Raises FleetFailed, _StopAsked."""
        try:
            event = self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        match event:
            case Reported():
                self._show(event)
                return event
            case Exited():
                raise FleetFailed(f"{event.child} ended: {self._children[event.child].account()}")
            case _Signal():
                raise _StopAsked
            case _:
                assert_never(event)

    def _show(self, event: Reported) -> None:
        match event.report:
            case Progress(text=text):
                print(f"{event.child:<12} {text}", flush=True)
            case Ready(addresses=addresses):
                print(
                    f"{event.child:<12} ready: " + ", ".join(f"{use} {address}" for use, address in addresses.items()), flush=True
                )
            case IntakeClosed() | Broken():
                return  # nothing that a person need read: after Broken follows the exit, which says it

    def _close_intake(self, router: Child) -> None:
        """Return when the router has ended its open answers, or has ended itself, or will not in time."""
        deadline = time.monotonic() + INTAKE_S
        router.order(CloseIntake())
        while router.status is None and (left := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                _log.warning("the router did not end its open answers within %g s", INTAKE_S)
                return
            if isinstance(event, Reported) and isinstance(event.report, IntakeClosed):
                return


def run(plan: LocalPlan, command: Command = launch_command) -> int:
    """Start, watch and stop. command: what runs a role with its flags.

    Returns the exit status: 0 after an orderly stop, 1 when a part failed, 130 when killed in haste.
    """
    logs.configure(plan.log, "local")
    fleet = LocalFleet(plan, command)
    signals.watch(fleet.signalled)
    status, began = 0, time.monotonic()
    try:
        url = fleet.start()
        took_s = time.monotonic() - began
        print(f"ready in {took_s:.1f} s: {plan.prefill} prefill, {plan.decode} decode on {url}\n\n{curl_line(url)}\n", flush=True)
        fleet.watch()
        print("stopping", flush=True)
    except _StopAsked:
        print("stopping before the start was complete", flush=True)
    except FleetFailed as error:
        _log.error("%s", error)
        status = 1
    finally:
        fleet.stop()
    return 130 if fleet.killed else status
