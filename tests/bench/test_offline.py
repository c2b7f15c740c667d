"""`launch bench offline`: its sequences_of, its engine against one that computes each alone, and a quick run."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from bench.offline import OfflineFailed, OfflineSequence, sequences_of, serve
from bench.options import OfflineOptions
from common.errors import ConfigError
from common.executor import StepPlan, StepResult
from common.sampling_params import SamplingParams
from launch.main import main
from tests.engine.driver import Driver
from tests.engine.toy import ToyExecutor

GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


def test_the_defaults_are_the_workload_that_nano_vllm_publishes() -> None:
    """Its README names 133,966 tokens of answers for 256 sequences_of."""
    asked = sequences_of(OfflineOptions(), vocab_size=151_936)
    assert (len(asked), sum(each.answer_tokens for each in asked)) == (256, 133_966)
    assert {len(each.prompt) >= 100 and len(each.prompt) <= 1024 for each in asked} == {True}


def test_a_small_vocabulary_changes_no_length_and_a_seed_everything() -> None:
    few = OfflineOptions(num_prompts=5)
    large, small, other = (
        sequences_of(few, 10_001),
        sequences_of(few, 50),
        sequences_of(OfflineOptions(num_prompts=5, seed=1), 10_001),
    )
    for first, second in zip(large, small, strict=True):
        assert first.answer_tokens == second.answer_tokens and np.array_equal(first.prompt % 50, second.prompt)
    assert [len(each.prompt) for each in large] != [len(each.prompt) for each in other]


def test_sequences_that_share_an_engine_answer_as_each_would_alone_also_when_they_give_up_memory() -> None:
    """On an engine whose next token depends on every byte of its KV, with less memory than the answers need at once."""
    random = np.random.default_rng(3)
    asked = [OfflineSequence(random.integers(0, 1000, size).astype(np.int32), 24) for size in (1, 8, 9, 30, 17, 3, 25)]
    answers, figures = serve(ToyExecutor(20, 6), 16, threading.Event(), asked, 0.0)
    assert figures.preempted > 0 and figures.decode_rows > figures.steps
    for each, answer in zip(asked, answers, strict=True):
        alone = ToyExecutor(24, 1)

        def compute(plan: StepPlan, alone: ToyExecutor = alone) -> StepResult:
            result = alone.launch(plan).poll()
            assert result is not None
            return result

        assert [answer] == Driver(compute, alone.description).answers([each.prompt], each.answer_tokens, GREEDY)


def test_what_the_scheduler_refuses_ends_the_run_with_its_reason() -> None:
    with pytest.raises(OfflineFailed, match="too long"):
        serve(ToyExecutor(4, 2), 16, threading.Event(), [OfflineSequence(np.ones(100, dtype=np.int32), 9)], 0.0)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"repeat": 0}, "--repeat"),
        ({"temperature": -1.0}, "--temperature"),
        ({"prompt_tokens": "5"}, "--prompt-tokens"),
        ({"prompt_tokens": "0,5"}, "--prompt-tokens"),
        ({"answer_tokens": "9,5"}, "--answer-tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_its_flag(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        OfflineOptions(**flags)  # type: ignore[arg-type]


def test_a_quick_run_reports_what_it_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.child.prepare", lambda threads: None)  # this process has its environment
    figures = tmp_path / "figures.json"
    assert main(["bench", "offline", "--quick", "--repeat=2", "--device=cpu", f"--json={figures}"]) == 0
    outcome = json.loads(figures.read_text())
    assert outcome["command"].startswith("launch bench offline --quick --repeat=2") and outcome["model"] == "demo"
    asked = sequences_of(OfflineOptions(num_prompts=8, prompt_tokens="5,40", answer_tokens="5,20"), 1000)
    assert outcome["answer_tokens"] == sum(each.answer_tokens for each in asked)
    assert outcome["prompt_tokens"] == sum(len(each.prompt) for each in asked)
    fastest = min(run["seconds"] for run in outcome["runs"])
    assert len(outcome["runs"]) == 2
    assert outcome["output_tokens_per_s"]["most"] == pytest.approx(outcome["answer_tokens"] / fastest)
    assert outcome["total_tokens_per_s"]["most"] > outcome["output_tokens_per_s"]["most"]
    assert "output tokens/s" in capsys.readouterr().out
