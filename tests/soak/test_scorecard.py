"""The scorecard: its traces, and the errors that it takes from two sets of figures."""

from pathlib import Path

import pytest

from bench.options import WorkloadOptions
from bench.workloads import read_trace as read_for_real
from simulation.workload import read_trace as read_simulated
from tests.soak.scorecard import TRACES, PointFigures, ScorecardPoint, error_lines, goals_of, mean_error, write_trace


@pytest.mark.parametrize("kind", TRACES)
def test_a_trace_is_the_same_for_a_real_fleet_and_a_simulated_one(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file, TRACES[kind], 20.0, 10.0, seed=2)
    real = read_for_real(WorkloadOptions(dataset_name="trace", dataset_path=str(file)))
    simulated = list(read_simulated(str(file)))
    assert len(real) == pytest.approx(200, abs=60)
    assert [(each.timestamp / 1000, each.input_length, each.output_length) for each in real] == [
        (each.at_s, each.turns[0].input_tokens, each.turns[0].output_tokens) for each in simulated
    ]
    shared = sum(1 for each in real if each.hash_ids[0] < TRACES[kind].groups * TRACES[kind].shared_blocks)
    assert shared == (len(real) if TRACES[kind].shared_blocks else 0)


def figures(scale: float) -> PointFigures:
    return PointFigures.of([0.1 * scale] * 3, [0.01 * scale] * 5, [1.0 * scale] * 3, 4.0)


def test_errors_are_shares_of_the_real_figures_and_limits_hold_for_each_engine() -> None:
    good, poor = (
        ScorecardPoint(point=name, requests=3, real=figures(1.0), simulated=figures(scale))
        for name, scale in (("timed chat 1:1", 1.04), ("cpu chat 1:1", 0.7))
    )
    assert good.error("ttft_p50") == pytest.approx(0.04) and poor.error("e2e_p99") == pytest.approx(-0.3)
    assert mean_error([good, poor], ["itl_p50"]) == pytest.approx(0.17)
    assert good.error("goodput") == 0.0
    assert [goal.met for goal in goals_of([good, poor])] == [True, True, False, False]
    assert error_lines([good, poor])[-1][1] == "17.0%"
