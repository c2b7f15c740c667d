"""Prompts that one runner computes and another answers, with the KV pages moved between them: the answers are transformers'."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.executor import Chunk, RowStart, StepPlan
from engine.model_runner import ModelRunner
from tests.engine.checkpoints import VOCAB, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, saved
from tests.engine.exact import GREEDY, Answer, answers, assert_exact, recorded_logits, runner
from tests.engine.models.test_transformers_model import gemma2

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "mistral, window": lambda: mistral(sliding_window=20),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3, experts": qwen3_moe,
    "gemma 2, through transformers": gemma2,
}
TOKENS = 6


def pages_of(made: ModelRunner) -> np.ndarray:
    """The bytes of the pool, [pages, page_bytes] uint8; not a copy."""
    memory, page_bytes = made.description.memory, made.description.layout.page_bytes
    raw = memoryview((ctypes.c_uint8 * memory.region_bytes).from_address(memory.address))
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, page_bytes)


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_goes_on_from_pages_that_another_runner_computed(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    path = saved(model, tmp_path)
    assert_exact(model, handed_over(runner(path, kv_memory="2MiB"), runner(path, kv_memory="4MiB")))


def test_an_answer_over_bfloat16_pages_is_the_same_with_and_without_a_handoff(tmp_path: Path) -> None:
    path = saved(qwen3(), tmp_path)
    prefill, decode, both = (runner(path, kv_memory=memory, kv_dtype="bfloat16") for memory in ("2MiB", "4MiB", "4MiB"))
    assert prefill.description.layout == decode.description.layout
    given = handed_over(prefill, decode)
    for moved, whole in zip(given, answers(both, [each.prompt for each in given], TOKENS, 1000), strict=True):
        assert moved.tokens == whole.tokens
        torch.testing.assert_close(torch.stack(moved.logits), torch.stack(whole.logits), atol=1e-4, rtol=0)


def handed_over(prefill: ModelRunner, decode: ModelRunner) -> list[Answer]:
    """Greedy answers to prompts of a token, of about a page and of many, each from pages copied between the pools."""
    random = np.random.default_rng(2)
    given = [Answer(random.integers(3, VOCAB, length).astype(np.int32)) for length in (1, 16, 17, 130)]
    free = iter(random.permutation(decode.description.total_pages).astype(np.int32))
    starts = []
    with recorded_logits() as calls:
        for row, answer in enumerate(given):
            length, layout = len(answer.prompt), prefill.description.layout
            source = np.arange(layout.pages_for(length), dtype=np.int32)[::-1].copy()
            begin = RowStart(row, source, GREEDY)
            chunk = Chunk(row, 0, answer.prompt, last=True)
            answer.tokens += prefill.run(StepPlan(row, starts=(begin,), chunks=(chunk,))).tokens.tolist()
            answer.logits.append(calls[-1][0].clone())
            target = np.array([next(free) for _ in range(layout.pages_for(length + TOKENS))], dtype=np.int32)
            pages_of(decode)[target[: len(source)]] = pages_of(prefill)[source]
            starts.append(RowStart(row, target, GREEDY, length, last_token=answer.tokens[0]))
        rows = np.arange(len(given), dtype=np.int32)
        for step in range(TOKENS - 1):
            result = decode.run(StepPlan(step, starts=tuple(starts) if step == 0 else (), decode_rows=rows))
            for answer, token, logits in zip(given, result.tokens.tolist(), calls[-1], strict=True):
                answer.tokens.append(token)
                answer.logits.append(logits.clone())
    return given
