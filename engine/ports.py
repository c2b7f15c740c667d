"""The ports of the engine: the vocabulary between a step, its model, its attention, its kernels and its logits processors.

Owns no implementation: attention is in `torch_attention` and the rooms `cpu` and `gpu`, models are in `models`; kernels, which
all begin with what torch computes, are described in `torch_kernels`. Knows rows and pages as tensors; does not know requests,
threads or files. Attention plans once per step and runs once per layer. A model holds weights and the arithmetic on them;
attention and the pages are behind `StepAttention`, which it is given anew for each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import TandemError
from common.executor import RowStart
from common.ids import Int64Array


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


class Fp8Rows(NamedTuple):
    """Rows in FP8, each with a scale of its own: values * scales is nearly what they were."""

    values: Tensor
    """[rows, width] float8_e4m3fn."""
    scales: Tensor
    """[rows, 1] float32."""


class Routing(NamedTuple):
    """Which experts compute which tokens. The pairs of a token and an expert are sorted by expert, and those of one expert by
    token; those of experts that are elsewhere come last."""

    weights: Tensor
    """[tokens, chosen] float32: how much each expert counts for a token, the largest first."""
    tokens: Tensor
    """[pairs] int64: the token of each pair."""
    places: Tensor
    """[tokens, chosen] int64: which of the pairs is that of a token and its expert."""
    ends: Tensor
    """[experts here] int32: behind which pair those of each expert end."""
    is_whole: bool
    """All experts are here, and so behind the last end there is nothing."""


@dataclass(frozen=True, slots=True)
class LowRankStack:
    """What all adapters add to one linear layer: of the adapter in a slot, B A x (LoRA, Hu et al. 2021), its scaling in B.

    A merged layer has several parts, each with an A and a B of its own; a part's outputs end where the next one's begin.
    """

    a: Tensor
    """[slots, parts, rank, inputs]; zeros below an adapter's own rank, as in b."""
    b: Tensor
    """[slots, rank, outputs]."""
    ranks: Tensor
    """[slots] int64: the rank of each adapter, at most that of a and b."""
    ends: tuple[int, ...]
    """Where each part's outputs end; the last one is the number of outputs."""
    part_ends: Tensor
    """[parts] int64: the same on the device."""


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """Which tokens of a step an adapter computes: in tiles, each of up to ADAPTED_TILE tokens with the same adapter. Source:
    SGMV of Punica (Chen et al. 2023). All int64."""

    slots: Tensor
    """[tokens]: the slot of each token's adapter; -1: it has none."""
    order: Tensor
    """[at least as many as have one]: those with an adapter, one tile after the other. What no tile has may be anything."""
    begins: Tensor
    """[tiles]: where in `order` each begins, as is counts and tile_slots."""
    counts: Tensor
    """How many tokens each has; 0: it only fills the batch."""
    tile_slots: Tensor


ADAPTED_TILE = 16
"""The fewest rows that the matrix units of a GPU multiply at a time."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends. Layers that are equal in it share one plan.

    scale: of the scores. window: a token sees at most this many tokens, itself included; None: all. softcap: scores become
    softcap * tanh(score / softcap) (Gemma 2, 2024); None: they stay as they are.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [begin, end) of the step are one chunk of `row`, at positions [start, context)."""

    begin: int
    end: int
    start: int
    context: int
    row: int


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step: the chunks first, then one token for each decode row. All a backend needs to plan the step.

    table: [all rows, pages of a context] int32, the page ids of every row of the batch. decode_rows: [rows] int64.
    decode_lengths: [rows] int64, this step's token included. host_lengths: the same lengths on the host, so that nothing waits
    for the device.
    """

    chunks: Sequence[Segment]
    table: Tensor
    decode_rows: Tensor
    decode_lengths: Tensor
    host_lengths: Int64Array


class Attention(Protocol):
    """A backend. It holds one plan at a time."""

    def plan(self, step: StepTokens) -> None:
        """Compute what all layers of the step share. It replaces the former plan. Does not wait for the device."""

    def run(self, layer: int, query: Tensor) -> Tensor:
        """query: [tokens, heads, dim]; the layer's keys and values are in their pages already. Returns the shape of query."""

    def for_graph(self, rows: int) -> "Attention | None":
        """A backend for decode steps of exactly `rows` rows, whose `run` may be captured in a CUDA graph: whatever it is planned
        for later, it reads the same tensors and starts the same kernels. `plan` is called outside of the graph, before each
        replay, always with the same tensors `table` and `decode_rows`; `decode_lengths` is empty then. Rows that only fill the
        batch are the null row, whose length is 1. None: this backend cannot be captured.
        """


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

    @property
    def tapped(self) -> Sequence[Tensor]:
        """What a draft head reads of the last `hidden`: of some layers, [tokens, hidden] each; of most models nothing."""

    @property
    def logits_dtype(self) -> torch.dtype: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab]."""


class RowSampling(NamedTuple):
    """How each of some rows samples. A temperature below `torch_kernels.GREEDY_BELOW`, as 0, is greedy, whatever else is set.

    The filters are applied in the order top-k, top-p, min-p. Each keeps a first part of the tokens, in the order of falling
    logits and, where those are equal, of rising ids.
    """

    temperature: Tensor
    """[rows] float32, as are top_p and min_logit."""
    top_k: Tensor
    """[rows] int64, as are seed and position; 0 is all tokens."""
    top_p: Tensor
    """1 and more is all tokens."""
    min_logit: Tensor
    """The logarithm of min-p, at most 0: how far below the largest logit another may be, both divided by the temperature. Minus
    infinity is all tokens."""
    seed: Tensor
    position: Tensor
    """The position of the token that is sampled."""

    def of(self, which: Tensor) -> "RowSampling":
        """Those of rows [which]."""
        return RowSampling(*(each[which] for each in self))


ROW_FAULTS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, OverflowError)
"""What libraries raise at what one request has brought. It fails the row, with an error that says what raised it."""
DEVICE_FAULTS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Those of them that no request has brought: the step fails. Name them first."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """Some rows that sample, as the host and as the device name them. All [rows] int64, in the same order.

    host, device: the rows of the batch. host_at, at: which rows of the logits are theirs.
    """

    host: Int64Array
    device: Tensor
    host_at: Int64Array
    at: Tensor
    failed: dict[int, TandemError] = field(default_factory=dict)
    """Rows whose answers cannot go on, and why. What they sample counts for nothing; a processor adds to it in `apply`."""


class LogitsProcessor(Protocol):
    """All calls come from the engine's thread, in the order of the plans. Only `apply` may wait for the step before.

    What `start` and `apply` copy to the device goes through a `Staging` of the processor's own: the host waits for no copy.
    """

    def start(self, starts: Sequence[RowStart]) -> None:
        """Begin these rows anew: whatever was known of them is over."""

    @property
    def concerns(self) -> NDArray[np.bool_]:
        """[rows of the batch]: whether this processor may change the row's logits, or needs its tokens, in the next step. A row
        that it does not concern at its start it does not concern later."""

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        """Change in place those rows of the logits that are theirs, `rows.at`. logits: [any rows, vocab] float32, contiguous.
        rows: those that it concerns, no others."""

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        """The step has sampled these tokens. tokens: [rows] int64, on the device. rows: as given to `apply` just before."""
