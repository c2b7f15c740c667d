"""`launch bench compare`: the same load through several layouts, in alternating rounds, and a page of charts about it.

Owns the order, the fleets, the ratios between layouts, the charts, and the page: HTML that needs nothing else, with tables and
the charts inside it. `bench/serve.py` sends the load. matplotlib, an optional dependency, draws, by its objects and not its
`pyplot`, which keeps figures in a global state and looks for a screen. Prints its progress on stderr."""

import base64
import bisect
import contextlib
import html
import io
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray

from bench.options import CompareOptions, Layout, ServeOptions
from bench.report import Outcome, ReportStyle, cautions, machine_line, ratios, say, spread_of, this_hardware, write_figures
from bench.serve import ServerRefuses, measure, served, times_ms
from common.errors import needs_file
from common.processes.local_fleet import FleetFailed

TIMES = {"ttft": "TTFT", "itl": "ITL", "e2el": "E2E"}
"""The times whose distributions are kept, and what charts call them."""
LEVELS = (*(float(percent) for percent in range(100)), 99.5, 99.9, 100.0)
"""The percentiles that are kept of them."""
METRICS = {
    "p50_ttft_ms": ("TTFT p50, ms", 1),
    "p99_ttft_ms": ("TTFT p99, ms", 1),
    "p50_itl_ms": ("ITL p50, ms", 1),
    "p99_itl_ms": ("ITL p99, ms", 1),
    "mean_tpot_ms": ("TPOT mean, ms", 1),
    "output_throughput": ("output tokens/s", 1),
    "request_goodput": ("goodput, requests/s", 2),
    "attainment": ("SLO attainment, share of requests", 3),
}
"""The figures that have a table: what it is called, and how many digits follow the point."""
HOW = (
    "Each figure is the median of the rounds, with the least and the most in brackets where there are several. "
    "A × before a number is the ratio to the first layout, taken round by round: its median, least and most."
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1180px;
  margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .4em }
