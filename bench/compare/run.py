"""`launch bench compare`: starts each layout in its turn, sends it the load at every rate, and writes the page.

Owns the order, the fleets and the files. `bench.serve` is the client. Prints its progress on stderr.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.compare.charts import charts
from bench.compare.figures import METRICS, CompareOutcome, Failure, Run, Side, run_of
from bench.compare.page import HOW, failed, notes, page, table
from bench.compare.plan import CompareBench, Layout, serve_bench
from bench.hardware import this_hardware
from bench.serve.figures import times_ms
from bench.serve.plan import ServeBench
from bench.serve.run import ServerRefuses, measure
from bench.tables import markdown_table, say, text_table, write_figures
from common.errors import ConfigError
from common.processes.local_fleet import FleetFailed, local_fleet

Start = Callable[[Layout], contextlib.AbstractContextManager[str]]
"""A running layout; gives its URL."""


def run(bench: CompareBench, common: ServeBench, command: str, markdown: bool, api_key: str) -> int:
    """Measure, print the report and write the files. Returns the exit status: 1 if a layout failed. Raises ConfigError."""
    folder = Path(bench.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {bench.output}: no folder can be made there: {error.strerror}") from error
    hardware = this_hardware()
    runs, failures = measure_all(bench, common, running, api_key)
    if not runs:
        say("nothing was measured")
        return 1
    outcome = CompareOutcome(
        command=command,
        hardware=hardware,
        layouts=[Side(name=each.name, text=each.text) for each in bench.layouts],
        rates=list(bench.ladder),
        rounds=bench.rounds,
        seconds=bench.seconds,
        limits_ms=common.results.limits_ms,
        runs=runs,
        failures=failures,
    )
    publish(outcome, folder)
    print(report(outcome, markdown))
    say(f"wrote {folder / 'page.html'}")
    return 1 if failures else 0


def measure_all(bench: CompareBench, common: ServeBench, start: Start, api_key: str) -> tuple[list[Run], list[Failure]]:
    """Every turn. A turn that fails leaves what it had measured, and the next one goes on."""
    runs: list[Run] = []
    failures: list[Failure] = []
    for turn in bench.turns():
        name = turn.layout.name
        try:
            with start(turn.layout) as url:
                for rate in bench.ladder:
                    say(f"round {turn.round + 1} of {bench.rounds}, {name}, {rate:g} requests/s")
                    measured = measure(serve_bench(bench, common, url, rate, turn.round), api_key)
                    whole = [answer for answer in measured.answers if not answer.error]
                    runs.append(run_of(name, rate, turn.round, measured.figures, times_ms(whole)))
        except (FleetFailed, ServerRefuses) as error:
            say(f"{name} failed: {error}")
            failures.append(Failure(layout=name, round=turn.round, reason=str(error)))
    return runs, failures


@contextlib.contextmanager
def running(layout: Layout) -> Iterator[str]:
    """The URL of a server that runs already, or of a fleet that is stopped at the end. Raises FleetFailed."""
    if layout.url:
        yield layout.url
        return
    with local_fleet(*layout.flags) as fleet:
        yield fleet.url


def publish(outcome: CompareOutcome, folder: Path) -> None:
    """Write the figures first: they are there even if a chart cannot be drawn."""
    write_figures(outcome, str(folder / "figures.json"))
    drawn = list(charts(outcome))
    for name, _, png in drawn:
        (folder / name).write_bytes(png)
    (folder / "page.html").write_text(page(outcome, drawn), encoding="utf-8")


def report(outcome: CompareOutcome, markdown: bool) -> str:
    """For a terminal, or the section for docs/measurements/compare.md."""
    sides = [("layout", "launch local, or URL"), *((side.name, side.text) for side in outcome.layouts)]
    tables = [(metric.title, table(outcome, metric)) for metric in METRICS]
    if markdown:
        parts = [f"```sh\n{outcome.command}\n```", *notes(outcome), *failed(outcome), markdown_table(sides), HOW]
        return "\n\n".join([*parts, *(f"**{title}**\n\n{markdown_table(lines)}" for title, lines in tables)])
    parts = [*notes(outcome), *failed(outcome), text_table(sides), HOW]
    return "\n".join([*parts, *(f"\n{title}\n{text_table(lines)}" for title, lines in tables)])
