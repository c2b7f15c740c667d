"""What `launch bench compare` measures: its flags, the layouts, and the order of the runs.

Owns names, defaults and limits. Imports nothing heavy, starts nothing.
"""

import importlib.util
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from bench.serve.plan import Load, Results, ServeBench, Target, Workload
from common.errors import ConfigError
from common.options import option, parse_numbers, require, require_above_0, require_at_least

DECIDED_BY_COMPARE = (
    *("base_url", "host", "port", "num_prompts", "request_rate"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    *("percentile_metrics", "metric_percentiles", "json", "save_detailed", "csv", "disable_tqdm"),
)
"""Flags of `launch bench serve` that this benchmark has not: it sets them itself."""
MARK = "://"
"""A layout that holds it is a URL."""


@dataclass(frozen=True, slots=True)
class Layout:
    """name: as charts show it. flags: of `launch local`; none where url names a server that runs already."""

    name: str
    flags: tuple[str, ...] = ()
    url: str = ""

    @property
    def text(self) -> str:
        return self.url or shlex.join(self.flags)


@dataclass(frozen=True, slots=True)
class Turn:
    """A layout's place in a round: it is started, takes every rate, and is stopped."""

    round: int
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class CompareBench:
    """What is compared, and for how long."""

    layout: tuple[str, ...] = option(
        (),
        "NAME=FLAGS of `launch local`, in quotes, such as '1P1D=--prefill 1 --decode 1 --threads 1', or NAME=URL of a "
        "server that runs; the others are compared with the first",
    )
    rates: str = option("1,2,4,8", "requests a second, one rate after the other")
    seconds: float = option(30.0, "how long requests are sent at each rate")
    rounds: int = option(3, "how often each layout has its turn: A B C, A B C and so on")
    output: str = option("compare", "the folder that gets page.html, the charts as PNG files, and figures.json")

    def __post_init__(self) -> None:
        if not self.layouts:
            raise ConfigError("--layout is missing: give NAME=FLAGS of `launch local` or NAME=URL for each layout")
        if len({each.name for each in self.layouts}) < len(self.layouts):
            raise ConfigError("--layout must have another name for each layout")
        require(all(0 < rate < math.inf for rate in self.ladder), "rates", "above 0 each", self.rates)
        require_above_0(self, "seconds")
        require_at_least(self, rounds=1)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(_layout(text) for text in self.layout)

    @property
    def ladder(self) -> tuple[float, ...]:
        """Each rate once, rising."""
        return tuple(sorted(set(parse_numbers(self.rates, "rates", float))))

    def turns(self) -> Iterator[Turn]:
        """A B C, A B C: what changes slowly about the machine meets every layout."""
        for number, layout in product(range(self.rounds), self.layouts):
            yield Turn(number, layout)


def serve_bench(bench: CompareBench, common: ServeBench, url: str, rate: float, round_number: int) -> ServeBench:
    """What one run asks of the server at this URL. All layouts get the same requests at the same times; each rate of each round
    has others, so that no server has seen them."""
    number = round_number * len(bench.ladder) + bench.ladder.index(rate)
    workload = replace(common.workload, num_prompts=max(1, round(rate * bench.seconds)), seed=common.workload.seed + number)
    target = replace(common.target, base_url=url)
    return replace(common, target=target, workload=workload, load=replace(common.load, request_rate=rate))


def common_bench(target: Target, workload: Workload, load: Load, results: Results) -> ServeBench:
    """What all runs have in common. Raises ConfigError for what cannot be compared."""
    if workload.dataset_name == "trace":
        raise ConfigError("--dataset-name trace has its own times, which no rate changes: choose another")
    if not results.goodput:
        raise ConfigError("--goodput is missing: say what a good answer keeps, such as --goodput ttft:500 itl:50")
    return ServeBench(target=target, workload=workload, load=load, results=results)


def _layout(text: str) -> Layout:
    name, equals, rest = text.partition("=")
    if not equals or not name.strip() or not rest.strip():
        raise ConfigError(f"--layout must be NAME=FLAGS or NAME=URL, is {text!r}")
    if MARK in rest and not rest.lstrip().startswith("-"):
        return Layout(name.strip(), url=rest.strip())
    try:
        return Layout(name.strip(), flags=tuple(shlex.split(rest)))
    except ValueError as error:
        raise ConfigError(f"--layout {name.strip()}: the quotes of {rest!r} do not match: {error}") from None


def require_charts() -> None:
    """Raises ConfigError, before anything is measured, when what draws the charts is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib, which draws the charts, is not installed: install it, as with pip install '.[bench]'")
