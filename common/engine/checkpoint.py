"""Checkpoints: what a Hugging Face folder holds, checked, and its weights.

Owns the reading of config and safetensors. Does not know how a model computes. What is not supported is refused by name.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from common.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies (https://github.com/meta-llama/llama-models, apply_scaling)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything of a config that the computation depends on."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    norm_eps: float
    rope_base: float
    rope_scaling: RopeScaling | None
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    eos_token_ids: tuple[int, ...]

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "Qwen3ForCausalLM"


def read_shape(path: Path) -> ModelShape:
    """The shape of the checkpoint in a folder. Raises ConfigError naming what is missing or not supported."""
    config = _read_json(path / CONFIG)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"{path}: architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}")
    for field, neutral in (("quantization_config", None), ("use_sliding_window", False)):
        if config.get(field, neutral) not in (neutral, None):
            raise ConfigError(f"{path}: {field} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act {config['hidden_act']} is not supported; supported is silu")
    base, scaling = _read_rope(config, path)
    heads = config["num_attention_heads"]
    return ModelShape(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        context_tokens=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_base=base,
        rope_scaling=scaling,
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_read_eos(path, config),
    )


def fingerprint(path: Path) -> str:
    """A digest of config and weights' headers: equal for copies of one checkpoint, without reading every byte."""
    digest = hashlib.sha256((path / CONFIG).read_bytes())
    for file in weight_files(path):
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            digest.update(opened.read(min(header_bytes, 2**24)))
            opened.seek(-min(4096, file.stat().st_size), 2)
            digest.update(opened.read())
    return digest.hexdigest()[:32]


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises ConfigError."""
    if (path / INDEX).exists():
        names = sorted(set(_read_json(path / INDEX)["weight_map"].values()))
    else:
        names = [SINGLE]
    files = [path / name for name in names]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(f"{path}: {', '.join(missing)} is missing; Tandem reads safetensors checkpoints")
    return files


def read_weights(path: Path, dtype: torch.dtype, device: str, progress: Callable[[str], None]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by name, converted; file by file, memory-mapped."""
    files = weight_files(path)
    for number, file in enumerate(files):
        progress(f"loading weights: {file.name} ({number + 1} of {len(files)})")
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, opened.get_tensor(name).to(device=device, dtype=dtype)


def _read_rope(config: dict[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Older configs hold rope_theta and rope_scaling, newer ones rope_parameters with both."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise ConfigError(f"{path}: rope type {kind} is not supported; supported are default and llama3")
    scaling = RopeScaling(
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_context=parameters["original_max_position_embeddings"],
    )
    return base, scaling


def _read_eos(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    ids = _read_json(generation).get("eos_token_id") if generation.exists() else None
    ids = config.get("eos_token_id") if ids is None else ids
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return read
