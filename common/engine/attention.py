"""Attention over KV pages for one step: writes the step's keys and values, then attends per chunk and for all decode rows.

Owns the use of the page tables. Knows rows and pages as tensors. Does not know models, sampling or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kv_memory import KVMemory
from common.engine.native import PagedAttentionKernel


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [begin, end) of the step are one chunk of a row: positions [start, start + end - begin). pages: [pages] int64."""

    begin: int
    end: int
    start: int
    pages: Tensor


class StepAttention:
    """Attention of one step over all layers; an `Attend` of the model.

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

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._memory.view(layer, value=False), self._memory.view(layer, value=True)
        keys[self._pages, :, self._slots] = key
        values[self._pages, :, self._slots] = value
        parts = [self._chunk(query[s.begin : s.end], keys, values, s) for s in self._segments]
        if len(query) > self._decode_begin:
            parts.append(self._decode(query[self._decode_begin :], keys, values))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunk(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment) -> Tensor:
        context = segment.start + segment.end - segment.begin
        return _attend(query, keys, values, segment.pages, context, segment.start, self._scale)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self._kernel is not None:
            return self._kernel(query, keys, values, self._decode_table, self._decode_lengths, self._scale)
        rows = []
        for row, length in enumerate(self._decode_lengths.tolist()):
            pages = self._decode_table[row, : -(-length // self._memory.layout.page_size)].long()
            rows.append(_attend(query[row : row + 1], keys, values, pages, length, length - 1, self._scale))
        return torch.cat(rows)


def _attend(query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, context: int, start: int, scale: float) -> Tensor:
    """Causal attention of query [tokens, heads, dim] at positions from `start` on over the first `context` slots of `pages`."""
    key, value = _gather(keys, pages, context), _gather(values, pages, context)
    positions = torch.arange(start, start + len(query), device=query.device)
    mask = None if len(query) == 1 else torch.arange(context, device=query.device)[None, :] <= positions[:, None]
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key[None], value[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _gather(view: Tensor, pages: Tensor, context: int) -> Tensor:
    """[pages, kv_heads, page_size, dim] strided → [kv_heads, context, dim]."""
    picked = view[pages].transpose(0, 1)
    return picked.reshape(picked.shape[0], -1, picked.shape[-1])[:, :context]
