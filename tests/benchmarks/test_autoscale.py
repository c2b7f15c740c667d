"""The load of `python -m benchmarks.autoscale`, held against its own words, and a small comparison."""

import json
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.autoscale import ShiftBench, requests, run_layout, write_trace
from launch.fleet_options import ScalingConfig


def test_every_second_phase_has_half_of_the_prompts_and_twice_the_answers(tmp_path: Path) -> None:
    bench = ShiftBench(rate=20.0, phase_s=10.0, phases=3)
    write_trace(bench, path := tmp_path / "trace.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == pytest.approx(600, rel=0.2)
    for line, each in zip(lines, islice(requests(bench), len(lines)), strict=True):
        (turn,), is_shifted = each.turns, int(each.at_s // 10) == 1
        prompt, answer = max(2, turn.input_tokens), max(2, turn.output_tokens)
        assert line["input_length"] == (prompt // 2 if is_shifted else prompt)
        assert line["output_length"] == (2 * answer if is_shifted else answer)
        assert line["input_length"] <= 512 * len(line["hash_ids"])


@pytest.mark.soak
def test_a_fleet_that_begins_wrong_shapes_itself_and_every_request_is_answered(tmp_path: Path) -> None:
    """Prompts alone need more than the one prefill instance that half of the fleet is."""
    bench = ShiftBench(lengths="synthetic", rate=3.0, phase_s=40.0, phases=1, instances=3)
    write_trace(bench, path := tmp_path / "trace.jsonl")
    found = run_layout(bench, ScalingConfig(hold_s=2.0), path, None)
    fixed = run_layout(bench, ScalingConfig(), path, 1)
    assert found.flips >= 1 and found.good_per_s > 1.1 * fixed.good_per_s
