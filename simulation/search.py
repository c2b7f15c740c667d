"""The search for a fleet: which division of some devices serves the most good requests.

Owns the candidates, the rate that each can bear, and the rounds: all candidates in short runs, the best of them in longer ones
(successive halving). Runs simulations, in processes that its caller gives; prints nothing.

    rate ──► ×1.5 while requests keep the limits ──► halves between the last that kept them and the first that did not
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec
import numpy as np

from common.config import Dispatch, PolicyName, RouterConfig
from common.errors import ConfigError
from common.step_cost import StepCost
from simulation.plan import FleetPlan, LoadPlan, SearchPlan
from simulation.report import Percentiles
from simulation.run import Simulation
from simulation.workload import read_trace

GROWTH = 1.5
MOST_RUNS = 12
HOPELESS = 1.5
"""So many times as many answers as may miss a limit."""
PRECISION = 0.03
ROUNDS = (4, 0.25, 1 / 3), (2, 0.1, 1 / 3)
"""How many times shorter the runs of each round before the last are, how exact, and the share of the fleets that stays."""
FEWEST_KEPT = 3
DEFAULT_POLICY: PolicyName = "least_loaded"
GC_OBJECTS = 200_000
"""Allocations between two collections. What a simulation keeps is not garbage, so looking for some more often only takes time."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """How long a trace is."""

    requests: int
    seconds: float
    input_tokens: float
    """Of a request, in the mean."""
    output_tokens: float

    @classmethod
    def of(cls, path: str) -> "TraceSpan":
        """Raises ConfigError."""
        coming = list(read_trace(path))
        if len(coming) < 2 or coming[-1].at_s == 0:
            raise ConfigError(f"--trace: {path} must have two requests at least, at different times")
        lengths = [(each.turns[0].input_tokens, each.turns[0].output_tokens) for each in coming]
        return cls(len(coming), coming[-1].at_s, *np.mean(lengths, axis=0).tolist())

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet that could be. Instances of both roles serve whole requests where that costs less than a pair; they are simulated
    as decode instances, so a fleet has either these or decode instances."""

    prefill: int
    decode: int
    both: int
    ranks: int = 1
    """Of each instance."""
    chunk_tokens: int
    policy: PolicyName

    @property
    def devices(self) -> int:
        return self.ranks * (self.prefill + self.decode + self.both)

    @property
    def shown(self) -> str:
        """Prefill : decode : both."""
        return f"{self.prefill}:{self.decode}:{self.both}" + (f" × {self.ranks} ranks" if self.ranks > 1 else "")


