"""Which part of a model a rank has, and what is refused because it cannot be divided."""

from pathlib import Path
from typing import Any

import pytest

from common.config import Quantization
from common.errors import ConfigError
from engine.models.shape import check_ranks, read_served_shape, read_shape, share_of
from tests.engine.models.test_shape import config, write

MOE = "Qwen3MoeForCausalLM"
SIZES: dict[str, Any] = {"num_attention_heads": 24, "num_key_value_heads": 4, "intermediate_size": 96, "head_dim": 8}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 12, 24])
def test_ranks_have_everything_once_but_kv_heads_that_their_query_heads_share(tmp_path: Path, ranks: int) -> None:
    write(tmp_path, "config.json", config(MOE, **SIZES, num_experts=24, vocab_size=100))
    shape = read_shape(tmp_path)
    check_ranks(shape, ranks, "none")
    shares = [share_of(shape, rank, ranks) for rank in range(ranks)]
    for name, whole in (("heads", 24), ("intermediate", 96), ("experts", 24), ("vocabulary", 100)):
        assert [one for share in shares for one in getattr(share, name)] == list(range(whole))
    for share in shares:
        assert {head // 6 for head in share.heads} == set(share.kv_heads), "a query head finds its KV head"
        assert len(share.heads) % len(share.kv_heads) == 0
        assert len(share.vocabulary) <= share.vocabulary_rows == shares[0].vocabulary_rows
    assert sum(share.adds_biases for share in shares) == 1


@pytest.mark.parametrize(
    ("architecture", "changes", "ranks", "quantization", "reason"),
    [
        ("LlamaForCausalLM", {}, 5, "none", "it has 24 attention heads; what works is 1, 2, 4, 8, 12, 24"),
        ("LlamaForCausalLM", {}, 3, "none", "it has 4 KV heads; what works is 1, 2, 4, 8, 12, 24"),
        ("LlamaForCausalLM", {"intermediate_size": 100}, 8, "none", "its mlps are 100 wide; what works is 1, 2, 4"),
        (MOE, {"num_experts": 6}, 4, "none", "it has 6 experts; what works is 1, 2"),
        ("LlamaForCausalLM", {}, 4, "fp8", r"--quantization fp8 .* multiples of 16; what works is 1, 2"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers_that_work(
    tmp_path: Path, architecture: str, changes: dict[str, object], ranks: int, quantization: Quantization, reason: str
) -> None:
    write(tmp_path, "config.json", config(architecture, **SIZES | changes))
    with pytest.raises(ConfigError, match=rf"--tp {ranks} cannot divide this {architecture}: {reason}$"):
        check_ranks(read_served_shape(tmp_path), ranks, quantization)


def test_a_model_of_transformers_runs_on_one_rank_only(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    shape = read_served_shape(tmp_path)
    check_ranks(shape, 1, "none")
    with pytest.raises(ConfigError, match=r"--tp 2 is not supported for GPT2LMHeadModel, .* give --tp 1"):
        check_ranks(shape, 2, "none")
