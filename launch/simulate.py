"""`launch simulate`: runs a simulation and prints its report.

Owns the order of things. The fleet is in `simulation/`.
"""

import time
from dataclasses import replace

from bench.report import Outcome, ReportStyle, machine_line, say, this_hardware, write_figures
from common.config import DEMO_MODEL, RouterConfig
from common.errors import INTERRUPTED
from simulation.plan import MEASURE, FleetPlan, LoadPlan
from simulation.report import Figures, figures, tables
from simulation.run import Simulation

PROGRESS_S = 5.0


class SimulateOutcome(Outcome, frozen=True, kw_only=True):
    """All that is written to --json."""

    took_s: float
    """Seconds of this machine."""
    found: Figures


def run(fleet: FleetPlan, load: LoadPlan, config: RouterConfig, command: str, markdown: bool) -> int:
    """Returns the exit status: 130 after Ctrl-C, which reports what was simulated until then. Raises ConfigError."""
    began_s = shown_s = time.monotonic()

    def progress(line: str) -> None:
        nonlocal shown_s
        if load.progress == "on" and time.monotonic() - shown_s >= PROGRESS_S:
            shown_s = time.monotonic()
            say(f"{shown_s - began_s:.0f} s: simulated {line}")

    fleet = with_measured_front(fleet)
    hardware, simulation = this_hardware(), Simulation(fleet, load, config)
    status = 0
    try:
        simulation.run(progress)
    except KeyboardInterrupt:
        status = INTERRUPTED
        say(f"stopped: the report is of the first {simulation.seconds:.0f} simulated seconds")
    outcome = SimulateOutcome(command=command, hardware=hardware, took_s=time.monotonic() - began_s, found=figures(simulation))
    print(report(outcome, markdown))
    write_figures(outcome, load.json)
    return status


def with_measured_front(fleet: FleetPlan) -> FleetPlan:
    """The plan with the costs that it says to measure."""
    if fleet.front != MEASURE:
        return fleet
    from simulation.measured_front import measure_front  # all of the HTTP side

    front = measure_front(fleet.front_model).spelled
    say(f"measured: --front {front}")
    return replace(fleet, front=front, front_model=DEMO_MODEL)


def report(outcome: SimulateOutcome, markdown: bool) -> str:
    style, ran = ReportStyle(markdown), machine_line(outcome.hardware, f"it ran for {outcome.took_s:.0f} s on one core")
    body = [part for title, lines in tables(outcome.found) for part in style.section(title, lines)]
    return style.text(outcome.command, [ran, *body])
