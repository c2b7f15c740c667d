"""The search for a fleet: the candidates, the rate that one bears, and the choice, held against trying everything."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import RouterConfig
from common.errors import ConfigError
from simulation.plan import FleetPlan, LoadPlan, SearchPlan
from simulation.report import Percentiles
from simulation.search import Borne, Candidate, FleetSearch, SearchRun, Trial

FLEET = FleetPlan(step_cost="0.010,0.0001,0.001", front="0,0,0,0", chunk_tokens=2048, max_running=32)
LOAD = LoadPlan(mean_input=1000, mean_output=20, slo_ttft_s=0.5, slo_itl_s=0.02)
ONE = Candidate(prefill=1, decode=1, both=0, chunk_tokens=2048, policy="least_loaded")


def search(plan: SearchPlan, load: LoadPlan = LOAD) -> FleetSearch:
    return FleetSearch(plan, FLEET, load, RouterConfig())


class SteepSearch(FleetSearch):
    """Every fleet keeps the limits up to a rate, and never beyond."""

    bears_rate = 0.0

    def run(self, trial: Trial, rate: float) -> SearchRun:
        share, times = 1.0 if rate <= self.bears_rate else 0.1, Percentiles.of([])
        return SearchRun(rate=rate, attainment=share, goodput=share * rate, first_token_s=times, mean_between_tokens_s=times)


def steep(rate: float) -> Borne:
    tried = SteepSearch(SearchPlan(devices=2), FLEET, LOAD, RouterConfig())
    object.__setattr__(tried, "bears_rate", rate)
    return tried.bears(Trial(ONE, seconds=8.0, precision=0.05, near=7.0))


@pytest.mark.parametrize("rate", [0.9, 7.0, 40.0])
def test_the_rate_that_a_fleet_bears_is_found_from_wherever_the_search_begins(rate: float) -> None:
    borne = steep(rate)
    assert borne.best is not None and rate / 1.06 <= borne.best.rate <= rate
    assert len(borne.runs) <= 12


def test_a_fleet_that_keeps_no_limit_bears_nothing_after_a_bounded_number_of_runs() -> None:
    borne = steep(0.0)
    assert borne.best is None and borne.per_device == 0.0 and len(borne.runs) == 12


def test_rounds_leave_the_best_and_the_last_has_every_window() -> None:
    """What a fleet bears is known beforehand: as many requests a second as it has prefill instances, and one more."""

    def run_all(what: str, search: FleetSearch, trials: Sequence[Trial]) -> Iterator[Borne]:
        sizes.append(len(trials))
        for trial in reversed(trials):
            rate = 1.0 + trial.candidate.prefill + 0.1 * trial.window
            times = Percentiles.of([])
            best = SearchRun(rate=rate, attainment=1.0, goodput=rate, first_token_s=times, mean_between_tokens_s=times)
            yield Borne(candidate=trial.candidate, best=best, runs=(best,))

    sizes: list[int] = []
    tried = search(SearchPlan(devices=6, windows=2, chunk_sizes="512,2048"))
    best, *_ = found = tried.best(run_all)
    assert sizes == [22, 8, 6], "all of them, a third of them, and three of these in two windows each"
    assert best.candidate.prefill == 5 and best.per_device == (6.05 / 6, 6.0 / 6, 6.1 / 6)
    assert [each.per_device[0] for each in found] == sorted((each.per_device[0] for each in found), reverse=True)
    one_more = [each.candidate.shown for each in tried.one_more(best, run_all)]
    assert one_more == (["6:1:0", "5:2:0"] if best.candidate.decode else ["6:0:1", "5:0:2"])


def test_every_division_of_the_devices_is_a_candidate_once() -> None:
    plan = SearchPlan(devices=4, rank_costs=("1=0.01,0.0001,0.001", "2=0.006,0.00006,0.0006"), chunk_sizes="512,2048")
    found = search(plan).candidates()
    assert len(set(found)) == len(found)
    assert all(each.devices == 4 and bool(each.decode) != bool(each.both) for each in found)
    roles = {(each.ranks, each.prefill, each.decode, each.both) for each in found}
    one = {(1, 0, 0, 4), (1, 1, 3, 0), (1, 1, 0, 3), (1, 2, 2, 0), (1, 2, 0, 2), (1, 3, 1, 0), (1, 3, 0, 1)}
    assert roles == one | {(2, 0, 0, 2), (2, 1, 1, 0), (2, 1, 0, 1)}
    assert len(found) == 2 * len(roles)


def test_a_candidate_of_two_ranks_has_their_costs_memory_and_links() -> None:
    plan = SearchPlan(devices=4, rank_costs=("2=0.006,0.00006,0.0006",))
    tried = search(plan)
    one = tried.candidates()[0]
    fleet = tried.fleet_of(one)
    assert (fleet.prefill, fleet.decode, tried.config_of(one).dispatch) == (0, 2, "colocated")
    assert (fleet.kv_pages, fleet.link_gbit) == (2 * FLEET.kv_pages, 2 * FLEET.link_gbit)
    assert fleet.cost("decode").step_s == 0.006


@pytest.mark.parametrize(("inputs", "outputs", "pace_s", "expected"), [(400, 4, 0.5, "2:1"), (5, 60, 0.14, "1:2")])
def test_long_prompts_get_more_prefill_instances_and_long_answers_more_decode_instances(
    inputs: int, outputs: int, pace_s: float, expected: str
) -> None:
    """Slow engines: a prompt of 400 tokens takes 0.5 s, so one prefill instance bears 2 requests a second, and two twice as many.
    Answers of 60 tokens keep 0.14 s a token only while four rows run, so one decode instance bears 0.5 requests a second."""
    load = LoadPlan(mean_input=inputs, mean_output=outputs, slo_ttft_s=3.0, slo_itl_s=pace_s, lengths="constant")
    fleet = replace(FLEET, step_cost="0.1,0.001,0.01")
    tried = FleetSearch(SearchPlan(devices=3, windows=1), fleet, load, RouterConfig())
    pairs = [each for each in tried.candidates() if each.decode]
    rate = 2.8 if outputs == 4 else 0.7
    runs = {each.shown: tried.run(Trial(each, 15.0, 0.2, rate), rate) for each in pairs}
    assert max(runs, key=lambda shown: runs[shown].attainment) == f"{expected}:0"
    assert runs[f"{expected}:0"].attainment > 0.9


def test_windows_are_parts_of_the_trace_and_rates_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * n, "input_length": 10 + n, "output_length": 2, "hash_ids": [n]} for n in range(101)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tried = search(SearchPlan(devices=2, windows=3), LoadPlan(trace=str(file)))
    assert (tried.span, tried.lengths) == ((100.0, 1.01), (60.0, 2.0))
    loads = [tried.load_at(Trial(ONE, 10.0, 0.1, 1.0, window), 2.02) for window in range(3)]
    assert [(each.speed, each.begin_s, each.duration_s) for each in loads] == [
        (2.0, 0.0, 10.0),
        (2.0, 40.0, 10.0),
        (2.0, 80.0, 10.0),
    ]


def test_a_trace_without_a_rate_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n')
    with pytest.raises(ConfigError, match="two requests"):
        search(SearchPlan(), LoadPlan(trace=str(file)))
