"""The charts of a comparison, as PNG.

Owns axes, units and colours; matplotlib, an optional dependency, draws. Knows figures; measures nothing. It uses matplotlib's
objects and not its `pyplot`, which keeps figures in a global state and looks for a screen.
"""

import bisect
import io
import math
from collections.abc import Callable, Iterator, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from bench.compare.figures import TIMES, CompareOutcome, pooled, spread_of

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333")
"""Told apart by most colour-blind readers. Source: Okabe and Ito, https://jfly.uni-koeln.de/color/."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANEL_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 4.6, 3.6, 130
LETTERS_PER_INCH = 12
BESIDE = 0.008
"""How far the bars of two layouts are apart at the same rate, as a share of the axis."""
GREY = "#888888"
LEAST_MS, LEFT_SHARE = 0.1, 0.04
"""Distributions are shown from where this share of the times lies, and never below so many ms: several tokens of one event are no
time apart, which a logarithm cannot show."""
NARROW, WIDE = 8, 100
"""Values that differ by less than the first factor need no logarithm; by more than the second, powers of ten are marks enough."""
LINE_POINTS, MARKER_POINTS = 1.8, 5.5

Draw = Callable[[Axes], None]


def charts(outcome: CompareOutcome) -> Iterator[tuple[str, str, bytes]]:
    """Each chart: the name of its file, what it shows, and the PNG."""
    rate = "the load (line: median of the rounds; bar: least to most)"
    for name, what in (("ttft", "Time to first token"), ("itl", "Time between tokens")):
        panels = [_against_rate(outcome, f"{each}_{name}_ms", f"{TIMES[name]}, {each}, ms", logs=True) for each in ("p50", "p99")]
        yield f"{name}.png", f"{what} against {rate}", _png(outcome, panels)
    panels = [
        _against_rate(outcome, "request_goodput", "goodput, requests/s", reference=True),
        _against_rate(outcome, "attainment", "requests that keep the limits", percent=True),
        _against_rate(outcome, "output_throughput", "output tokens/s"),
    ]
    yield "goodput.png", f"Goodput, SLO attainment and throughput against {rate}", _png(outcome, panels)
    for each in outcome.rates:
        panels = [_distribution(outcome, each, name) for name in TIMES]
        yield f"latencies_{each:g}.png", f"Distributions at {each:g} requests/s, all rounds together", _png(outcome, panels)


def _against_rate(
    outcome: CompareOutcome, key: str, title: str, *, logs: bool = False, percent: bool = False, reference: bool = False
) -> Draw:
    """logs: the axis is logarithmic if values differ much. percent: values are shares. reference: also show what was sent."""

    def draw(axes: Axes) -> None:
        if reference:
            axes.plot([0.0, *outcome.rates], [0.0, *outcome.rates], color=GREY, linestyle="--", linewidth=1, label="all requests")
        for at, side in enumerate(outcome.layouts):
            points = [(rate, spread_of(outcome.values(side.name, rate, key).values())) for rate in outcome.rates]
            known = [(rate, spread) for rate, spread in points if spread is not None]
            beside = (at - (len(outcome.layouts) - 1) / 2) * BESIDE * max(outcome.rates)
            axes.errorbar(
                [rate + beside for rate, _ in known],
                [spread.median for _, spread in known],
                yerr=([s.median - s.least for _, s in known], [s.most - s.median for _, s in known]),
                color=_colour(at),
                marker=_marker(at),
                label=side.name,
                linewidth=LINE_POINTS,
                markersize=MARKER_POINTS,
                elinewidth=1,
                capsize=3,
            )
        axes.set_xlabel("load, requests/s")
        axes.set_ylabel(title)
        axes.set_xlim(0, 1.04 * max(outcome.rates))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10]))
        low, high = axes.dataLim.intervaly
        if logs and low > 0 and high / low > NARROW:
            _logarithmic(axes, axes.yaxis, low / 1.3, high * 1.3)
        else:
            axes.set_ylim(0, 1.08 * high if math.isfinite(high) and high > 0 else 1)
        if percent:
            axes.set_ylim(0, 1.04)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    return draw


def _distribution(outcome: CompareOutcome, rate: float, name: str) -> Draw:
    def draw(axes: Axes) -> None:
        lows, highs = [], []
        for at, side in enumerate(outcome.layouts):
            runs = [run for run in outcome.runs if (run.layout, run.rate) == (side.name, rate)]
            values, shares = pooled(runs, name)
            if values:
                lows.append(values[bisect.bisect_left(shares, LEFT_SHARE)])
                highs.append(values[-1])
            axes.plot(
                [max(LEAST_MS, value) for value in values], shares, color=_colour(at), label=side.name, linewidth=LINE_POINTS
            )
        if name in outcome.limits_ms:
            axes.axvline(outcome.limits_ms[name], color=GREY, linestyle="--", linewidth=1, label="limit")
        axes.set_xlabel(f"{TIMES[name]}, ms")
        axes.set_ylabel("share of " + ("gaps between tokens" if name == "itl" else "requests"))
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        low = max(LEAST_MS, min(lows, default=LEAST_MS) / 1.5)
        _logarithmic(axes, axes.xaxis, low, max(2 * low, 1.2 * max(highs, default=0.0)))

    return draw


def _logarithmic(axes: Axes, axis: Axis, low: float, high: float) -> None:
    """An axis from low to high, with numbers as people write them: between the powers of ten too where there are few of these."""
    steps = (1.0, 2.0, 5.0) if high / low < WIDE else (1.0,)
    if axis is axes.xaxis:
        axes.set(xscale="log", xlim=(low, high))
    else:
        axes.set(yscale="log", ylim=(low, high))
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _png(outcome: CompareOutcome, panels: Sequence[Draw]) -> bytes:
    """Panels side by side, with one legend above them."""
    figure = Figure(figsize=(PANEL_INCHES * len(panels), HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    labelled: dict[str, Artist] = {}
    for at, draw in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), at + 1)
        draw(axes)
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        for edge in ("top", "right"):
            axes.spines[edge].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        labelled |= dict(zip(labels, handles, strict=True))
    order = [side.name for side in outcome.layouts if side.name in labelled]
    order += [label for label in labelled if label not in order]
    rows = math.ceil(sum(len(label) + 7 for label in order) / (LETTERS_PER_INCH * PANEL_INCHES * len(panels)))
    columns = math.ceil(len(order) / rows)
    figure.legend([labelled[label] for label in order], order, loc="outside upper center", ncols=columns, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def _marker(at: int) -> str:
    return MARKERS[at % len(MARKERS)]
