"""What the control plane of a fleet costs its router: `launch router` under instances that are played, phase by phase.

Owns the phases, what is counted in each, and the figures. The instances are of `benchmarks/played_fleet.py`. What the choice of
instances for a request costs inside the router is `tests/benchmarks/choice_cost.py`. Run it as `python -m benchmarks.control`.
"""

import contextlib
import http.client
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from bench.report import Goal, say
from benchmarks.command import Column, Invocation, cpu_s, resident_mb, start, table_of
from benchmarks.played_fleet import PlayedFleet
from common.host import allow_many_files
from common.options import option, parse_numbers, require, require_above_0
from common.processes.child import KILL_S, Broken, ChildEnded, IntakeClosed, Progress, Ready, Respondent, stop_children
from common.processes.local_fleet import FleetFailed
from common.processes.router_client import RequestFailed, RouterClient

START_S, STOP_S, ANSWER_S = 60.0, 20.0, 300.0
PING_EVERY_S = 0.01
"""Between an answer and the next ping. A pause may seem shorter than it is by as much."""
AT_ONCE = 50
"""So many instances join at once while the fleet is filled."""
MOST_LOST = 10
CALM_S = 1.0
"""For this long a phase is watched after it seems to be over, unless `--seconds` is less."""
PAGES = 3
BEATS = ("Heartbeat", "Welcome")
SPAWN = multiprocessing.get_context("spawn")
RouterReport: TypeAlias = Progress | Ready | IntakeClosed | Broken
STEADY = "Bytes are not affected, CPU times little."
GOAL_INSTANCES = 1000
QUICK: dict[str, Any] = {"instances": "6", "seconds": 1.0}


@dataclass(frozen=True, kw_only=True)
class ControlBench:
    """What is measured, and for how long."""

    instances: str = option("10,100,1000", "sizes of the fleet, one after the other: half prefill, half decode")
    seconds: float = option(10.0, "how long a fleet at rest is watched")
    patience_s: float = option(120.0, "how long a phase may take; a fleet that needs longer is reported as too large")

    def __post_init__(self) -> None:
        require(min(self.sizes) >= 2, "instances", "at least 2 each", self.instances)
        require_above_0(self, "seconds", "patience_s")

    @property
    def sizes(self) -> tuple[int, ...]:
        return parse_numbers(self.instances, "instances", int)


class ControlFigures(msgspec.Struct, kw_only=True):
    """A fleet of one size. None: not measured, and `trouble` says why. CPU figures are of the router's process."""

    instances: Annotated[int, Column("instances", ",.0f")]
    heartbeat_core_share: Annotated[float | None, Column("heartbeats, % of a core", ",.1f", 100)] = None
    """The share of a core that a fleet at rest takes, beyond that of a router without instances."""
    heartbeat_bytes_per_s: Annotated[float | None, Column("heartbeats, kB/s", ",.0f", 1e-3)] = None
    """All messages in both directions, at rest."""
    join_bytes: Annotated[int | None, Column("a join, kB", ",.0f", 1e-3)] = None
    """Messages in both directions that one more instance causes."""
    losses_bytes: Annotated[int | None, Column("losses, kB", ",.0f", 1e-3)] = None
    """Messages in both directions that ten deaths at once cause, or those of half of a smaller fleet."""
    losses_ms: Annotated[float | None, Column("losses, ms of CPU", ",.0f")] = None
    """The CPU time of these deaths."""
    restart_s: Annotated[float | None, Column("restart, s", ",.1f")] = None
    """From the start of a router on the ports of a killed one until all instances are members with their links."""
    metrics_ms: Annotated[float | None, Column("/metrics, ms", ",.0f")] = None
    cluster_ms: Annotated[float | None, Column("/cluster, ms", ",.0f")] = None
    router_mb: Annotated[float | None, Column("memory, MB", ",.0f")] = None
    """Resident memory."""
    longest_pause_ms: Annotated[float | None, Column("longest pause, ms", ",.0f")] = None
    """The slowest answer to a ping in any phase but the restart."""
    trouble: str = ""


LIMITS = (
    ("heartbeats", "heartbeat_core_share", 5, "% of a core", 100.0),
    ("heartbeats", "heartbeat_bytes_per_s", 2, " MB/s", 1e-6),
    ("a join", "join_bytes", 1, " MB", 1e-6),
    ("ten losses at once", "losses_bytes", 2, " MB", 1e-6),
    ("ten losses at once", "losses_ms", 50, " ms", 1.0),
    ("/metrics", "metrics_ms", 50, " ms", 1.0),
    ("the longest pause", "longest_pause_ms", 100, " ms", 1.0),
)
"""Goals for a fleet of GOAL_INSTANCES: name, figure, most, unit, and what the figure is multiplied by."""


