"""`launch bench control`: a router under a played fleet, phase by phase.

Owns the order of phases and what is counted in each. Knows neither messages nor sockets. Prints only its progress, on stderr.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing

from bench.control.choosing import choose_us
from bench.control.figures import ControlFigures, ControlOutcome, judge, table
from bench.control.lines import Got
from bench.control.plan import ControlBench
from bench.control.player import Player, describe, played_model
from bench.control.router import RouterUnderMeasure
from bench.hardware import this_hardware
from bench.tables import markdown_report, markdown_table, publish, say, text_report, text_table, write_figures
from common.config import RouterConfig
from common.processes.local_fleet import FleetFailed
from common.processes.open_files import allow_many_files

AT_ONCE = 50
"""So many instances join at once while the fleet is filled."""
LOST = 10
CALM_S = 1.0
"""For this long a phase is watched after it seems to be over, unless `--seconds` is less."""
PAGES = 3
STEADY = "Bytes are not affected, CPU times little."
BEATS = ("Heartbeat", "Welcome")


def run(bench: ControlBench, command: str, markdown: bool) -> int:
    """Measure, print the report and write the file. Returns the exit status: 0 also when a goal is not met."""
    allow_many_files()
    hardware = this_hardware()
    fleets = [_measure(bench, instances) for instances in bench.sizes]
    outcome = ControlOutcome(command=command, hardware=hardware, goals=judge(fleets), seconds=bench.seconds, fleets=fleets)
    settings = f"each fleet was watched at rest for {bench.seconds:g} s"
    body = [(markdown_table if markdown else text_table)(table(fleets))]
    body += [f"{fleet.instances} instances: choose, us: {_by_name(fleet.choose_us_by)}" for fleet in fleets if fleet.choose_us_by]
    body += [f"{fleet.instances} instances: {fleet.trouble}" for fleet in fleets if fleet.trouble]
    publish(outcome, (markdown_report if markdown else text_report)(outcome, settings, STEADY, body), "")
    write_figures(fleets, bench.json)
    return 0


def _measure(bench: ControlBench, instances: int) -> ControlFigures:
    """What could be measured of a fleet of this size."""
    figures = ControlFigures(instances=instances)
    model = played_model()
    with closing(RouterUnderMeasure()) as router:
        router.start()
        with closing(Player(router.control, model)) as player:
            session = _Session(bench, figures, router, player)
            try:
                session.run()
            except FleetFailed as error:
                figures.trouble = str(error).splitlines()[0]
                say(f"{instances} instances: {error}")
            figures.choose_us_by = choose_us([describe(number, model, 1) for number in range(instances)])
            figures.choose_us = figures.choose_us_by[RouterConfig().prefill_policy]
    return figures


def _by_name(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {figure:.0f}" for name, figure in figures.items())


class _Session:
    """One size. Each phase fills its figures."""

    def __init__(self, bench: ControlBench, figures: ControlFigures, router: RouterUnderMeasure, player: Player) -> None:
        self._bench, self._figures, self._router, self._player = bench, figures, router, player
        self._calm_s = min(CALM_S, bench.seconds)
        self._idle_share = 0.0
        self._rest_share = 0.0
        self._rest_bytes_per_s = 0.0
        """Of a fleet at rest, without heartbeats and their answers."""

    def run(self) -> None:
        """Raises FleetFailed."""
        for phase in (self._fill, self._rest, self._join, self._lose, self._pages, self._restart):
            name = phase.__name__.strip("_")
            say(f"{self._figures.instances} instances: {name}")
            self._router.pings()
            phase()
            pings = self._router.pings()
            self._figures.pauses_ms[name] = round(1e3 * pings.longest_s, 1)
        pauses = self._figures.pauses_ms
        self._figures.longest_pause_ms = max(pause for name, pause in pauses.items() if name != "restart")

    def _fill(self) -> None:
        time.sleep(self._calm_s)
        began, cpu_s = time.monotonic(), self._router.cpu_s()
        time.sleep(self._bench.seconds)
        self._idle_share = (self._router.cpu_s() - cpu_s) / (time.monotonic() - began)
        began, left = time.monotonic(), self._figures.instances
        while left:
            self._player.add(min(left, AT_ONCE))
            left -= min(left, AT_ONCE)
            self._settle("joining")
        self._figures.fill_s = time.monotonic() - began

    def _rest(self) -> None:
        self._player.run(self._calm_s)
        began, cpu_s, before = time.monotonic(), self._router.cpu_s(), self._bytes()
        self._player.run(self._bench.seconds)
        elapsed_s, moved = time.monotonic() - began, self._bytes() - before
        self._rest_share = (self._router.cpu_s() - cpu_s) / elapsed_s
        self._rest_bytes_per_s = _beside_beats(moved) / elapsed_s
        self._figures.heartbeat_core_share = max(0.0, self._rest_share - self._idle_share)
        self._figures.heartbeat_bytes_per_s = moved.total() / elapsed_s
        self._figures.router_mb = self._router.resident_mb()

    def _join(self) -> None:
        self._figures.join_bytes, _ = self._cost(lambda: self._player.add(1), "a join")

    def _lose(self) -> None:
        self._figures.lost = min(LOST, self._figures.instances // 2)
        cost = self._cost(lambda: self._player.lose(self._figures.lost), "losses")
        self._figures.losses_bytes, self._figures.losses_ms = cost

    def _cost(self, act: Callable[[], object], what: str) -> tuple[int, float]:
        """Bytes and milliseconds of CPU that this costs beyond those of a fleet at rest."""
        began, cpu_s, before = time.monotonic(), self._router.cpu_s(), self._bytes()
        act()
        self._settle(what)
        self._player.run(self._calm_s)
        elapsed_s, moved = time.monotonic() - began, _beside_beats(self._bytes() - before)
        used_s = self._router.cpu_s() - cpu_s - elapsed_s * self._rest_share
        return max(0, int(moved - elapsed_s * self._rest_bytes_per_s)), 1e3 * max(0.0, used_s)

    def _pages(self) -> None:
        self._figures.metrics_ms, self._figures.metrics_bytes = self._page("/metrics")
        self._figures.cluster_ms, self._figures.cluster_bytes = self._page("/cluster")

    def _page(self, path: str) -> tuple[float, int]:
        """The median time in milliseconds, and the size in bytes."""
        answers: list[Got] = []
        for _ in range(PAGES):
            self._player.run(self._calm_s)
            self._router.ask_for(path)
            while (got := self._router.got()) is None:
                self._player.run(0.001)
            answers.append(got)
        return 1e3 * statistics.median(got.took_s for got in answers), answers[-1].page_bytes

    def _restart(self) -> None:
        former = self._player.routers()
        self._router.kill()
        began = time.monotonic()
        self._router.start()
        self._figures.start_s = time.monotonic() - began
        self._settle("coming back after a restart", lambda: not former & self._player.routers())
        self._figures.restart_s = time.monotonic() - began

    def _settle(self, what: str, also: Callable[[], bool] = lambda: True) -> None:
        self._player.run_until(lambda: also() and self._player.settled, self._bench.patience_s, what)

    def _bytes(self) -> Counter[str]:
        return self._player.sent + self._player.received


def _beside_beats(moved: Counter[str]) -> int:
    return sum(size for name, size in moved.items() if name not in BEATS)
