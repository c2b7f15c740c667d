"""What came of a comparison: each run, its times as quantiles, and ratios between layouts with their spread over the rounds.

Owns the definitions. Pure: measures and prints nothing.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.figures import Spread
from bench.hardware import Hardware

TIMES = {"ttft": "TTFT", "itl": "ITL", "e2el": "E2E"}
"""The times whose distributions are kept, and what charts call them."""
LEVELS = (*(float(percent) for percent in range(100)), 99.5, 99.9, 100.0)
"""The percentiles that are kept of them."""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a run. title: with its unit. better: which direction is."""

    key: str
    title: str
    better: str
    digits: int = 1


METRICS = (
    Metric(key="p50_ttft_ms", title="TTFT p50, ms", better="less"),
    Metric(key="p99_ttft_ms", title="TTFT p99, ms", better="less"),
    Metric(key="p50_itl_ms", title="ITL p50, ms", better="less"),
    Metric(key="p99_itl_ms", title="ITL p99, ms", better="less"),
    Metric(key="mean_tpot_ms", title="TPOT mean, ms", better="less"),
    Metric(key="output_throughput", title="output tokens/s", better="more"),
    Metric(key="request_goodput", title="goodput, requests/s", better="more", digits=2),
    Metric(key="attainment", title="SLO attainment, share of requests", better="more", digits=3),
)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A layout at a rate, in one round. figures: with the keys of `vllm bench serve`, and `attainment`: the share of all
    requests, failed ones too, that kept every limit of --goodput. quantiles_ms: of ttft, itl and e2el, at LEVELS; none without
    answers."""

    layout: str
    rate: float
    round: int
    figures: dict[str, float]
    errors: dict[str, int] = {}
    quantiles_ms: dict[str, list[float]] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that could not be measured, or not to its end."""

    layout: str
    round: int
    reason: str


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A layout, and what it was started with or where it runs."""

    name: str
    text: str


class CompareOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known at the end of `launch bench compare`. limits_ms: what a good answer keeps."""

    command: str
    hardware: Hardware
    layouts: list[Side]
    rates: list[float]
    rounds: int
    seconds: float
    limits_ms: dict[str, float]
    runs: list[Run]
    failures: list[Failure]

    def values(self, layout: str, rate: float, key: str) -> dict[int, float]:
        """Of each round in which it was measured."""
        return {run.round: run.figures[key] for run in self.runs if (run.layout, run.rate) == (layout, rate)}


def run_of(layout: str, rate: float, round_number: int, figures: dict[str, Any], times_ms: dict[str, NDArray[np.float64]]) -> Run:
    """figures, times_ms: as `bench.serve.figures` makes them."""
    numbers = {key: float(value) for key, value in figures.items() if isinstance(value, int | float)}
    asked = numbers["completed"] + numbers["failed"]
    quantiles = {name: np.percentile(times_ms[name], LEVELS).tolist() for name in TIMES if len(times_ms[name])}
    return Run(
        layout=layout,
        rate=rate,
        round=round_number,
        figures=numbers | {"attainment": numbers["good_completed"] / asked if asked else 0.0},
        errors=figures["errors_by_kind"],
        quantiles_ms=quantiles,
    )


def spread_of(values: Iterable[float]) -> Spread | None:
    """None without values."""
    known = list(values)
    return Spread.of(known) if known else None


def ratios(ours: dict[int, float], theirs: dict[int, float]) -> Spread | None:
    """ours / theirs, round by round, so that what changes about the machine between rounds cancels out. A round with nothing to
    divide by is left out."""
    return spread_of(value / theirs[number] for number, value in ours.items() if theirs.get(number, 0.0) > 0)


def pooled(runs: Sequence[Run], name: str) -> tuple[list[float], list[float]]:
    """The distribution of a time over several runs, each of equal weight: values in ms, and the share of times up to each."""
    known = [run.quantiles_ms[name] for run in runs if name in run.quantiles_ms]
    if not known:
        return [], []
    values = sorted({value for quantiles in known for value in quantiles})
    shares = [statistics.fmean(_share(quantiles, value) for quantiles in known) for value in values]
    return values, shares


def _share(quantiles: Sequence[float], value: float) -> float:
    """The share of times that are not above the value, between the levels in a straight line."""
    if value >= quantiles[-1]:
        return 1.0
    above = int(np.searchsorted(quantiles, value, side="right"))
    if above == 0:
        return 0.0
    low, high = quantiles[above - 1], quantiles[above]
    part = (value - low) / (high - low)
    return (LEVELS[above - 1] + part * (LEVELS[above] - LEVELS[above - 1])) / 100
