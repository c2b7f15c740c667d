"""The port of attention over KV pages: plan once per step, run once per layer.

Owns the vocabulary between the step and a backend, and no implementation: `paged` is the one of torch and of CPU. Knows rows and
pages as tensors; does not know models, sampling or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.ids import Int64Array


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
