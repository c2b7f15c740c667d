"""`python -m benchmarks.adapters` on a CPU: what a quick run leaves, and that its steps are those of the adapters they name."""

import json
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.adapters import AdapterBench, random_adapters, run
from benchmarks.command import start
from benchmarks.engine_steps import NOTHING, checkpoint, sampling_plans
from common.config import EngineConfig
from common.errors import ConfigError
from common.ids import Digest
from engine.model_runner import ModelRunner
from launch import child


def test_a_quick_run_compares_steps_with_adapters_with_those_of_the_model_alone(tmp_path: Path) -> None:
    figures, flags = tmp_path / "figures.json", ["--quick", "--device=cpu", "--adapters=1,4"]
    with mock.patch.object(child, "prepare"):
        assert start("adapters", "", run, AdapterBench, EngineConfig, arguments=[*flags, f"--json={figures}"]) == 0
    steps = json.loads(figures.read_text())["steps"]
    assert [step["adapters"] for step in steps] == [0, 1, 4]
    assert steps[0]["ratio"]["median"] == 1 and all(step["ratio"]["least"] > 0 and step["step_ms"] > 0 for step in steps)


def test_the_rows_of_a_step_have_as_many_different_adapters_as_it_says() -> None:
    with checkpoint("tiny", EngineConfig(device="cpu", kv_memory="4MiB", max_running=4, max_loaded_loras=3)) as (model, engine):
        runner = ModelRunner(model, engine, lambda text: None)
    digests = [runner.adapters.hold(adapter) for adapter in random_adapters(runner, 3, 8)]
    first, *others = sampling_plans(runner, NOTHING, digests[:2])
    assert [start.adapter for start in first.starts] == [*digests[:2], *digests[:2]] and not any(each.starts for each in others)
    assert set(runner.adapters.take(digests)) == set(digests)
    assert not runner.run(first).failed
    assert [start.adapter for start in sampling_plans(runner, NOTHING)[0].starts] == [Digest("")] * 4


@pytest.mark.parametrize("flags", [{"adapters": "0,1"}, {"adapters": "9", "rows": 8}, {"models": "none"}, {"rank": 0}])
def test_what_cannot_be_measured_is_refused(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        AdapterBench(**flags)  # type: ignore[arg-type]
