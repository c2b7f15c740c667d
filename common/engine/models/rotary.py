"""Rotary embedding (RoPE, Su et al. 2021): the angles of each position, with every scaling that transformers knows.

Owns what a config says of it, and the choice of one set of frequencies for an instance. The formulas of scaling are transformers'
own; it is imported only for a model that scales. Does not know how queries and keys are rotated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.engine.kernels.port import Rotation
from common.engine.models.config_values import ConfigValues
from common.errors import ConfigError

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
    """What a config says of rotary embedding.

    kind: as transformers names it. trained_context: max_position_embeddings. original_context: before scaling, where the kind
    knows of it (yarn, longrope, llama3). parameters: of the scaling, with transformers' names.
    """

    kind: str
    base: float
    trained_context: int
    original_context: int
    parameters: Mapping[str, Any] = field(default_factory=dict)


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


class Rotary:
    """The rotary angles of an instance.

    context_tokens: the longest sequence that the instance was asked for. In transformers, two kinds of scaling depend on the
    length of a sequence so far. Here keys stay in their pages as the sequence grows, so one choice holds for an instance.
    `longrope` takes the long factors if the limit is above `original_max_position_embeddings`, and else the short ones. `dynamic`
    takes the frequencies of a sequence as long as the limit; up to `max_position_embeddings` they are the unscaled ones. With
    --context-tokens up to these two numbers, answers are those of transformers.

    Raises ConfigError for parameters of which no frequencies can be made.
    """

    def __init__(self, rope: Rope, head_dim: int, context_tokens: int, device: torch.device) -> None:
        if rope.kind == "default":
            frequencies, self._factor = _frequencies(rope.base, head_dim), 1.0
        else:
            frequencies, self._factor = _scaled(rope, head_dim, context_tokens)
        self._frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor) -> Rotation:
        """positions: [tokens] int64. The attention factor of yarn and longrope multiplies both."""
        angles = positions[:, None].float() * self._frequencies[None, :]
        return Rotation(angles.cos() * self._factor, angles.sin() * self._factor)


def _frequencies(base: float, head_dim: int) -> Tensor:
    """[head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (base**exponents)


def _scaled(rope: Rope, head_dim: int, context_tokens: int) -> tuple[Tensor, float]:
    """Frequencies, [head_dim / 2] float32, and the attention factor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = _RopeConfig(rope, head_dim)
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"), seq_len=context_tokens)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"rope_parameters {dict(rope.parameters)} cannot be used: {error!r}") from error
    return frequencies.float(), float(factor)


class _RopeConfig:
    """As much of a transformers config as its functions of scaling read."""

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.head_dim = self.hidden_size = head_dim
        self.num_attention_heads = 1
        self.max_position_embeddings = rope.trained_context
        self.rope_parameters = {
            **rope.parameters,
            "rope_type": rope.kind,
            "rope_theta": rope.base,
            "original_max_position_embeddings": rope.original_context,
        }

    def standardize_rope_params(self) -> None:
        """They are."""
