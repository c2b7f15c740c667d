"""What a config says of rotary embedding (RoPE, Su et al. 2021), with every scaling that transformers knows.

Owns the reading of it, and how long a sequence it is for. Imports no torch. The angles are in `rotary.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