def run(invocation: Invocation) -> int:
    """Returns the exit status: 0 also when a goal is not met."""
    allow_many_files()
    bench = invocation.config(ControlBench, QUICK)
    fleets = [measure(bench, instances) for instances in bench.sizes]
    body = [invocation.style.table(table_of(ControlFigures, fleets))]
    body += [f"{fleet.instances} instances: {fleet.trouble}" for fleet in fleets if fleet.trouble]
    settings = f"each fleet was watched at rest for {bench.seconds:g} s"
    invocation.publish(settings, STEADY, body, goals(fleets), seconds=bench.seconds, fleets=fleets)
    return 0


def goals(fleets: Sequence[ControlFigures]) -> Iterator[Goal]:
    fleet = next((each for each in fleets if each.instances == GOAL_INSTANCES), ControlFigures(instances=GOAL_INSTANCES))
    values = msgspec.structs.asdict(fleet)
    for what, name, limit, unit, scale in LIMITS:
        value = None if values[name] is None else values[name] * scale
        rule = f"{GOAL_INSTANCES} instances: {what}: at most {limit:g}{unit}"
        yield Goal.of(rule, value, ".3g", most=limit, unit=unit)


def measure(bench: ControlBench, instances: int) -> ControlFigures:
    """What could be measured of a fleet of this size."""
    figures = ControlFigures(instances=instances)
    with contextlib.closing(MeasuredRouter()) as router, contextlib.closing(PlayedFleet(router.control)) as fleet:
        try:
            ControlSession(bench, figures, router, fleet).run()
        except (FleetFailed, RequestFailed) as error:
            figures.trouble = str(error).splitlines()[0]
            say(f"{instances} instances: {error}")
    return figures


