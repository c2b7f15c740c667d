"""The dense decoders against transformers' own models: the same greedy tokens in float32, and nearly the same logits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.engine.checkpoints import VOCAB, llama, mistral, qwen2, qwen3, saved
from tests.engine.exact import answers, assert_exact, runner

CONTEXT = 2048
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
    "qwen3, untied, windows by layer, biases": lambda: qwen3(
        tie_word_embeddings=False, use_sliding_window=True, sliding_window=33, layer_types=MIXED, attention_bias=True, **LONG
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_any_length_in_one_batch_get_the_answers_of_transformers(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    made = runner(saved(model, tmp_path))
    random = np.random.default_rng(7)
    prompts = [random.integers(3, VOCAB, length).astype(np.int32) for length in (1, 16, 51, 333, 2000)]
    assert_exact(model, answers(made, prompts, TOKENS, chunk_tokens=300))


def test_a_full_batch_gets_the_answers_of_transformers(tmp_path: Path) -> None:
    model = qwen3()
    made = runner(saved(model, tmp_path))
    random = np.random.default_rng(8)
    prompts = [random.integers(3, VOCAB, length).astype(np.int32) for length in random.integers(1, 70, made.description.max_rows)]
    assert_exact(model, answers(made, prompts, TOKENS, chunk_tokens=16))
