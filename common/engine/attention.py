"""Attention over KV pages for one step: writes the step's keys and values, then attends per chunk and for all decode rows.

Owns the use of the page tables. Knows rows and pages as tensors. Does not know models, sampling or requests.

Query heads are grouped by the KV head that they share, so keys and values are never repeated in memory:

    chunk     query [group, kv_heads, tokens, dim]   keys [group (stride 0), kv_heads, context, dim]
    decode    query [rows, kv_heads, group, dim]     keys [rows, kv_heads, context, dim]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kv_memory import KVMemory
from common.engine.native import PagedAttentionKernel

GATHER_BYTES = 256 * 2**20
"""Most keys and values that decode attention without a kernel gathers at once; one row may take more."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [begin, end) of the step are one chunk of a row: positions [start, start + end - begin). pages: [pages] int64."""

    begin: int
    end: int
    start: int
    pages: Tensor

    @property
    def context(self) -> int:
        """Tokens that the chunk's last token attends to."""
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True)
class _Rows:
    """Decode rows [begin, end) that are gathered at once. table: [rows, width] int64.

    beyond: [rows, 1, width * page_size, 1] bool, slots that are not the row's. mask: [rows, 1, 1, width * page_size], what is
    added to scores.
    """

    begin: int
    end: int
    table: Tensor
    beyond: Tensor
    mask: Tensor


class StepAttention:
    """Attention of one step over all layers; an `Attend` of the model. What the layers share is computed once, here.

    pages, slots: [tokens] int64, where each token's KV is written. segments: the chunks, first in the step. decode_table:
    [rows, pages] int32 and decode_lengths: [rows] int64 (this token included), for the rows after them.
    """

    def __init__(
        self,
        memory: KVMemory,
        kernel: PagedAttentionKernel | None,
        pages: Tensor,
        slots: Tensor,
        segments: Sequence[Segment],
        decode_table: Tensor,
        decode_lengths: Tensor,
    ) -> None:
        self._memory = memory
        self._kernel = kernel
        self._pages = pages
        self._slots = slots
        self._segments = segments
        self._decode_begin = segments[-1].end if segments else 0
        self._decode_table = decode_table
        self._decode_lengths = decode_lengths
        self._scale = memory.layout.head_dim**-0.5
        self._heads = torch.arange(memory.layout.kv_heads, device=pages.device)[:, None]
        self._masks = [_causal_mask(segment, memory.pool) for segment in segments]
        self._rows = self._divided() if kernel is None else []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._memory.view(layer, value=False), self._memory.view(layer, value=True)
        keys[self._pages, :, self._slots] = key
        values[self._pages, :, self._slots] = value
        parts = [
            self._chunk(query[segment.begin : segment.end], keys, values, segment, mask)
            for segment, mask in zip(self._segments, self._masks, strict=True)
        ]
        if len(query) > self._decode_begin:
            parts += self._decode(query[self._decode_begin :], keys, values)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunk(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, mask: Tensor | None) -> Tensor:
        """Causal attention of query [tokens, heads, dim] over the first `context` slots of the segment's pages."""
        tokens, heads, dim = query.shape
        grouped = query.view(tokens, self._memory.layout.kv_heads, -1, dim).permute(2, 1, 0, 3)
        key, value = (self._gathered(view, segment.pages)[:, : segment.context] for view in (keys, values))
        out = F.scaled_dot_product_attention(
            grouped,
            key.expand(len(grouped), -1, -1, -1),
            value.expand(len(grouped), -1, -1, -1),
            attn_mask=mask,
            is_causal=segment.start == 0 and tokens > 1,
            scale=self._scale,
        )
        return out.permute(2, 1, 0, 3).reshape(tokens, heads, dim)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """query: [rows, heads, dim]. Returns it in parts of rows."""
        if self._kernel is not None:
            return [self._kernel(query, keys, values, self._decode_table, self._decode_lengths, self._scale)]
        grouped = query.view(len(query), self._memory.layout.kv_heads, -1, query.shape[-1])
        parts = []
        for rows in self._rows:
            key, value = (self._gathered(view, rows.table).masked_fill_(rows.beyond, 0.0) for view in (keys, values))
            out = F.scaled_dot_product_attention(
                grouped[rows.begin : rows.end], key, value, attn_mask=rows.mask, scale=self._scale
            )
            parts.append(out.reshape(-1, *query.shape[1:]))
        return parts

    def _divided(self) -> list[_Rows]:
        """The decode rows in parts of which each gathers at most GATHER_BYTES per layer.

        Slots beyond a row's length hold what an earlier request left. Its scores are masked, and its bytes are zeroed as well: a
        NaN would pass through a mask.
        """
        layout = self._memory.layout
        count, width = self._decode_table.shape
        slots = torch.arange(width * layout.page_size, device=self._decode_table.device)
        row_bytes = 2 * layout.kv_heads * len(slots) * layout.slot_bytes
        step = max(1, GATHER_BYTES // row_bytes)
        parts = []
        for begin in range(0, count, step):
            end = min(count, begin + step)
            beyond = slots[None, :] >= self._decode_lengths[begin:end, None]
            mask = torch.zeros(beyond.shape, dtype=self._memory.pool.dtype, device=slots.device)
            mask.masked_fill_(beyond, -torch.inf)
            table = self._decode_table[begin:end].long()
            parts.append(_Rows(begin, end, table, beyond[:, None, :, None], mask[:, None, None, :]))
        return parts

    def _gathered(self, view: Tensor, pages: Tensor) -> Tensor:
        """One copy of view [all pages, kv_heads, page_size, dim] at pages [..., pages] → [..., kv_heads, context, dim]."""
        return view[pages[..., None, :], self._heads].flatten(-3, -2)


def _causal_mask(segment: Segment, pool: Tensor) -> Tensor | None:
    """[tokens, context] in the pool's dtype, added to scores; None where there is nothing to hide, or a whole triangle."""
    if segment.start == 0 or segment.end - segment.begin == 1:
        return None
    positions = torch.arange(segment.start, segment.context, device=pool.device)
    hidden = torch.arange(segment.context, device=pool.device)[None, :] > positions[:, None]
    return torch.zeros(hidden.shape, dtype=pool.dtype, device=pool.device).masked_fill_(hidden, -torch.inf)