class ControlSession:
    """The phases for one size. Each fills its figures."""

    def __init__(self, bench: ControlBench, figures: ControlFigures, router: "MeasuredRouter", fleet: PlayedFleet) -> None:
        self._bench, self._figures, self._router, self._fleet = bench, figures, router, fleet
        self._calm_s = min(CALM_S, bench.seconds)
        self._rest_share = self._rest_bytes_per_s = 0.0
        """The share of a core, and the bytes without heartbeats and their answers, of a fleet at rest."""

    def run(self) -> None:
        """Raises FleetFailed."""
        for phase in (self._fill_and_rest, self._join, self._lose, self._pages):
            say(f"{self._figures.instances} instances: {phase.__name__.strip('_')}")
            phase()
        self._figures.longest_pause_ms = 1e3 * self._router.longest_pause_s.value
        self._restart()

    def _fill_and_rest(self) -> None:
        time.sleep(self._calm_s)
        elapsed_s, used_s, _ = self._watch(lambda: time.sleep(self._bench.seconds))
        idle_share, left = used_s / elapsed_s, self._figures.instances
        while left:
            self._fleet.add(min(left, AT_ONCE))
            left -= min(left, AT_ONCE)
            self._settle("joining")
        self._fleet.run(self._calm_s)
        elapsed_s, used_s, moved = self._watch(lambda: self._fleet.run(self._bench.seconds))
        self._rest_share, self._rest_bytes_per_s = used_s / elapsed_s, without_beats(moved) / elapsed_s
        self._figures.heartbeat_core_share = max(0.0, self._rest_share - idle_share)
        self._figures.heartbeat_bytes_per_s = moved.total() / elapsed_s
        self._figures.router_mb = resident_mb(self._router.pid)

    def _join(self) -> None:
        self._figures.join_bytes, _ = self._cost(lambda: self._fleet.add(1), "a join")

    def _lose(self) -> None:
        lost = min(MOST_LOST, self._figures.instances // 2)
        self._figures.losses_bytes, self._figures.losses_ms = self._cost(lambda: self._fleet.lose(lost), "losses")

    def _cost(self, act: Callable[[], object], what: str) -> tuple[int, float]:
        """Bytes and milliseconds of CPU that this costs beyond those of a fleet at rest."""

        def settled() -> None:
            act()
            self._settle(what)
            self._fleet.run(self._calm_s)

        elapsed_s, used_s, moved = self._watch(settled)
        more_bytes = int(without_beats(moved) - elapsed_s * self._rest_bytes_per_s)
        return max(0, more_bytes), 1e3 * max(0.0, used_s - elapsed_s * self._rest_share)

    def _watch(self, act: Callable[[], object]) -> tuple[float, float, Counter[str]]:
        """Seconds, the router's seconds of CPU, and the bytes of each message that pass meanwhile."""
        began, used_s, before = time.monotonic(), cpu_s(self._router.pid), self._fleet.moved_bytes.copy()
        act()
        return time.monotonic() - began, cpu_s(self._router.pid) - used_s, self._fleet.moved_bytes - before

    def _pages(self) -> None:
        self._figures.metrics_ms, self._figures.cluster_ms = self._page_ms("/metrics"), self._page_ms("/cluster")

    def _page_ms(self, path: str) -> float:
        """The median time until the last byte. No instance is played meanwhile, so nothing else keeps the router busy."""
        took_s = []
        for _ in range(PAGES):
            self._fleet.run(self._calm_s)
            began = time.monotonic()
            RouterClient(self._router.url, timeout_s=ANSWER_S).read(path)
            took_s.append(time.monotonic() - began)
        return 1e3 * statistics.median(took_s)

    def _restart(self) -> None:
        say(f"{self._figures.instances} instances: restart")
        former = self._fleet.routers()
        self._router.kill()
        began = time.monotonic()
        self._router.start()
        self._settle("coming back after a restart", lambda: not former & self._fleet.routers())
        self._figures.restart_s = time.monotonic() - began

    def _settle(self, what: str, also: Callable[[], bool] = lambda: True) -> None:
        self._fleet.run_until(lambda: also() and self._fleet.is_settled, self._bench.patience_s, what)


def without_beats(moved: Counter[str]) -> int:
    return sum(size for name, size in moved.items() if name not in BEATS)


# --- the router and its pings ------------------------------------------------------------------------------------------------


class MeasuredRouter:
    """`launch router` with the demo model. A separate process pings it, so that the work of playing instances does not count as a
    pause of the router."""

    def __init__(self) -> None:
        """Raises FleetFailed."""
        self.url = self.control = ""
        self._ports = 0, 0
        self.start()
        self.longest_pause_s: Synchronized[float] = SPAWN.Value("d", 0.0)
        """The time of the slowest answer to a ping so far."""
        self._pings = SPAWN.Process(target=ping, args=(self.url, self.longest_pause_s), daemon=True)
        self._pings.start()

    @property
    def pid(self) -> int:
        """Its process, which is not that of the detokenizer."""
        return self._child.pid

    def start(self) -> None:
        """Start it, later again on the same ports, and wait until it serves. Raises FleetFailed."""
        flags = [f"--{name}={port}" for name, port in zip(("port", "control-port"), self._ports, strict=True)]
        command = [sys.executable, "-P", "-m", "launch.main", "router", *flags]
        self._child: Respondent[RouterReport] = Respondent("router", command, msgspec.json.Decoder(RouterReport))
        report, until = None, time.monotonic() + START_S
        while not isinstance(report, Ready):
            try:
                report = self._child.next_report(until - time.monotonic())
            except ChildEnded as error:
                raise FleetFailed(str(error)) from error
            if report is None or isinstance(report, Broken):
                raise FleetFailed(f"the router did not start: {self._child.account()}")
        self.url, self.control = report.addresses["http"], report.addresses["control"]
        self._ports = urlsplit(self.url).port or 0, urlsplit(self.control).port or 0

    def kill(self) -> None:
        """End it as a crash does."""
        self._child.kill()
        self._child.wait(KILL_S)

    def close(self) -> None:
        self._pings.kill()
        stop_children([self._child], STOP_S)


def ping(url: str, longest_s: "Synchronized[float]") -> None:
    """A process that asks for `/health` as long as its parent lives. longest_s: gets the time of the slowest answer."""
    parent, connection = multiprocessing.parent_process(), http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_S)
    while parent is not None and parent.is_alive():
        time.sleep(PING_EVERY_S)
        began = time.monotonic()
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection.close()  # the router is gone; the next ping connects anew
            continue
        with longest_s.get_lock():
            longest_s.value = max(longest_s.value, time.monotonic() - began)


EXPLANATION = "Measure what the control plane costs at the router, for fleets of different sizes."

if __name__ == "__main__":
    sys.exit(start("control", EXPLANATION, run, ControlBench))
