"""Steps with drafts in every kind of engine: the tokens and log probabilities of random schedules are those without a draft, and
greedy ones are transformers' own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.executor import Chunk, RowStart, StepPlan, StepResult
from common.ids import Digest
from common.step_cost import StepCost
from engine.cpu import attention
from engine.model_runner import ModelRunner
from engine.parallel import Group
from engine.timed import Pace, TimedExecutor
from tests.builders import HandClock, engine
from tests.engine import exact
from tests.engine.checkpoints import llama, mistral, mixtral, qwen3, saved
from tests.engine.churn import CONTEXT, KINDS, PAGES, Asked, Told, answer_without_drafts, asked_by, check
from tests.engine.exact import Answer, reference_logits
from tests.engine.lora_folders import Lora
from tests.engine.packed import CAN_RECORD, pack_everything
from tests.engine.ranks import least_of, on_ranks, runner_of
from tests.engine.test_graphs import Attend, Engine, flashinfer_attention, torch_attention
from tests.engine.test_lora import adapted


def check_greedy(model: PreTrainedModel, requests: Sequence[Asked]) -> None:
    for asked in requests:
        if asked.sampling == KINDS[0]:
            expected = reference_logits(model, Answer(asked.prompt, asked.expected))
            assert asked.expected == expected.argmax(-1).tolist()


def runner(path: Path, **changes: Any) -> ModelRunner:
    fields: dict[str, Any] = {
        "max_running": 12,
        "page_size": 7,
        "dtype": "float32",
        "context_tokens": CONTEXT,
        "kv_memory": "8MiB",
    }
    return exact.runner(path, **(fields | changes))


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, object]]] = {
    "qwen3, recorded": (qwen3, {}),
    "llama, layer by layer": (lambda: llama(attention_bias=True), {"graphs": "off"}),
    "a window": (lambda: mistral(sliding_window=20), {}),
    "experts, torch's attention": (mixtral, {"attention": "torch"}),
    "pages in bfloat16": (qwen3, {"kv_dtype": "bfloat16"}),
    "int8": (qwen3, {"quantization": "int8"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_random_schedules_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if CAN_RECORD:
        pack_everything(monkeypatch)
    make, changes = MODELS[name]
    model, is_exact = make(), not changes.keys() & {"kv_dtype", "quantization"}
    made, requests = runner(saved(model, tmp_path), **changes), asked_by(8, seed=6)
    told = answer_without_drafts(made.run, made.description, requests)
    for wrong in (0.0, 0.6) if not changes else (0.6,):
        check(made.run, made.description, requests, told, wrong, error=1e-4 if is_exact else 1e-2)
    if is_exact:
        check_greedy(model, requests)


@pytest.mark.skipif(not CAN_RECORD, reason="there is no C compiler")
@pytest.mark.parametrize(
    "changes", [{}, {"graphs": "off"}, {"kv_dtype": "bfloat16"}, {"quantization": "int8"}], ids=["", "layers", "bf16", "int8"]
)
def test_logits_behind_drafts_are_those_without_them_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """From 1 to 12 rows, over a context that is split."""
    pack_everything(monkeypatch)
    monkeypatch.setattr(attention, "SPLIT_SLOTS", 16)
    made, rows = runner(saved(qwen3(), tmp_path), **changes), np.zeros(1, dtype=np.int32)
    prompt, pages = np.arange(3, 73, dtype=np.int32), np.arange(13, dtype=np.int32)
    last = made.run(StepPlan(0, (RowStart(0, pages, KINDS[0]),), (Chunk(0, 0, prompt, last=True),))).tokens[0]
    start = RowStart(0, pages, KINDS[0], length=len(prompt), last_token=int(last))
    with exact.recorded_logits() as steps:
        alone, tokens = list[torch.Tensor](), list[int]()
        for step in range(12):
            tokens += made.run(StepPlan(step, (start,) if step == 0 else (), decode_rows=rows)).tokens.tolist()
            alone.append(steps[-1][0].clone())
        for drafts in range(1, 12):
            drafted = np.array(tokens[:drafts], dtype=np.int32)
            result = made.run(StepPlan(99, (start,), decode_rows=rows, draft_rows=rows.repeat(drafts), draft_tokens=drafted))
            assert torch.equal(steps[-1], torch.stack(alone[: drafts + 1]))
            assert result.drafted.tolist() == tokens[1 : drafts + 1]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Asked], Told]:
    """A checkpoint, and what it answers without graphs and drafts."""
    model = qwen3(head_dim=64)
    path, requests = saved(model, tmp_path_factory.mktemp("eager")), asked_by(8, 3)
    made = Engine(path)
    told = answer_without_drafts(made.run, made.description, requests)
    check_greedy(model, requests)
    return path, requests, told


@pytest.mark.parametrize(
    ("attend", "sizes"),
    [(torch_attention, ()), (torch_attention, (1, 2, 4, 8)), (flashinfer_attention, (8,))],
    ids=["eager", "graphs", "flashinfer"],
)
def test_random_schedules_in_graphs(eager: tuple[Path, list[Asked], Told], attend: Attend, sizes: tuple[int, ...]) -> None:
    path, requests, told = eager
    made = Engine(path, sizes, attend)
    check(made.run, made.description, requests, told, 0.4)
    assert set(made.replays) == set(sizes), "batches shrink and grow within the graphs"


def test_rows_with_adapters_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)
    made, digests = adapted(
        qwen3(), tmp_path, [Lora(1), Lora(2, rank=16)], max_running=12, page_size=8, context_tokens=CONTEXT, kv_memory="8MiB"
    )
    requests = asked_by(8, 5, [Digest(""), digests[0], digests[1]])
    check(made.run, made.description, requests, answer_without_drafts(made.run, made.description, requests), 0.4)


def test_two_ranks(tmp_path: Path) -> None:
    path, agree, requests = saved(qwen3(), tmp_path), least_of(2), asked_by(8, 7)
    alone = runner(path)
    told = answer_without_drafts(alone.run, alone.description, requests)

    def run(group: Group) -> None:
        made = runner_of(path, group, agree, max_running=12, page_size=8, context_tokens=CONTEXT)
        check(made.run, made.description, requests, told, 0.4)

    on_ranks(2, run)


def test_random_schedules_of_the_timed_executor_which_takes_drafts_for_rows() -> None:
    cost = StepCost(step_s=1.0, chunk_token_s=0.1, decode_row_s=0.01)
    timed = TimedExecutor(engine(PAGES, 12), Pace(cost, HandClock(1e9)), words=range(10, 17))
    requests = asked_by(12, 8)

    def run(plan: StepPlan) -> StepResult:
        return timed.launch(plan).result

    check(run, timed.description, requests, answer_without_drafts(run, timed.description, requests), 0.6)
    rows = np.arange(2, dtype=np.int32)
    first = timed.launch(StepPlan(1, decode_rows=rows))
    second = timed.launch(StepPlan(2, decode_rows=rows, draft_rows=rows.repeat(3), draft_tokens=rows.repeat(3)))
    assert second.ends_s - first.ends_s == pytest.approx(cost.seconds(0, 8))
