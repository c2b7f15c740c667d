"""The search for a fleet: which division of some devices serves the most good requests.

Owns the candidates, the rate that each can bear, and the rounds: all candidates in short runs, the best of them in longer ones
(successive halving). Runs simulations, in processes that its caller gives; prints nothing.

    rate ──► ×1.5 while requests keep the limits ──► halves between the last that kept them and the first that did not
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec
import numpy as np

from common.config import Dispatch, PolicyName, RouterConfig
from common.errors import ConfigError
from simulation.plan import FleetPlan, LoadPlan, SearchPlan
from simulation.report import Percentiles
from simulation.run import Simulation
from simulation.workload import read_trace

GROWTH = 1.5
MOST_RUNS = 12
HOPELESS = 1.5
"""So many times as many answers as may miss a limit: the rest does not matter."""
PRECISION = 0.03
ROUNDS = (4, 0.25), (2, 0.1)
"""How many times shorter the runs of each round before the last are, and how exact."""
KEPT, FEWEST_KEPT = 1 / 3, 3
"""What stays after each of them."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet that could be. Instances of both roles serve whole requests where that costs less than a pair; they are simulated
    as decode instances, so a fleet has either these or decode instances."""

    prefill: int
    decode: int = 0
    both: int = 0
    ranks: int = 1
    """How many each instance has."""
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


class FoundFleet(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate with what it bears in each window."""

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


@dataclass(frozen=True, slots=True)
class Trial:
    """What one process does at a time: find the rate that a candidate bears, within a share of `precision`."""

    candidate: Candidate
    seconds: float
    """The length of each run."""
    precision: float
    near: float
    """A rate to begin with."""
    window: int = 0
    in_haste: bool = False
    """Runs whose rate is plainly too high are not finished."""


RunAll: TypeAlias = Callable[[str, "FleetSearch", Sequence[Trial]], Iterator[Borne]]
"""Tries all, in any order. Told what for, for people."""


