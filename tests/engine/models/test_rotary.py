"""The rotary angles against those of transformers' own module, for every kind of scaling."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common.errors import ConfigError
from engine.models.decoder import rotary_frequencies
from engine.models.shape import read_shape
from engine.ports import Rotation
from engine.torch_kernels import Kernels
from tests.engine.checkpoints import llama, prompts_of, saved
from tests.engine.exact import answers, assert_exact, runner

TRAINED = 128
ORIGINAL = {"original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, **ORIGINAL},
    "yarn, all of it": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 20, "beta_slow": 2, "mscale": 1.5, "mscale_all_dim": 0.8,
                        "truncate": False, **ORIGINAL},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.7},
    "longrope": {**FACTORS, **ORIGINAL},
    "longrope, attention factor": {"rope_type": "longrope", **FACTORS, **ORIGINAL, "attention_factor": 1.3},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "llama3, no original": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip


def config(scaling: dict[str, Any], **changes: object) -> dict[str, Any]:
    return {
        "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
        "max_position_embeddings": TRAINED, "rope_theta": 5000.0, "rope_scaling": scaling, **changes,
    }  # fmt: skip


def made(folder: Path, written: dict[str, Any], context_tokens: int) -> Callable[[Tensor], Rotation]:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **written}))
    shape = read_shape(folder)
    frequencies, factor = rotary_frequencies(shape.rope, shape.head_dim, context_tokens)
    return partial(Kernels().rotation, frequencies=frequencies, factor=factor)


@pytest.mark.parametrize("length", [50, TRAINED, 500])
@pytest.mark.parametrize("name", SCALINGS)
def test_an_instance_has_the_angles_of_a_sequence_as_long_as_its_context(tmp_path: Path, name: str, length: int) -> None:
    written = config({"rope_type": name, **SCALINGS[name]})
    positions = torch.arange(length)
    rotation = made(tmp_path, written, length)(positions)
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**written))(torch.zeros(1), positions[None])
    half = rotation.cos.shape[1]
    torch.testing.assert_close(rotation.cos, cos[0, :, :half])
    torch.testing.assert_close(rotation.sin, sin[0, :, :half])


def test_every_scaling_that_transformers_knows_is_tested() -> None:
    assert {SCALINGS[name].get("rope_type", name) for name in SCALINGS} == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "rope_theta": None,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": 700.0, "rope_type": "linear", "factor": 2.0},
        },
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_theta": 700.0, "rope_type": "linear", "factor": 4.0},
        },
        {"rope_scaling": None},
        {"original_max_position_embeddings": 32, "rope_scaling": {"rope_type": "longrope", **FACTORS, **ORIGINAL}},
    ],
    ids=["new names", "old names", "both names", "base only", "original context outside"],
)
def test_old_and_new_ways_to_write_a_scaling_are_read_as_transformers_reads_them(tmp_path: Path, changes: dict[str, Any]) -> None:
    written = {name: value for name, value in (config({}) | changes).items() if value is not None}
    positions = torch.arange(40)
    rotation = made(tmp_path, written, 40)(positions)
    cos, _ = LlamaRotaryEmbedding(LlamaConfig(**written))(torch.zeros(1), positions[None])
    torch.testing.assert_close(rotation.cos, cos[0, :, :8])


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "default"}, TRAINED),
        ({"rope_type": "linear", "factor": 4.0}, TRAINED),
        ({"rope_type": "dynamic", "factor": 4.0}, 4 * TRAINED),
        ({"rope_type": "yarn", "factor": 4.0}, 4 * TRAINED),
        ({"rope_type": "yarn", "factor": 2.0, **ORIGINAL}, TRAINED),
    ],
)
def test_the_context_is_what_the_model_is_for(tmp_path: Path, scaling: dict[str, Any], context: int) -> None:
    made(tmp_path, config(scaling), 1)
    assert read_shape(tmp_path).context_tokens == context


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"rope_type": "mrope"}, "rope_type mrope is not supported; supported are default, linear"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "yarn", "factor": "8"}, "factor must be a positive number"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "long_factor must be a list of 8 positive numbers; it is None"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 7}, "short_factor must be a list of 8 positive numbers"),
        ({"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 1.5}, "must be a whole number"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        ({"full_attention": {"rope_type": "default"}}, "one object for all layers"),
        ({"rope_type": "yarn", "factor": 8.0, "beta_fast": "fast"}, "rope_parameters .* cannot be used: TypeError"),
    ],
)
def test_a_scaling_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, scaling: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        made(tmp_path, config(scaling), 100)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 0),
        ({"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 0),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}, 0),
        ({"rope_type": "longrope", **FACTORS, **ORIGINAL}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, 0),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else None,
)
def test_a_model_with_scaled_positions_gets_the_answers_of_transformers(
    tmp_path: Path, scaling: dict[str, Any], context: int
) -> None:
    """longrope and dynamic: with a context limit up to which transformers does not change its mind."""
    model = llama(head_dim=16, max_position_embeddings=256, rope_parameters={"rope_theta": 10_000.0, **scaling})
    runs = runner(saved(model, tmp_path), context_tokens=context)
    assert_exact(model, answers(runs, prompts_of(1, 33, (context or 256) - 8), 8, chunk_tokens=30))
