"""The port of a decoder's small operations: norms, activation, and rotary embedding together with the write to the pages.

Owns no implementation: `torch_kernels` is the plain one and the reference. Knows tensors only.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary angles of a step's tokens (RoPE, Su et al. 2021). cos, sin: [tokens, rotary_dim / 2] float32.

    Element i of a head is paired with element i + rotary_dim / 2, as in Hugging Face checkpoints. What lies beyond rotary_dim is
    not rotated.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of each query and key head before the rotation (Qwen3). query, key: [head_dim]."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class PagePlaces:
    """Where the step's KV goes in one layer. keys, values: [pages, kv_heads, page_size, head_dim], strided over the pool.

    pages, slots: [tokens] int64.
    """

    keys: Tensor
    values: Tensor
    pages: Tensor
    slots: Tensor


class Kernels(Protocol):
    """Every method returns new tensors of its input's dtype, and norms in float32 inside, as checkpoints
    are trained."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Zhang and Sennrich 2019. x: [tokens, hidden]; weight: [hidden]. Returns the shape of x."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns (rms_norm(x + residual), x + residual). x, residual: [tokens, hidden]."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """SwiGLU (Shazeer 2020). gate_up: [tokens, 2 * width], the gate first. Returns silu(gate) * up, [tokens, width]."""

    def rotate_and_write(self, heads: Tensor, rotation: Rotation, norm: HeadNorm | None, places: PagePlaces) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values to their pages, in the pages' dtype.

        heads: [tokens, heads + 2 * kv_heads, head_dim], queries first, then keys, then values. Returns the queries,
        [tokens, heads, head_dim].
        """
