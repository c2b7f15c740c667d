"""The port of the engine's small operations: norms, activation, rotary embedding together with the write to the pages, sampling
without filters, and the lists of pages that attention reads.

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
    """Every method returns new tensors, of its input's dtype where nothing else is said. Norms are in float32 inside, as
    checkpoints are trained. No method waits for the device, and what a call starts there depends on shapes alone."""

    def decode_inputs(
        self, rows: Tensor, last_token: Tensor, length: Tensor, table: Tensor, page_size: int, null: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What some rows decode next, and where its KV goes: (token_ids, positions, pages, slots), all [n] int64. Their lengths
        grow by one, but for that of row `null`.

        rows: [n] int64, each once, but for `null`. last_token, length: [all rows] int64. table: [all rows, width] int32.
        """

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids: [tokens] int64, each a row of table; with others it raises, or reads nothing. table: [rows, hidden]. Returns
        [tokens, hidden]."""

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        """Of the angles position * frequency. positions: [tokens] int64. frequencies: [rotary_dim / 2] float32. factor:
        multiplies cos and sin."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Zhang and Sennrich 2019. x: [tokens, hidden]; weight: [hidden]. Returns the shape of x."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns (rms_norm(x + residual), x + residual). x, residual: [tokens, hidden]."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """SwiGLU (Shazeer 2020). gate_up: [tokens, 2 * width], the gate first. Returns silu(gate) * up, [tokens, width]."""

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row in FP8 with a scale of its own, as large as it may be. x: [rows, width].

        Returns [rows, width] float8_e4m3fn and [rows, 1] float32; their product is nearly x.
        """

    def quantise_int8(self, x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
        """Each row in whole numbers from -largest to largest with a scale of its own. x: [rows, width]. largest: at most 127.

        Returns [rows, width] uint8, which are the numbers plus largest + 1, and [rows, 1] float32, the scales.
        """

    def rotate_and_write(self, heads: Tensor, rotation: Rotation, norm: HeadNorm | None, places: PagePlaces) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values to their pages, in the pages' dtype.

        heads: [tokens, heads + 2 * kv_heads, head_dim], queries first, then keys, then values. Returns the queries,
        [tokens, heads, head_dim].
        """

    def sample(self, logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        """One token per row: the largest of (logits - the row's maximum) / temperature + `noise.gumbel`; the largest logit if the
        temperature is below `noise.GREEDY_BELOW`. Of equal ones the first.

        logits: [rows, vocab] float32; minus infinity excludes a token. temperature: [rows] float32. seed, position: [rows] int64.
        Returns [rows] int64. A row with NaN gets some token of the vocabulary.
        """

    def likeliest(self, logits: Tensor) -> Tensor:
        """The token of each row that has the largest logit, of equal ones the first: as `sample` with temperatures of 0.
        logits: [rows, vocab] float32. Returns [rows] int64. A row with NaN gets some token of the vocabulary.
        """

    def page_indices(self, table: Tensor, rows: Tensor, indptr: Tensor, out: Tensor) -> None:
        """The pages of some rows, one row after the other: out[indptr[i] : indptr[i + 1]] = the first of table[rows[i]].

        table: [all rows, width] int32. rows: [n] int64. indptr: [n + 1] int32, rising from 0; no difference is above width.
        out: [at least indptr[n]] int32, contiguous; what lies beyond stays as it is.
        """
