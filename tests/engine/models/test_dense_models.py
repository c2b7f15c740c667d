"""The dense decoders against transformers' own models, and answers that begin on one runner and go on on another."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.executor import Chunk, RowStart, StepPlan
from engine.model_runner import ModelRunner
from tests.engine.checkpoints import VOCAB, llama, mistral, mixtral, prompts_of, qwen2, qwen3, qwen3_moe, saved
from tests.engine.exact import GREEDY, Answer, answers, assert_exact, recorded_logits, runner
from tests.engine.models.test_transformers_model import gemma2

CONTEXT = 1024
TOKENS = 8
LONG = {"max_position_embeddings": CONTEXT}
MIXED = ["full_attention", "sliding_attention", "full_attention"]

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(**LONG),
    "llama, biases": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **LONG),
    "mistral, no window": lambda: mistral(sliding_window=None, head_dim=32, **LONG),
    "mistral, window": lambda: mistral(**LONG),
    "qwen2": lambda: qwen2(**LONG),
    "qwen2, tied, windows above a layer": lambda: qwen2(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=50, max_window_layers=1, **LONG
    ),
    "qwen3, tied": lambda: qwen3(**LONG),
    "qwen3, untied, windows by layer, biases, one KV head": lambda: qwen3(
        tie_word_embeddings=False, use_sliding_window=True, sliding_window=33, layer_types=MIXED, num_hidden_layers=3,
        attention_bias=True, num_key_value_heads=1, **LONG,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "page_size"), list(zip(MODELS, (16, 8, 5) * 3, strict=False)))
def test_prompts_of_any_length_in_one_batch_get_the_answers_of_transformers(tmp_path: Path, name: str, page_size: int) -> None:
    """In chunks that end anywhere in a page."""
    model = MODELS[name]()
    made = runner(saved(model, tmp_path), page_size=page_size)
    assert_exact(model, answers(made, prompts_of(1, page_size, 51, 900), TOKENS, chunk_tokens=20 * page_size - 3))


def test_a_full_batch_gets_the_answers_of_transformers(tmp_path: Path) -> None:
    model = qwen3()
    made = runner(saved(model, tmp_path))
    lengths = np.random.default_rng(8).integers(1, 70, made.description.max_rows)
    assert_exact(model, answers(made, prompts_of(*lengths), TOKENS, chunk_tokens=16))


MOVED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "mistral, window": lambda: mistral(sliding_window=20),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3, experts": qwen3_moe,
    "gemma 2, through transformers": gemma2,
}


def pages_of(made: ModelRunner) -> np.ndarray:
    """The bytes of the pool, [pages, page_bytes] uint8; not a copy."""
    memory, page_bytes = made.description.memory, made.description.layout.page_bytes
    raw = memoryview((ctypes.c_uint8 * memory.region_bytes).from_address(memory.address))
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, page_bytes)


@pytest.mark.parametrize("name", MOVED)
def test_an_answer_goes_on_from_pages_that_another_runner_computed(tmp_path: Path, name: str) -> None:
    model = MOVED[name]()
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