img { max-width: 100%; height: auto; display: block }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6em 0 }
th, td { text-align: right; padding: .25em .8em; border-bottom: 1px solid #ddd; vertical-align: top }
th:first-child, td:first-child { text-align: left }
code { overflow-wrap: anywhere } .wide { overflow-x: auto } .failed { color: #a00000 }
"""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333")
"""Told apart by most colour-blind readers. Source: Okabe and Ito, https://jfly.uni-koeln.de/color/."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANEL_INCHES, LEGEND_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 4.6, 2.2, 3.6, 130
BESIDE = 0.008
"""How far the bars of two layouts are apart at the same rate, as a share of the axis."""
GREY = "#888888"
LEAST_MS, LEFT_SHARE = 0.1, 0.04
"""Distributions are shown from where this share of the times lies, and never below so many ms: several tokens of one event are no
time apart, which a logarithm cannot show."""
NARROW, WIDE = 8, 100
"""Values that differ by less than the first factor need no logarithm; by more than the second, powers of ten are marks enough."""
LINE_POINTS, MARKER_POINTS = 1.8, 5.5

TableLines = list[tuple[str, ...]]
Start = Callable[[Layout], contextlib.AbstractContextManager[str]]
"""A running layout; gives its URL."""


class CompareRun(msgspec.Struct, frozen=True, kw_only=True):
    """A layout at a rate, in one round."""

    layout: str
    rate: float
    round: int
    figures: dict[str, float]
    """With the keys of `vllm bench serve`, and `attainment`: the share of all requests, failed ones too, that kept every limit of
    --goodput."""
    errors: dict[str, int] = {}
    quantiles_ms: dict[str, list[float]] = {}
    """The ttft, itl and e2el at LEVELS; none without answers."""


class CompareFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that could not be measured in a round, or not to its end."""

    layout: str
    round: int
    reason: str


class CompareOutcome(Outcome, frozen=True, kw_only=True):
    """All that is known at the end of `launch bench compare`."""

    layouts: list[Layout]
    rates: list[float]
    rounds: int
    seconds: float
    limits_ms: dict[str, float]
    """What a good answer keeps."""
    runs: list[CompareRun]
    failures: list[CompareFailure]

    def values(self, layout: str, rate: float, key: str) -> dict[int, float]:
        """The figure of each round in which it was measured."""
        return {run.round: run.figures[key] for run in self.runs if (run.layout, run.rate) == (layout, rate)}


def run(bench: CompareOptions, common: ServeOptions, command: str, markdown: bool, api_key: str) -> int:
    """Measure, print the report and write the files. Returns the exit status: 1 if a layout failed. Raises ConfigError."""
    folder = Path(bench.output)
    with needs_file(f"--output {bench.output}: no folder can be made there"):
        folder.mkdir(parents=True, exist_ok=True)
    hardware = this_hardware()
    runs: list[CompareRun] = []
    failures: list[CompareFailure] = []
    outcome = CompareOutcome(
        command=command,
        hardware=hardware,
        layouts=list(bench.layouts),
        rates=list(bench.ladder),
        rounds=bench.rounds,
        seconds=bench.seconds,
        limits_ms=common.results.limits_ms,
        runs=runs,
        failures=failures,
    )
    measured_s = bench.rounds * len(bench.layouts) * len(bench.ladder) * bench.seconds
    say(f"this takes {measured_s / 60:.0f} minutes, and the starts of the fleets; Ctrl-C ends it with what is measured by then")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for _ in measure_all(bench, common, lambda layout: served(layout.url, *layout.flags), api_key, runs, failures):
        write_figures(outcome, str(folder / "figures.json"))
    if not runs:
        say("nothing was measured")
        return 1
    publish(outcome, folder)
    print(report(outcome, ReportStyle(markdown)))
    say(f"wrote {folder / 'page.html'}")
    return 1 if failures else 0


def measure_all(
    bench: CompareOptions,
    common: ServeOptions,
    start: Start,
    api_key: str,
    runs: list[CompareRun],
    failures: list[CompareFailure],
) -> Iterator[None]:
    """Add every turn of every layout to `runs` and `failures`, and yield after each. A layout that fails leaves what it had
    measured, and the next one goes on; a signal that stops the command is the last failure."""
    for number, layout in bench.turns():
        try:
            with start(layout) as url:
                for rate in bench.ladder:
                    say(f"round {number + 1} of {bench.rounds}, {layout.name}, {rate:g} requests/s")
                    result = measure(bench.load_on(url, common, rate, number), api_key)
                    whole = [answer for answer in result.answers if not answer.error]
                    runs.append(run_of(layout.name, rate, number, result.figures, times_ms(whole)))
        except (FleetFailed, ServerRefuses, KeyboardInterrupt) as error:
            # A fleet that was still starting may fail to stop in order.
            is_stopped = isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt)
            reason = "stopped by a signal" if is_stopped else str(error)
            say(f"{layout.name} failed: {reason}")
            failures.append(CompareFailure(layout=layout.name, round=number, reason=reason))
            if is_stopped:
                return
        yield


# ---- figures ----


def run_of(
    layout: str, rate: float, round_number: int, figures: dict[str, Any], times: dict[str, NDArray[np.float64]]
) -> CompareRun:
    """figures, times: as `bench/serve.py` makes them."""
    numbers = {key: float(value) for key, value in figures.items() if isinstance(value, int | float)}
    requests = numbers["completed"] + numbers["failed"]
    quantiles = {name: np.percentile(times[name], LEVELS).tolist() for name in TIMES if len(times[name])}
    return CompareRun(
        layout=layout,
        rate=rate,
        round=round_number,
        figures=numbers | {"attainment": numbers["good_completed"] / requests if requests else 0.0},
        errors=figures["errors_by_kind"],
        quantiles_ms=quantiles,
    )


def pooled(runs: Sequence[CompareRun], name: str) -> tuple[list[float], list[float]]:
    """The distribution of a time over several runs, each of equal weight: values in ms, and the share of times up to each."""
    known = [run.quantiles_ms[name] for run in runs if name in run.quantiles_ms]
    values = sorted({value for quantiles in known for value in quantiles})
    shares = [np.interp(values, quantiles, LEVELS, left=0.0) / 100 for quantiles in known]
    return values, np.mean(shares, axis=0).tolist() if known else []


# ---- the report and the page ----


def publish(outcome: CompareOutcome, folder: Path) -> None:
    """Write the figures first: they are there even if a chart cannot be drawn."""
    write_figures(outcome, str(folder / "figures.json"))
    drawn = list(charts(outcome))
    for name, _, png in drawn:
        (folder / name).write_bytes(png)
    (folder / "page.html").write_text(page(outcome, drawn), encoding="utf-8")


def report(outcome: CompareOutcome, style: ReportStyle) -> str:
    """For a terminal, or the section for docs/measurements/compare.md."""
    sections = [part for key, (title, _) in METRICS.items() for part in style.section(title, table(outcome, key))]
    return style.text(outcome.command, [*notes(outcome), *failed(outcome), style.table(_layouts(outcome)), HOW, *sections])


def page(outcome: CompareOutcome, charts: Sequence[tuple[str, str, bytes]]) -> str:
    """charts: as `charts` makes them."""
    names = html.escape(" against ".join(layout.name for layout in outcome.layouts))
    parts = [f"<h1>{names}</h1>", *(f"<p>{html.escape(line)}</p>" for line in notes(outcome)), _html_table(_layouts(outcome))]
    parts += [f'<p class="failed">{html.escape(line)}</p>' for line in failed(outcome)]
    for name, title, png in charts:
        alt, data = html.escape(title), base64.b64encode(png).decode()
        parts.append(f'<h2>{alt}</h2>\n<img alt="{alt}" title="{html.escape(name)}" src="data:image/png;base64,{data}">')
    parts.append(f"<h2>Figures</h2>\n<p>{html.escape(HOW)}</p>")
    parts += [f"<h3>{html.escape(title)}</h3>\n{_html_table(table(outcome, key))}" for key, (title, _) in METRICS.items()]
    parts.append(f"<h2>Command</h2>\n<p><code>{html.escape(outcome.command)}</code></p>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{names}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def notes(outcome: CompareOutcome) -> list[str]:
    """The machine, the load, and what a good answer is."""
    limits = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in outcome.limits_ms.items())
    rounds = f"{outcome.rounds} round{'s' * (outcome.rounds > 1)}"
    settings = f"{rounds}, {outcome.seconds:g} s at each rate; clients and layouts share these cores"
    return [machine_line(outcome.hardware, settings), *cautions(outcome.hardware), f"A good answer keeps: {limits}."]


def failed(outcome: CompareOutcome) -> list[str]:
    """What went wrong: layouts that were not measured, and requests that failed."""
    lines = [f"{each.layout}, round {each.round + 1}: not measured to its end: {each.reason}" for each in outcome.failures]
    for run in outcome.runs:
        if run.errors:
            kinds = ", ".join(f"{count} {kind}" for kind, count in run.errors.items())
            lines.append(f"{run.layout}, round {run.round + 1}, {run.rate:g} requests/s: failed requests: {kinds}")
    return lines


def table(outcome: CompareOutcome, key: str) -> TableLines:
    """A figure: a line for each rate, a column for each layout. The first line is the head."""
    names = [layout.name for layout in outcome.layouts]
    form = f",.{METRICS[key][1]}f"
    lines: TableLines = [("requests/s", *names)]
    for rate in outcome.rates:
        values = {name: outcome.values(name, rate, key) for name in names}
        cells = []
        for name in names:
            spread = spread_of(values[name].values())
            ratio = None if name == names[0] else ratios(values[name], values[names[0]])
            cells.append("–" if spread is None else spread.text(form) + ("" if ratio is None else f"  ×{ratio.text(',.2f')}"))
        lines.append((f"{rate:g}", *cells))
    return lines


def _layouts(outcome: CompareOutcome) -> TableLines:
    return [("layout", "launch local, or URL"), *((layout.name, layout.text) for layout in outcome.layouts)]


def _html_table(lines: TableLines) -> str:
    kinds = "th", *["td"] * (len(lines) - 1)
    cells = ("".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in line) for kind, line in zip(kinds, lines, strict=True))
    return '<div class="wide"><table>\n' + "\n".join(f"<tr>{row}</tr>" for row in cells) + "\n</table></div>"


# ---- charts ----


def charts(outcome: CompareOutcome) -> Iterator[tuple[str, str, bytes]]:
    """Each chart: the name of its file, what it shows, and the PNG."""
    rate = "the load (line: median of the rounds; bar: least to most)"
    for name, what in (("ttft", "Time to first token"), ("itl", "Time between tokens")):
        chart = _Chart(outcome, panels=2)
        for which in ("p50", "p99"):
            _spread_out(chart.against_rate(f"{which}_{name}_ms", f"{TIMES[name]}, {which}, ms"))
        yield f"{name}.png", f"{what} against {rate}", chart.png()
    chart = _Chart(outcome, panels=3)
    goodput = chart.against_rate("request_goodput", "goodput, requests/s")
    sent = [0.0, *outcome.rates]
    goodput.plot(sent, sent, color=GREY, linestyle="--", linewidth=1, label="all requests")
    goodput.set_ylim(0, 1.08 * goodput.dataLim.ymax)
    _show_shares(chart.against_rate("attainment", "requests that keep the limits"))
    chart.against_rate("output_throughput", "output tokens/s")
    yield "goodput.png", f"Goodput, SLO attainment and throughput against {rate}", chart.png()
    for each in outcome.rates:
        chart = _Chart(outcome, panels=3)
        for name in TIMES:
            chart.distribution(each, name)
        yield f"latencies_{each:g}.png", f"Distributions at {each:g} requests/s, all rounds together", chart.png()


class _Chart:
    """Panels side by side, with one legend beside them. Each layout has a colour."""

    def __init__(self, outcome: CompareOutcome, panels: int) -> None:
        self._outcome = outcome
        self._figure = Figure(
            figsize=(PANEL_INCHES * panels + LEGEND_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained"
        )
        FigureCanvasAgg(self._figure)
        self._axes = iter(self._figure.subplots(1, panels))

    def against_rate(self, key: str, title: str) -> Axes:
        """The next panel: a figure of each layout at each rate."""
        axes, outcome, most = self._panel("load, requests/s", title), self._outcome, max(self._outcome.rates)
        for at, layout in enumerate(outcome.layouts):
            spreads = {rate: spread_of(outcome.values(layout.name, rate, key).values()) for rate in outcome.rates}
            points = [(rate, spread) for rate, spread in spreads.items() if spread is not None]
            beside = (at - (len(outcome.layouts) - 1) / 2) * BESIDE * most
            axes.errorbar(
                [rate + beside for rate, _ in points],
                [spread.median for _, spread in points],
                yerr=([s.median - s.least for _, s in points], [s.most - s.median for _, s in points]),
                color=COLOURS[at % len(COLOURS)],
                marker=MARKERS[at % len(MARKERS)],
                label=layout.name,
                linewidth=LINE_POINTS,
                markersize=MARKER_POINTS,
                elinewidth=1,
                capsize=3,
            )
        high = axes.dataLim.ymax
        axes.set(xlim=(0, 1.04 * most), ylim=(0, 1.08 * high if math.isfinite(high) and high > 0 else 1))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10]))
        return axes

    def distribution(self, rate: float, name: str) -> None:
        """The next panel: the distribution of a time, for each layout at this rate."""
        axes = self._panel(f"{TIMES[name]}, ms", "share of " + ("gaps between tokens" if name == "itl" else "requests"))
        lows, highs = [], []
        for at, layout in enumerate(self._outcome.layouts):
            runs = [run for run in self._outcome.runs if (run.layout, run.rate) == (layout.name, rate)]
            values, shares = pooled(runs, name)
            if values:
                lows.append(values[bisect.bisect_left(shares, LEFT_SHARE)])
                highs.append(values[-1])
            times = [max(LEAST_MS, value) for value in values]
            axes.plot(times, shares, color=COLOURS[at % len(COLOURS)], label=layout.name, linewidth=LINE_POINTS)
        if name in self._outcome.limits_ms:
            axes.axvline(self._outcome.limits_ms[name], color=GREY, linestyle="--", linewidth=1, label="limit")
        _show_shares(axes)
        low = max(LEAST_MS, min(lows, default=LEAST_MS) / 1.5)
        axes.set(xscale="log", xlim=(low, max(2 * low, 1.2 * max(highs, default=0.0))))
        _number_logarithm(axes.xaxis)

    def png(self) -> bytes:
        labelled: dict[str, Artist] = {}
        for axes in self._figure.axes:
            handles, labels = axes.get_legend_handles_labels()
            labelled |= dict(zip(labels, handles, strict=True))
        self._figure.legend(labelled.values(), labelled.keys(), loc="outside right upper", frameon=False)
        file = io.BytesIO()
        self._figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()

    def _panel(self, across: str, up: str) -> Axes:
        axes: Axes = next(self._axes)
        axes.set(xlabel=across, ylabel=up)
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        return axes


def _show_shares(axes: Axes) -> None:
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _spread_out(axes: Axes) -> None:
    """Make the vertical axis logarithmic if its values differ much."""
    low, high = axes.dataLim.intervaly
    if low > 0 and high / low > NARROW:
        axes.set(yscale="log", ylim=(low / 1.3, high * 1.3))
        _number_logarithm(axes.yaxis)


def _number_logarithm(axis: Axis) -> None:
    """Numbers as people write them: between the powers of ten too where there are few of these."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < WIDE else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
