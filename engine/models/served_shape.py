"""The shape of the checkpoint that an instance serves: one that we read, or that of a model that only transformers knows.

Owns what is refused before the weights are loaded. Does not know how a model computes. Imports transformers only for a model
that it alone knows.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from common.errors import ConfigError, first_line
from common.model_path import CONFIG
from engine.models.shape import (
    DEFAULTS,
    ConfigValues,
    ServedShape,
    quantised_weights,
    read_architecture,
    read_eos,
    read_shape,
    unsupported,
)

FOREIGN = (
    ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError,
)  # fmt: skip
"""What transformers raises for a config or a model that it cannot read, load or run."""
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def read_transformers_shape(path: Path, architecture: str) -> ServedShape:
    """Raises ConfigError that names the architecture, unless transformers has it and lets others compute its attention."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig  # takes 2 s of CPU

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None
    except FOREIGN as error:
        raise refusal(architecture, f"transformers does not know it: {first_line(error)}") from error
    if model is None:
        raise refusal(architecture, "transformers has no causal language model for its config")
    if model.__name__ != architecture:
        raise refusal(architecture, f"by its model_type, {config.model_type}, transformers takes it for {model.__name__}")
    text = config.get_text_config(decoder=True)
    written = text.to_dict()
    values = ConfigValues(
        {**written, **{ours: written.get(theirs) for ours, theirs in text.attribute_map.items()}}, path / CONFIG
    )
    if config.is_encoder_decoder:
        raise refusal(architecture, "it has an encoder")
    quantised = config.to_dict().get("quantization_config", written.get("quantization_config"))
    if quantised is not None:
        raise refusal(architecture, quantised_weights(quantised.get("quant_method", "in a way that it does not name")))
    others = set(values.values.get("layer_types") or ()) - _LAYER_TYPES
    if others:
        raise refusal(architecture, f"it has layers of other kinds than attention over KV pages: {', '.join(sorted(others))}")
    if not model.is_backend_compatible():
        raise refusal(architecture, "its implementation in transformers does not let others compute its attention")
    heads, hidden = values.whole("num_attention_heads"), values.whole("hidden_size")
    return ServedShape(
        architecture=architecture,
        vocab_size=values.whole("vocab_size"),
        hidden=hidden,
        intermediate=values.whole("intermediate_size", null=4 * hidden),
        layers=values.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=values.whole("num_key_value_heads", null=heads),
        head_dim=values.whole("head_dim", null=hidden // heads),
        context_tokens=_context(values),
        eos_token_ids=read_eos(path, written),
    )


def refusal(architecture: str, reason: str) -> ConfigError:
    """reason: why transformers' implementation cannot serve it."""
    return ConfigError(f"{unsupported(architecture, DEFAULTS)}. Through transformers it cannot run either: {reason}")


def _context(values: ConfigValues) -> int:
    """max_position_embeddings. With `longrope`, only what lies before its scaling: transformers takes other frequencies for every
    position once one sequence is longer, and the keys in the pages would keep the former ones."""
    context = values.whole("max_position_embeddings")
    for rope in _ropes(values.values.get("rope_parameters")):
        if rope.get("rope_type") == "longrope":
            context = min(context, ConfigValues(rope, values.file).whole("original_max_position_embeddings", null=context))
    return context


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters of all layers, or those of each layer type."""
    if isinstance(parameters, Mapping):
        yield parameters
        for inner in parameters.values():
            yield from _ropes(inner)


def read_served_shape(path: Path) -> ServedShape:
    """The shape of the checkpoint in a folder, before its weights are read. Raises ConfigError if nothing can serve it."""
    architecture = read_architecture(path)
    if architecture in DEFAULTS:
        return read_shape(path)
    return read_transformers_shape(path, architecture)
