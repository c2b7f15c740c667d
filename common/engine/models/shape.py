"""The shape of a model: what its config says of sizes, attention windows and rotary embedding, checked.

Owns the reading of config.json, with the defaults that transformers' config classes have. Does not know how a model computes or
what is in the weight files. What is missing, invalid or not supported is refused by name.

transformers' own config classes are not used: importing one takes 2 s of CPU at each start of an instance.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from common.engine.models.config_values import ConfigValues
from common.engine.models.end_of_sequence import read_eos
from common.engine.models.rope import Rope, context_of, read_rope
from common.errors import ConfigError
from common.model_path import CONFIG, read_model_config

_SUFFIX = "ForCausalLM"
_NEAR = 0.75
"""How like a supported name another must be to be of its family: Qwen2Moe is of Qwen3Moe's, Mamba not of Llama's."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts. layers: those that have experts. experts: in each of them. chosen: for each token. intermediate: the
    width of one expert. normalised: whether the weights of the chosen experts are scaled to a sum of 1."""

    layers: tuple[int, ...]
    experts: int
    chosen: int
    intermediate: int
    normalised: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Every value of a config that the computation depends on.

    context_tokens: the longest sequence that the model is for. windows: for each layer, the most tokens that a token sees, itself
    included; None: all.
    """

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
    rope: Rope
    windows: tuple[int | None, ...]
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    eos_token_ids: tuple[int, ...]
    experts: ExpertShape | None = None


_ALL = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_QWEN = {
    **_ALL, "max_position_embeddings": 32768, "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**_ALL, "attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {**_ALL, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
                           "layer_types": None},
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "MixtralForCausalLM": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8,
        "sliding_window": None,
    },
    "Qwen3MoeForCausalLM": {
        **_ALL, "max_position_embeddings": 32768, "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096,
        "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False,
    },
}  # fmt: skip
"""What transformers' config class of an architecture has for keys that a config may lack. Biases and windows are read only where
they are listed here: where they are not, transformers' model does not use them either. Sizes of weights are not listed, because
transformers' own are those of one particular model: a config without them is refused."""


def read_architecture(path: Path) -> str:
    """The class that a checkpoint's config names first. Raises ConfigError."""
    named = read_model_config(path).get("architectures")
    if not (isinstance(named, list) and named and isinstance(named[0], str)):
        raise ConfigError(f"{path / CONFIG}: architectures must name the model's class; it is {named!r}")
    return named[0]


def read_shape(path: Path) -> ModelShape:
    """The shape of the checkpoint in a folder. Raises ConfigError."""
    architecture, written = read_architecture(path), read_model_config(path)
    if architecture not in DEFAULTS:
        raise ConfigError(f"{path / CONFIG}: {unsupported(architecture, DEFAULTS)}")
    _refuse_what_is_not_supported(written, path)
    listed = DEFAULTS[architecture]
    config = ConfigValues({**listed, **written}, path / CONFIG)
    hidden, heads, layers = config.whole("hidden_size"), config.whole("num_attention_heads"), config.whole("num_hidden_layers")
    head_dim = config.whole("head_dim", null=hidden // heads)
    kv_heads = config.whole("num_key_value_heads", null=heads)
    for holds, rule in (
        (heads % kv_heads == 0, f"num_attention_heads, {heads}, must be a multiple of num_key_value_heads, {kv_heads}"),
        (head_dim % 2 == 0, f"head_dim must be even; it is {head_dim}"),
    ):
        if not holds:
            raise ConfigError(f"{config.file}: {rule}")
    rope = read_rope(config, head_dim)
    attention_bias = "attention_bias" in listed and config.flag("attention_bias")
    return ModelShape(
        architecture=architecture,
        vocab_size=config.whole("vocab_size"),
        hidden=hidden,
        intermediate=config.whole("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=context_of(rope),
        norm_eps=config.number("rms_norm_eps"),
        rope=rope,
        windows=_read_windows(config, listed, layers),
        qk_norm=architecture.startswith("Qwen3"),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias="mlp_bias" in listed and config.flag("mlp_bias"),
        tied=config.flag("tie_word_embeddings"),
        eos_token_ids=read_eos(path, written),
        experts=_read_experts(config, architecture, layers),
    )


def unsupported(architecture: str, supported: Iterable[str]) -> str:
    """Why an architecture is refused, with the supported one whose name is nearest."""
    families = {name.removesuffix(_SUFFIX): name for name in supported}
    nearest = get_close_matches(architecture.removesuffix(_SUFFIX), families, n=1, cutoff=_NEAR)
    return f"architecture {architecture} is not supported; " + (
        f"the nearest that is supported is {families[nearest[0]]}" if nearest else f"supported are {', '.join(supported)}"
    )


def quantised_weights(method: object) -> str:
    """Why a checkpoint of weights that were quantised by this method is refused."""
    return (
        f"its weights are quantised ({method}, by its quantization_config), which is not supported: give the checkpoint before "
        "quantisation, with --quantization if it is to take less memory"
    )


def _refuse_what_is_not_supported(written: Mapping[str, Any], path: Path) -> None:
    quantised = written.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ConfigError(f"{path / CONFIG}: {quantised_weights(method)}")
    if written.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path / CONFIG}: hidden_act {written['hidden_act']} is not supported; supported is silu")


def _read_experts(config: ConfigValues, architecture: str, layers: int) -> ExpertShape | None:
    """Mixtral has experts in every layer, as wide as intermediate_size; Qwen3-MoE in the layers that its config leaves."""
    if architecture not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    newer = config.values.get("num_local_experts") is not None  # transformers 5 writes Mixtral's name for Qwen3-MoE too
    experts, chosen = config.whole("num_local_experts" if newer else "num_experts"), config.whole("num_experts_per_tok")
    if chosen > experts:
        raise ConfigError(f"{config.file}: num_experts_per_tok is {chosen}, but there are {experts} experts")
    if architecture == "MixtralForCausalLM":
        return ExpertShape(tuple(range(layers)), experts, chosen, config.whole("intermediate_size"), normalised=True)
    step, dense = config.whole("decoder_sparse_step"), config.values["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ConfigError(f"{config.file}: mlp_only_layers must be a list of layers; it is {dense!r}")
    return ExpertShape(
        layers=tuple(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense),
        experts=experts,
        chosen=chosen,
        intermediate=config.whole("moe_intermediate_size"),
        normalised=config.flag("norm_topk_prob"),
    )


def _read_windows(config: ConfigValues, listed: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Llama has none, Mixtral one for all layers. Mistral and Qwen have one in the layers that `layer_types` names: transformers
    takes such a Mistral for its Ministral. Without it Mistral has one in all layers, Qwen in those after `max_window_layers`."""
    on = "sliding_window" in listed and config.values["sliding_window"] is not None
    on = on and ("use_sliding_window" not in listed or config.flag("use_sliding_window"))
    window = config.whole("sliding_window") if on else None
    if "layer_types" not in listed:
        return (window,) * layers
    kinds = config.values["layer_types"]
    if kinds is None and "max_window_layers" not in listed:
        return (window,) * layers
    if kinds is None:
        first = config.values["max_window_layers"]
        if not isinstance(first, int):
            raise ConfigError(f"{config.file}: max_window_layers must be a whole number; it is {first!r}")
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"full_attention": None} | ({} if window is None else {"sliding_attention": window})
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise ConfigError(
            f"{config.file}: layer_types must be {layers} times one of {', '.join(known)}; it is {kinds!r}"
            + ("" if window else " (sliding_attention needs use_sliding_window and sliding_window)")
        )
    return tuple(known[kind] for kind in kinds)
