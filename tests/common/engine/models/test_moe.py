"""Mixtures of experts against transformers' own models: the same greedy tokens in float32, and nearly the same logits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from common.engine.models.decoder import Decoder
from tests.common.engine.checkpoints import VOCAB, mixtral, qwen3_moe, saved
from tests.common.engine.exact import answers, assert_exact, runner

CONTEXT = 2048

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: mixtral(max_position_embeddings=CONTEXT),
    "qwen3, weights as they are": lambda: qwen3_moe(norm_topk_prob=False),
    "qwen3, weights normalised, dense layers between": lambda: qwen3_moe(
        norm_topk_prob=True, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_gets_the_answers_of_transformers(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    made = runner(saved(model, tmp_path))
    random = np.random.default_rng(9)
    lengths = [2000 if name == "mixtral" else 300, *random.integers(1, 60, 31)]
    prompts = [random.integers(3, VOCAB, length).astype(np.int32) for length in lengths]
    assert_exact(model, answers(made, Decoder, prompts, 6, chunk_tokens=150))
