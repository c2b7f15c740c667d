"""Rotary embedding (RoPE, Su et al. 2021): the angles of each position, with every scaling that transformers knows.

Owns the choice of one set of frequencies for an instance. The formulas of scaling are transformers' own; it is imported only for
a model that scales. Does not know how a config spells them (`rope.py`), or how angles are computed and queries and keys rotated.
"""

import torch
from torch import Tensor

from common.engine.kernels.port import Kernels, Rotation
from common.engine.models.rope import Rope
from common.errors import ConfigError


class Rotary:
    """The rotary angles of an instance.

    context_tokens: the longest sequence that the instance was asked for. In transformers, two kinds of scaling depend on the
    length of a sequence so far. Here keys stay in their pages as the sequence grows, so one choice holds for an instance.
    `longrope` takes the long factors if the limit is above `original_max_position_embeddings`, and else the short ones. `dynamic`
    takes the frequencies of a sequence as long as the limit; up to `max_position_embeddings` they are the unscaled ones. With
    --context-tokens up to these two numbers, answers are those of transformers.

    Raises ConfigError for parameters of which no frequencies can be made.
    """

    def __init__(self, rope: Rope, head_dim: int, context_tokens: int, device: torch.device, kernels: Kernels) -> None:
        if rope.kind == "default":
            frequencies, self._factor = _frequencies(rope.base, head_dim), 1.0
        else:
            frequencies, self._factor = _scaled(rope, head_dim, context_tokens)
        self._frequencies = frequencies.to(device)
        self._kernels = kernels

    def __call__(self, positions: Tensor) -> Rotation:
        """positions: [tokens] int64. The attention factor of yarn and longrope multiplies both."""
        return self._kernels.rotation(positions, self._frequencies, self._factor)


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
