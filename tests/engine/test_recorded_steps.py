"""Decode steps on CPU that are replayed as one call of C: they are those that Python computes layer by layer."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from common.errors import ConfigError
from common.executor import StepPlan, StepResult
from engine.model_runner import ModelRunner
from engine.models import linear as packing
from tests.engine.checkpoints import llama, mistral, mixtral, qwen2, qwen3, saved
from tests.engine.driver import Driver
from tests.engine.exact import recorded_logits, runner
from tests.engine.packed import CAN_RECORD, counted_replays, pack_everything
from tests.engine.test_graphs import EVERY_KIND, prompts

pytestmark = pytest.mark.skipif(not CAN_RECORD, reason="there is no C compiler")
ROWS = 6
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama, biases": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral, window": lambda: mistral(sliding_window=20),
    "qwen2": qwen2,
    "qwen3": qwen3,
}


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)


@pytest.fixture
def replays() -> Iterator[list[int]]:
    with counted_replays() as made:
        yield made


def made(path: Path, **changes: object) -> ModelRunner:
    fields: dict[str, object] = {"max_running": ROWS, "page_size": 8, "dtype": "float32"}
    return runner(path, lambda text: None, **(fields | changes))


@pytest.mark.parametrize(("name", "kv_dtype"), [*((name, "float32") for name in MODELS), ("mistral, window", "bfloat16")])
def test_logits_are_those_of_the_same_step_without_a_recording_bit_by_bit(
    tmp_path: Path, replays: list[int], name: str, kv_dtype: str
) -> None:
    path = saved(MODELS[name](), tmp_path)
    found = []
    for graphs in ("off", "on"):
        one = made(path, graphs=graphs, kv_dtype=kv_dtype)
        given = []
        for count in (1, 2, 3, ROWS):
            kinds = [EVERY_KIND[(row + count) % len(EVERY_KIND)] for row in range(count)]
            with recorded_logits() as steps:
                driver = Driver(partial(kept, one, steps), one.description, growing=True)
                answers = driver.answers(prompts(count), 12, kinds, chunk_tokens=20)
            given.append((answers, steps))
        found.append(given)
        assert (len(replays) > 20) == (graphs == "on")
    for (answers, steps), (eager_answers, eager_steps) in zip(found[1], found[0], strict=True):
        assert answers == eager_answers
        assert len(steps) == len(eager_steps) and all(map(torch.equal, steps, eager_steps))


def kept(one: ModelRunner, steps: list[torch.Tensor], plan: StepPlan) -> StepResult:
    """The logits of a replay last until the next one."""
    result = one.run(plan)
    if steps:
        steps[-1] = steps[-1].clone()
    return result


def test_whoever_lends_cores_is_asked_at_each_layer(tmp_path: Path, replays: list[int]) -> None:
    one = made(saved(qwen3(num_hidden_layers=3), tmp_path))
    asked: list[int] = []

    def said() -> None:
        asked.append(len(replays))
        torch.set_num_threads(1 + len(asked) % 2)

    before = torch.get_num_threads()
    try:
        Driver(lambda plan: one.steps.launch(plan, None, said).wait(), one.description).answers(prompts(2), 8, EVERY_KIND[:1] * 2)
    finally:
        torch.set_num_threads(before)
    assert len(replays) > 5 and all(asked.count(number) == 3 for number in range(1, len(replays)))


@pytest.mark.parametrize(
    ("ratios", "first"), [((0.5, 1.1, 1.2, 1.3, 1.5), 1), ((1.5, 0.5, 0.5, 0.5, 1.1), 3)], ids=["few rows", "many rows"]
)
def test_batches_for_which_torch_is_the_fastest_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratios: tuple[float, ...], first: int, replays: list[int]
) -> None:
    pack_everything(monkeypatch, dict(zip(packing.ROWS, ratios, strict=True)))
    said = list[str]()
    one = runner(saved(qwen3(), tmp_path), said.append, max_running=ROWS)
    sizes = [rows for rows, _ in one.steps._recordings]
    assert sizes and min(sizes) == first and len(sizes) < ROWS
    assert any(f"recorded decode steps of {first} to " in line and "others run layer by layer (torch" in line for line in said)
    for count in (1, ROWS):
        replays.clear()
        answers = Driver(one.run, one.description).answers(prompts(count), 8, EVERY_KIND[:count])
        assert bool(replays) == (count in sizes) and all(len(answer) == 8 for answer in answers)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"dtype": "bfloat16"}, "torch computes"), ({"attention": "torch"}, "torch computes")],
)
def test_what_torch_has_a_part_in_is_not_recorded_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], named: str, replays: list[int]
) -> None:
    monkeypatch.undo()
    path, said = saved(qwen3(), tmp_path), list[str]()
    with pytest.raises(ConfigError, match="--graphs on: decode steps cannot be recorded"):
        made(path, graphs="on", **changes)
    one = runner(path, said.append, max_running=2, **changes)
    Driver(one.run, one.description).answers(prompts(2), 5, EVERY_KIND[:2])
    assert replays == [] and any("decode steps are not recorded" in line and named in line for line in said)


def test_experts_are_not_recorded(tmp_path: Path, replays: list[int]) -> None:
    said = list[str]()
    one = runner(saved(mixtral(), tmp_path), said.append, max_running=2)
    Driver(one.run, one.description).answers(prompts(2), 5, EVERY_KIND[:2])
    assert replays == [] and any("decode steps are not recorded" in line for line in said)


def test_nothing_is_recorded_if_nobody_wants_it(tmp_path: Path, replays: list[int]) -> None:
    one = made(saved(qwen3(), tmp_path), graphs="off")
    Driver(one.run, one.description).answers(prompts(2), 5, EVERY_KIND[:2])
    assert replays == [] and not one.steps._recordings
