"""Checkpoints: what a Hugging Face folder holds, checked, and its weights.

Owns the reading of config and safetensors. Does not know how a model computes. It refuses by name what is not supported.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from common.errors import ConfigError
from common.model_path import read_json

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION, TOKENIZER, TOKENIZER_CONFIG = "generation_config.json", "tokenizer.json", "tokenizer_config.json"
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "head_dim": 128,
        "num_key_value_heads": 32,
    },
}
"""The defaults of transformers for keys that a config lacks (LlamaConfig, Qwen3Config). Sizes of weights have no default here,
because transformers' own are those of one particular model: a config without them is refused."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies (https://github.com/meta-llama/llama-models, apply_scaling)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Every value of a config that the computation depends on."""

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
    config = read_json(path / CONFIG)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"{path}: architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}")
    for field, neutral in (("quantization_config", None), ("use_sliding_window", False)):
        if config.get(field, neutral) not in (neutral, None):
            raise ConfigError(f"{path}: {field} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act {config['hidden_act']} is not supported; supported is silu")
    base, scaling = _read_rope(config, path)
    config = {**_DEFAULTS[architecture], **config}
    hidden, heads = _whole(config, "hidden_size", path), _whole(config, "num_attention_heads", path)
    return ModelShape(
        architecture=architecture,
        vocab_size=_whole(config, "vocab_size", path),
        hidden=hidden,
        intermediate=_whole(config, "intermediate_size", path),
        layers=_whole(config, "num_hidden_layers", path),
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", path, null=heads),
        head_dim=_whole(config, "head_dim", path, null=hidden // heads),
        context_tokens=_whole(config, "max_position_embeddings", path),
        norm_eps=_number(config, "rms_norm_eps", path),
        rope_base=base,
        rope_scaling=scaling,
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_read_eos(path, config),
    )


def fingerprint(path: Path) -> str:
    """A digest of the config and the weight files' headers and ends. Equal for copies of one checkpoint; reads little."""
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
        names = sorted(set(read_json(path / INDEX)["weight_map"].values()))
    else:
        names = [SINGLE]
    files = [path / name for name in names]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; Tandem reads safetensors checkpoints")
    return files


def read_weights(path: Path, dtype: torch.dtype, device: str, progress: Callable[[str], None]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by name, converted; file by file, memory-mapped."""
    files = weight_files(path)
    for number, file in enumerate(files):
        progress(f"loading weights: {file.name} ({number + 1} of {len(files)})")
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                if name.endswith(".rotary_emb.inv_freq"):
                    continue  # a buffer that older versions of transformers saved; the config determines it
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
        factor=_number(parameters, "factor", path),
        low_freq_factor=_number(parameters, "low_freq_factor", path),
        high_freq_factor=_number(parameters, "high_freq_factor", path),
        original_context=_whole(parameters, "original_max_position_embeddings", path),
    )
    return base, scaling


def _read_eos(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: the generation config's (or else the model config's), and the tokenizer's.

    A fine-tuned model may end its turns with its own token (<|im_end|>) that only its tokenizer names.
    """
    named = read_json(path / GENERATION).get("eos_token_id") if (path / GENERATION).exists() else None
    named = config.get("eos_token_id") if named is None else named
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(token, int) for token in ids):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them; it is {named!r}")
    return tuple(dict.fromkeys([*ids, *_tokenizer_eos(path)]))


def _tokenizer_eos(path: Path) -> list[int]:
    """The id of the tokenizer's eos_token, if there is a tokenizer and it names a token that it has."""
    if not ((path / TOKENIZER).exists() and (path / TOKENIZER_CONFIG).exists()):
        return []
    named = read_json(path / TOKENIZER_CONFIG).get("eos_token")
    content = named.get("content") if isinstance(named, dict) else named  # older versions saved the token with its properties
    tokenizer = read_json(path / TOKENIZER)
    try:
        vocab = tokenizer["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [[piece, score], ...], the id is the place
            vocab = {piece: token for token, (piece, _) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
        found = added.get(content, vocab.get(content))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path / TOKENIZER} is not in the tokenizers library's format: {error!r}") from error
    return [] if found is None else [found]


def _number(config: dict[str, Any], name: str, path: Path, null: float | None = None) -> float:
    """A positive number of the config; `null` if the key is missing or null. Raises ConfigError that names the key."""
    value = config.get(name)
    value = null if value is None else value
    if value is None:
        raise ConfigError(f"{path / CONFIG}: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{path / CONFIG}: {name} must be a positive number; it is {value!r}")
    return value


def _whole(config: dict[str, Any], name: str, path: Path, null: int | None = None) -> int:
    value = _number(config, name, path, null)
    if value != int(value):
        raise ConfigError(f"{path / CONFIG}: {name} must be a whole number; it is {value!r}")
    return int(value)
