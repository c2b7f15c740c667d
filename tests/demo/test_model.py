"""The shipped checkpoint: small, loadable, and right on held-out prompts."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from demo.evaluate import MODEL, by_transformers, measure


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_the_checkpoint_is_at_most_ten_megabytes() -> None:
    assert sum(path.stat().st_size for path in Path(MODEL).iterdir()) <= 10_000_000


def test_it_has_what_the_server_needs_to_show(model: PreTrainedModel) -> None:
    config = model.config
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.num_key_value_heads >= 2 and config.max_position_embeddings >= 2048
    assert 3_000_000 <= sum(p.numel() for p in model.parameters()) <= 5_000_000


@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    made = AutoTokenizer.from_pretrained(MODEL)
    ids = made.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert made.decode(ids, clean_up_tokenization_spaces=False) == text


def test_held_out_lists_are_looked_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    assert measure(by_transformers(model), tokenizer, "retrieval", 40, prompts=10).right >= 8