@dataclass(frozen=True)
class FleetSearch:
    """What is searched, and what is the same for all candidates. Raises ConfigError for a trace that cannot be read."""

    plan: SearchPlan
    fleet: FleetPlan
    load: LoadPlan
    config: RouterConfig
    lengths: tuple[float, float] = field(init=False)
    """Mean tokens of prompts and answers."""
    span: tuple[float, float] = field(init=False, default=(0.0, 0.0))
    """The seconds of the trace, and its requests a second."""

    def __post_init__(self) -> None:
        load, lengths = self.load, (self.load.mean_input * self.load.turns, self.load.mean_output)
        if load.trace:
            coming = list(read_trace(load.trace))
            if len(coming) < 2 or coming[-1].at_s == 0:
                raise ConfigError(f"--trace: {load.trace} must have two requests at least, at different times")
            lengths = np.mean([(each.turns[0].input_tokens, each.turns[0].output_tokens) for each in coming], axis=0).tolist()
            object.__setattr__(self, "span", (coming[-1].at_s, len(coming) / coming[-1].at_s))
        object.__setattr__(self, "lengths", tuple(lengths))

    # --- rounds ------------------------------------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """Every division of the devices."""
        plan = self.plan
        return [
            Candidate(prefill=prefill, ranks=ranks, chunk_tokens=chunk, policy=policy, **{role: plan.devices // ranks - prefill})
            for ranks in plan.costs_of_ranks
            for prefill in range(plan.devices // ranks)
            for role in (("decode", "both") if prefill else ("both",))
            for chunk in plan.chunks(self.fleet.chunk_tokens)
            for policy in plan.tried_policies
        ]

    def best(self, run_all: RunAll) -> list[FoundFleet]:
        """The candidates of the last round, the best first."""
        left = self.candidates()
        near = {each: self.guess(each) for each in left}
        for shorter, precision in ROUNDS:
            seconds = self.plan.seconds / shorter
            trials = [Trial(each, seconds, precision, near[each], in_haste=True) for each in left]
            borne = sorted(run_all(f"{len(left)} fleets", self, trials), key=lambda each: -each.per_device)
            near |= {each.candidate: each.best.rate for each in borne if each.best is not None}
            left = [each.candidate for each in borne[: max(FEWEST_KEPT, math.ceil(len(borne) * KEPT))]]
        return sorted(self._measured(f"the best {len(left)}", left, near, run_all), key=lambda each: -each.per_device[0])

    def one_more(self, found: FoundFleet, run_all: RunAll) -> list[FoundFleet]:
        """What one more instance of each role would bring."""
        each = found.candidate
        roles = [role for role in ("prefill", "decode", "both") if role == "prefill" or getattr(each, role)]
        more = [msgspec.structs.replace(each, **{role: getattr(each, role) + 1}) for role in roles]
        return self._measured("one more of each", more, dict.fromkeys(more, found.goodput), run_all)

    def _measured(
        self, what: str, those: Sequence[Candidate], near: Mapping[Candidate, float], run_all: RunAll
    ) -> list[FoundFleet]:
        """Each of them in each window."""
        windows = range(self.plan.windows)
        trials = [Trial(each, self.plan.seconds, PRECISION, near[each], window) for each in those for window in windows]
        borne = list(run_all(what, self, trials))
        return [FoundFleet(candidate=one, windows=tuple(each for each in borne if each.candidate == one)) for one in those]

    def guess(self, each: Candidate) -> float:
        """A rate that the candidate may bear: where its engines would be busy all the time, by their cost."""
        fleet, (inputs, outputs) = self.fleet_of(each), self.lengths
        prompt_s, later = fleet.cost("prefill").seconds(round(inputs), 0), fleet.cost("decode")
        row_s = later.decode_row_s + later.held_token_s * (inputs + outputs / 2)
        answer_s = outputs * (row_s + later.step_s / fleet.max_running)
        if not each.decode:
            return (each.prefill + each.both) / (prompt_s + answer_s)
        return min(each.prefill / prompt_s, each.decode / answer_s)

    # --- one candidate -----------------------------------------------------------------------------------------------------

    def bears(self, trial: Trial) -> Borne:
        runs: list[SearchRun] = []
        best: SearchRun | None = None
        high, rate = math.inf, trial.near
        while len(runs) < MOST_RUNS and (best is None or high / best.rate > 1 + trial.precision):
            run = self.run(trial, rate)
            runs.append(run)
            if run.attainment >= self.plan.attainment:
                best = run
                rate = rate * GROWTH if high == math.inf else math.sqrt(rate * high)
            else:
                high = rate
                rate = rate / GROWTH if best is None else math.sqrt(rate * best.rate)
        return Borne(candidate=trial.candidate, best=best, runs=tuple(runs))

    def run(self, trial: Trial, rate: float) -> SearchRun:
        """One simulation."""
        gc.collect()  # the parts of the one before refer to each other
        simulation = Simulation(self.fleet_of(trial.candidate), self.load_at(trial, rate), self.config_of(trial.candidate))
        expected = rate * trial.seconds

        def look(line: str) -> None:
            missed = simulation.measured.endings.total() - simulation.good
            if missed > HOPELESS * (1 - self.plan.attainment) * expected:
                simulation.stop()

        simulation.run(look if trial.in_haste else lambda line: None)
        measured, good = simulation.measured, simulation.good
        asked = max(1.0, measured.endings.total(), expected if simulation.stopped else 0.0)
        return SearchRun(
            rate=rate,
            attainment=good / asked,
            goodput=good / trial.seconds,
            first_token_s=Percentiles.of(measured.first_s),
            mean_between_tokens_s=Percentiles.of(measured.pace_s),
        )

    def fleet_of(self, each: Candidate) -> FleetPlan:
        """A candidate as it is simulated. Several ranks have as many pages and links together."""
        fleet, cost = self.fleet, self.plan.costs_of_ranks.get(each.ranks, "")
        return replace(
            fleet,
            prefill=each.prefill,
            decode=each.decode + each.both,
            chunk_tokens=each.chunk_tokens,
            kv_pages=fleet.kv_pages * each.ranks,
            link_gbit=fleet.link_gbit * each.ranks,
            skip_steps="on",
            step_cost=cost or fleet.step_cost,
            decode_step_cost="" if cost else fleet.decode_step_cost,
        )

    def config_of(self, each: Candidate) -> RouterConfig:
        dispatch: Dispatch = "auto" if each.decode else "conditional" if each.prefill else "colocated"
        return replace(self.config, dispatch=dispatch, prefill_policy=each.policy, decode_policy=each.policy)

    def load_at(self, trial: Trial, rate: float) -> LoadPlan:
        """Windows are parts of a trace, as far from each other as may be; without a trace they are seeds."""
        load, (seconds, natural), last = self.load, self.span, max(1, self.plan.windows - 1)
        if not load.trace:
            begins, requests = rate / load.turns, max(1, math.ceil(2 * rate * trial.seconds))
            return replace(load, rate=begins, requests=requests, duration_s=trial.seconds, seed=load.seed + trial.window)
        speed = rate / natural
        begin_s = max(0.0, seconds - trial.seconds * speed) * trial.window / last
        return replace(load, speed=speed, duration_s=trial.seconds, begin_s=begin_s)
