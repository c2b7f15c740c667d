"""The port of a model: token ids in, hidden states and logits out.

Owns the vocabulary between a step and a model. A model holds weights and the arithmetic on them. Attention and the KV pages are
behind `StepAttention`, which it is given anew for each step; it knows nothing of rows, pages or requests.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.attention.port import LayerAttention
from engine.kernels.port import HeadNorm, Rotation


class StepAttention(Protocol):
    """The attention of one step, over the KV pages. Both methods write the layer's keys and values to their pages first, and
    return [tokens, heads, head_dim]. Call one of them once for each layer, in the order of the layers."""

    def rotate_and_attend(self, layer: int, heads: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """heads: [tokens, heads + 2 * kv_heads, head_dim], queries first, then keys, then values; not yet normed or rotated."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim]; all that precedes attention is done."""


class Model(Protocol):
    """A loaded model. `hidden` and `logits` start the same kernels on the same storage for every step of one size, and wait for
    nothing, if `capturable` is true: then decode steps may be captured in CUDA graphs."""

    @property
    def attention(self) -> Sequence[LayerAttention]:
        """How each layer attends."""

    @property
    def capturable(self) -> bool: ...

    @property
    def spared_bytes(self) -> int:
        """What its weights may take of the host's memory and do not. Pages leave it free: whether weights take it depends on a
        measurement, and instances of a fleet must have pools for equal contexts."""

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, wanted: Tensor | None = None) -> Tensor:
        """token_ids, positions: [tokens] int64. wanted: [count] int64, the tokens whose hidden states are of use; None: all.
        Returns theirs, [count, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
