"""The shape of a checkpoint that an instance serves: what its config says of sizes, attention windows, rotary embedding and ends
of answers, checked; and which part of the model each of several ranks has.

Owns the reading of config.json, with the defaults that transformers' config classes have. What is missing, invalid or not
supported is refused by name. Does not know how a model computes or what is in the weight files. Imports neither torch nor
transformers, which would take 2 s of CPU at each start of an instance.

Source of the division among ranks: Shoeybi et al. 2019 (Megatron-LM): a layer whose outputs are divided feeds one whose inputs
are, and the outputs of that one are summed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from common.config import Quantization
from common.errors import ConfigError
from common.model_path import CONFIG, read_json, read_model_config
from common.pages.layout import heads_of

_WHOLE_END = 2**31
"""More than any size of a model; a product of two of them is still a size that torch takes."""


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """Every method raises ConfigError that names the file, the key and what is wrong with it."""

    values: Mapping[str, Any]
    file: Path

    def number(self, name: str, null: float | None = None) -> float:
        """A positive number; `null` if the key is missing or null."""
        value = self.values.get(name)
        value = null if value is None else value
        if value is None:
            raise ConfigError(f"{self.file}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{self.file}: {name} must be a positive number; it is {value!r}")
        return value

    def whole(self, name: str, null: int | None = None) -> int:
        """A positive whole number below 2**31; `null` if the key is missing or null."""
        value = self.number(name, null)
        if value != int(value) or value >= _WHOLE_END:
            raise ConfigError(f"{self.file}: {name} must be a whole number below {_WHOLE_END}; it is {value!r}")
        return int(value)

    def flag(self, name: str) -> bool:
        """False if the key is missing or null."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise ConfigError(f"{self.file}: {name} must be true or false; it is {value!r}")
        return bool(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise ConfigError(f"{self.file}: {name} must be a list of {count} positive numbers; it is {value!r}")
        return tuple(ConfigValues({name: one}, self.file).number(name) for one in value)


GENERATION, TOKENIZER, TOKENIZER_CONFIG = "generation_config.json", "tokenizer.json", "tokenizer_config.json"


def read_eos(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
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
    vocab, added = read_vocab(path)
    found = added.get(content, vocab.get(content)) if isinstance(content, str) else None
    return [] if found is None else [found]


def read_vocab(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The ids of a tokenizer's pieces, and of the tokens that were added to them, by their text. Raises ConfigError."""
    tokenizer = read_json(path / TOKENIZER)
    try:
        vocab = tokenizer["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [[piece, score], ...], the id is the place
            vocab = {piece: token for token, (piece, _) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
        return msgspec.convert(vocab, dict[str, int]), msgspec.convert(added, dict[str, int])
    except (AttributeError, KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path / TOKENIZER} is not in the tokenizers library's format: {error!r}") from error


_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""The kinds of scaling, and the numbers that each must have."""


@dataclass(frozen=True, slots=True)
class Rope:
    """What a config says of rotary embedding (RoPE, Su et al. 2021)."""

    kind: str
    """As transformers names it."""
    base: float
    trained_context: int
    """max_position_embeddings."""
    original_context: int
    """Before scaling, where the kind knows of it (yarn, longrope, llama3)."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The numbers of the scaling, with transformers' names."""


def read_rope(config: ConfigValues, head_dim: int) -> Rope:
    """Newer configs hold rope_parameters with everything; older ones rope_theta beside a rope_scaling, which wins."""
    written = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    if not isinstance(written, dict) or any(isinstance(value, dict) for value in written.values()):
        raise ConfigError(f"{config.file}: rope_parameters must be one object for all layers; it is {written!r}")
    outside = {name: config.values.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    scaling = ConfigValues({**outside, **written}, config.file)
    kind = scaling.values.get("rope_type") or scaling.values.get("type") or "default"
    if kind not in _SCALINGS:
        raise ConfigError(f"{config.file}: rope_type {kind} is not supported; supported are {', '.join(_SCALINGS)}")
    for name in _SCALINGS[kind]:
        scaling.number(name)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            scaling.numbers(name, head_dim // 2)
    if kind != "proportional" and scaling.number("partial_rotary_factor", null=1.0) != 1.0:
        raise ConfigError(f"{config.file}: partial_rotary_factor must be 1.0 with this architecture")
    trained = config.whole("max_position_embeddings")
    inside = scaling.whole("original_max_position_embeddings", null=trained)
    return Rope(
        kind=kind,
        base=scaling.number("rope_theta"),
        trained_context=trained,
        original_context=config.whole("original_max_position_embeddings", null=inside),
        parameters={name: value for name, value in scaling.values.items() if value is not None},
    )


def context_of(rope: Rope) -> int:
    """The longest sequence that a model is for, in tokens: max_position_embeddings.

    Two kinds reach further: `dynamic` takes that number as the length before scaling, and checkpoints often leave it there when
    they are given `yarn`.
    """
    if rope.kind == "dynamic":
        return int(rope.trained_context * rope.parameters["factor"])
    if rope.kind == "yarn":
        return max(rope.trained_context, int(rope.original_context * rope.parameters["factor"]))
    return rope.trained_context


_SUFFIX = "ForCausalLM"
_NEAR = 0.75
"""How like a supported name another must be to be of its family: Qwen2Moe is of Qwen3Moe's, Mamba not of Llama's."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts."""

    layers: tuple[int, ...]
    """Those that have experts."""
    experts: int
    """In each of these layers."""
    chosen: int
    """For each token."""
    intermediate: int
    """The width of one expert."""
    normalised: bool
    """Whether the weights of the chosen experts are scaled to a sum of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedShape:
    """What an instance must know of a model before its weights are loaded, whichever implementation computes it. Sizes of one
    layer are those of all."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    """The widest activation of an mlp."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    """The longest sequence that the model is for."""
    eos_token_ids: tuple[int, ...]
    """The tokens that end an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(ServedShape):
    """Every value of a config that the computation of one of our own models depends on."""

    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    """For each layer, the most tokens that a token sees, itself included; None: all."""
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
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


HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""The architectures of EAGLE-3 heads (Li et al. 2025)."""


def head_config(path: Path) -> str:
    """The architecture whose config the draft head in a folder has. Raises ConfigError for a checkpoint that is none."""
    architecture = read_architecture(path)
    if architecture not in HEADS:
        raise ConfigError(f"{path / CONFIG}: {architecture} is no EAGLE-3 head, which is {' or '.join(HEADS)}")
    return "LlamaForCausalLM"


def read_shape(path: Path, like: str = "") -> ModelShape:
    """The shape of the checkpoint in a folder. like: the architecture whose config it has; "": its own. Raises ConfigError."""
    architecture, written = like or read_architecture(path), read_model_config(path)
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


FP8_MULTIPLE = 16
"""Sizes of FP8 products are multiples of it."""


@dataclass(frozen=True, slots=True)
class Share:
    """What of the whole model a rank has."""

    heads: range
    """Query heads."""
    kv_heads: range
    intermediate: range
    """A part of the width of dense mlps."""
    experts: range
    vocabulary: range
    """The token ids whose rows it holds."""
    vocabulary_rows: int
    """How many rows its tensors have, the same on all ranks; the last ones may be padding."""
    adds_biases: bool
    """Whether the rank adds the bias of a layer whose outputs are summed: one does."""


def share_of(shape: ModelShape, rank: int, ranks: int) -> Share:
    """What `check_ranks` has not refused."""
    rows = -(-shape.vocab_size // ranks)
    begin = min(rank * rows, shape.vocab_size)
    return Share(
        heads=_part(shape.heads, rank, ranks),
        kv_heads=heads_of(rank, ranks, shape.kv_heads),
        intermediate=_part(shape.intermediate, rank, ranks),
        experts=_part(0 if shape.experts is None else shape.experts.experts, rank, ranks),
        vocabulary=range(begin, min(begin + rows, shape.vocab_size)),
        vocabulary_rows=rows,
        adds_biases=rank == 0,
    )


def check_ranks(shape: ServedShape, ranks: int, quantization: Quantization) -> None:
    """Raises ConfigError, with the numbers of ranks that work, unless so many ranks can have equal parts of the model."""
    if ranks == 1:
        return
    if not isinstance(shape, ModelShape):
        refuse_ranks(shape.architecture, ranks)
    obstacle = _obstacle(shape, ranks, quantization)
    if obstacle is not None:
        works = [str(number) for number in range(1, shape.heads + 1) if _obstacle(shape, number, quantization) is None]
        raise ConfigError(f"--tp {ranks} cannot divide this {shape.architecture}: {obstacle}; what works is {', '.join(works)}")


def check_quantization(architecture: str, shape: ModelShape | None, quantization: Quantization) -> None:
    """shape: None where transformers' implementation computes the model. Raises ConfigError."""
    if quantization != "none" and (shape is None or shape.experts is not None):
        raise ConfigError(
            f"--quantization {quantization} is not supported for {architecture}, only for Tandem's own decoders without experts: "
            "use none"
        )


def refuse_ranks(architecture: str, ranks: int) -> NoReturn:
    """Refuses ranks for a model that transformers' implementation computes. Raises ConfigError."""
    raise ConfigError(
        f"--tp {ranks} is not supported for {architecture}, which transformers' implementation computes: give --tp 1"
    )


def _obstacle(shape: ModelShape, ranks: int, quantization: Quantization) -> str | None:
    """Why so many ranks cannot have equal parts; None: they can."""
    if shape.heads % ranks:
        return f"it has {shape.heads} attention heads"
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        return f"it has {shape.kv_heads} KV heads"
    is_dense = shape.experts is None or len(shape.experts.layers) < shape.layers
    if is_dense and shape.intermediate % ranks:
        return f"its mlps are {shape.intermediate} wide"
    if shape.experts is not None and shape.experts.experts % ranks:
        return f"it has {shape.experts.experts} experts"
    if quantization == "fp8" and ranks > 1:
        widths = shape.heads // ranks * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate // ranks
        if any(width % FP8_MULTIPLE for width in widths):
            return f"--quantization fp8 needs parts of layers whose sizes are multiples of {FP8_MULTIPLE}"
    return None


def _part(whole: int, rank: int, ranks: int) -> range:
    return range(rank * whole // ranks, (rank + 1) * whole // ranks)