class SearchRun(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation of a candidate. Rates are requests a second."""

    rate: float
    attainment: float
    """The share of its requests that kept both limits."""
    goodput: float
    first_token_s: Percentiles
    mean_between_tokens_s: Percentiles


class Borne(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate bears: the run with the highest rate at which enough requests keep the limits; None: there is none."""

    candidate: Candidate
    best: SearchRun | None
    runs: tuple[SearchRun, ...]

    @property
    def per_device(self) -> float:
        """Good requests a second."""
        return 0.0 if self.best is None else self.best.goodput / self.candidate.devices


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """What one process does at a time. window: the number of the part of the load. near: a rate to begin with."""

    fleet: FleetPlan
    load: LoadPlan
    config: RouterConfig
    span: TraceSpan | None
    """Of the load's trace."""
    candidate: Candidate
    cost: str
    """The step cost of its instances; "": that of the fleet."""
    attainment: float
    seconds: float
    precision: float
    window: int
    windows: int
    near: float
    in_haste: bool
    """Runs whose rate is plainly too high are not finished."""

    def run(self) -> Borne:
        """Find the rate that it bears, within a share of `precision`."""
        gc.set_threshold(GC_OBJECTS)
        runs: list[SearchRun] = []
        best: SearchRun | None = None
        high, rate = math.inf, self.near
        while len(runs) < MOST_RUNS and (best is None or high / best.rate > 1 + self.precision):
            run = self._simulate(rate)
            gc.collect()  # the parts of a simulation refer to each other
            runs.append(run)
            if run.attainment >= self.attainment:
                best = run
                rate = rate * GROWTH if high == math.inf else math.sqrt(rate * high)
            else:
                high = rate
                rate = rate / GROWTH if best is None else math.sqrt(rate * best.rate)
        return Borne(candidate=self.candidate, best=best, runs=tuple(runs))

    def _simulate(self, rate: float) -> SearchRun:
        fleet, config = fleet_of(self)
        simulation = Simulation(fleet, self._load(rate), config)
        simulation.run((lambda line: self._look(simulation, rate)) if self.in_haste else lambda line: None)
        measured, good = simulation.measured, simulation.good
        asked = max(1.0, measured.endings.total(), rate * self.seconds if self.in_haste else 0.0)
        return SearchRun(
            rate=rate,
            attainment=good / asked,
            goodput=good / self.seconds,
            first_token_s=Percentiles.of(measured.first_s),
            mean_between_tokens_s=Percentiles.of(measured.pace_s),
        )

    def _look(self, simulation: Simulation, rate: float) -> None:
        """Stop when so many answers have missed a limit that the rest does not matter."""
        missed = simulation.measured.endings.total() - simulation.good
        if missed > HOPELESS * (1 - self.attainment) * rate * self.seconds:
            simulation.stop()

    def _load(self, rate: float) -> LoadPlan:
        """Windows are parts of a trace, as far from each other as may be; without a trace they are seeds."""
        load, span = self.load, self.span
        if span is None:
            requests = max(1, math.ceil(2 * rate * self.seconds))
            rate = rate / load.turns
            return replace(load, rate=rate, requests=requests, duration_s=self.seconds, seed=load.seed + self.window)
        speed = rate / span.rate
        spare_s = max(0.0, span.seconds - self.seconds * speed)
        return replace(load, speed=speed, duration_s=self.seconds, begin_s=spare_s * self.window / max(1, self.windows - 1))


def fleet_of(task: SearchTask) -> tuple[FleetPlan, RouterConfig]:
    """A candidate as it is simulated. Several ranks have as many pages and links together."""
    each, fleet = task.candidate, task.fleet
    dispatch: Dispatch = "auto" if each.decode else "conditional" if each.prefill else "colocated"
    config = replace(task.config, dispatch=dispatch, prefill_policy=each.policy, decode_policy=each.policy)
    costs = {"step_cost": task.cost, "decode_step_cost": ""} if task.cost else {}
    return replace(
        fleet,
        prefill=each.prefill,
        decode=each.decode + each.both,
        chunk_tokens=each.chunk_tokens,
        kv_pages=fleet.kv_pages * each.ranks,
        link_gbit=fleet.link_gbit * each.ranks,
        skip_steps="on",
        **costs,
    ), config


# --- rounds ----------------------------------------------------------------------------------------------------------------

RunAll: TypeAlias = Callable[[str, Sequence[SearchTask]], Iterator[Borne]]
"""Runs tasks, in any order. Told what they are for, for people."""


class FoundPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate of the last round, with what it bears in each window."""

    candidate: Candidate
    windows: tuple[Borne, ...]

    @property
    def per_device(self) -> tuple[float, float, float]:
        """Good requests a second of each device: the mean over the windows, the least and the most."""
        each = [borne.per_device for borne in self.windows]
        return sum(each) / len(each), min(each), max(each)

    @property
    def goodput(self) -> float:
        return self.per_device[0] * self.candidate.devices


class FleetSearch:
    """plan: what is searched."""

    def __init__(self, plan: SearchPlan, fleet: FleetPlan, load: LoadPlan, config: RouterConfig, run_all: RunAll) -> None:
        """Raises ConfigError for a trace that cannot be read."""
        self._plan, self._fleet, self._load, self._config, self._run_all = plan, fleet, load, config, run_all
        self.span = TraceSpan.of(load.trace) if load.trace else None

    def candidates(self) -> list[Candidate]:
        """Every division of the devices."""
        plan, fleet = self._plan, self._fleet
        return [
            Candidate(prefill=prefill, ranks=ranks, chunk_tokens=chunk, policy=policy, **{"decode": 0, "both": 0, role: rest})
            for ranks in plan.costs_of_ranks
            for prefill in range(plan.devices // ranks)
            for rest in [plan.devices // ranks - prefill]
            for role in (("decode", "both") if prefill else ("both",))
            for chunk in plan.chunks(fleet.chunk_tokens)
            for policy in plan.policies or (DEFAULT_POLICY,)
        ]

    def best(self) -> list[FoundPlan]:
        """The candidates of the last round, the best first."""
        plan, left = self._plan, self.candidates()
        near = {each: self.guess(each) for each in left}
        for shorter, precision, kept in ROUNDS:
            tasks = [self._task(each, plan.seconds / shorter, precision, near[each], in_haste=True) for each in left]
            borne = sorted(self._run_all(f"{len(left)} fleets", tasks), key=lambda each: -each.per_device)
            near |= {each.candidate: each.best.rate for each in borne if each.best is not None}
            left = [each.candidate for each in borne[: max(FEWEST_KEPT, math.ceil(len(borne) * kept))]]
        return sorted(self.measured(f"the best {len(left)}", left, near), key=lambda each: -each.per_device[0])

    def one_more(self, found: FoundPlan) -> list[FoundPlan]:
        """What one more instance of each role would bring."""
        each, near = found.candidate, found.goodput
        more = [
            replace_count(each, role, 1) for role in ("prefill", "decode", "both") if role == "prefill" or getattr(each, role)
        ]
        return self.measured("one more of each", more, dict.fromkeys(more, near))

    def measured(self, what: str, those: Sequence[Candidate], near: Mapping[Candidate, float]) -> list[FoundPlan]:
        """As in the last round: each candidate in each window."""
        plan = self._plan
        tasks = [
            self._task(each, plan.seconds, PRECISION, near[each], window) for each in those for window in range(plan.windows)
        ]
        bornes = list(self._run_all(what, tasks))
        return [FoundPlan(candidate=each, windows=tuple(borne for borne in bornes if borne.candidate == each)) for each in those]

    def _task(
        self, each: Candidate, seconds: float, precision: float, near: float, window: int = 0, *, in_haste: bool = False
    ) -> SearchTask:
        return SearchTask(
            fleet=self._fleet,
            load=self._load,
            config=self._config,
            span=self.span,
            candidate=each,
            cost=self._plan.costs_of_ranks.get(each.ranks, ""),
            attainment=self._plan.attainment,
            seconds=seconds,
            precision=precision,
            window=window,
            windows=self._plan.windows,
            near=near,
            in_haste=in_haste,
        )

    def guess(self, each: Candidate) -> float:
        """A rate that the candidate may bear: where its engines would be busy all the time, by their cost."""
        load, cost = self._load, self._plan.costs_of_ranks[each.ranks]
        first, later = (StepCost.parse(cost) if cost else self._fleet.cost(role) for role in ("prefill", "decode"))
        inputs, outputs = load.mean_input * load.turns, load.mean_output
        if self.span is not None:
            inputs, outputs = self.span.input_tokens, self.span.output_tokens
        prompt_s = first.seconds(inputs, 0)
        row_s = later.decode_row_s + later.step_s / self._fleet.max_running
        answer_s = outputs * row_s
        if not each.prefill or each.both:
            return (each.prefill + each.both) / (prompt_s + answer_s)
        return min(each.prefill / prompt_s, each.decode / answer_s)


def replace_count(each: Candidate, role: str, more: int) -> Candidate:
    return msgspec.structs.replace(each, **{role: getattr(each, role) + more})
