"""Attention over KV pages for one step: writes the step's keys and values, then attends per chunk and for all decode rows.

Owns the use of the page tables. Knows rows and pages as tensors. Does not know models, sampling or requests.

The query heads that share a KV head are laid beside each other as its tokens, so keys and values are repeated nowhere, neither in
memory nor as a view with a stride of 0 (which CUDA's kernels have not always read right, pytorch issues 175764 and 191937):

    chunk     query [1, kv_heads, group * tokens, dim]    keys [1, kv_heads, context, dim]
    decode    query [rows, kv_heads, group, dim]          keys [rows, kv_heads, context, dim]

A chunk that begins a prompt is the exception: it needs no mask, and `enable_gqa` without a mask is in every fast kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kv_memory import KVMemory
from common.engine.native import PagedAttentionKernel
from common.ids import Int64Array

GATHER_BYTES = {"cpu": 2**22, "cuda": 2**28}
"""Most keys and values that decode attention without a kernel gathers at once, by device; one row may take more. On CPU what
stays in the cache; on CUDA as many rows as there is room for, as each call costs a launch."""


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
class _Part:
    """Decode rows [begin, end) that are gathered at once, over `context` slots. table: [rows, pages] int64.

    Rows of unlike length have slots that are not theirs. beyond: [rows, 1, context, 1] bool, those slots; mask: [rows, 1, 1,
    context], what is added to their scores.
    """

    begin: int
    end: int
    context: int
    table: Tensor
    beyond: Tensor | None
    mask: Tensor | None


class StepAttention:
    """Attention of one step over all layers; an `Attend` of the model. What the layers share is computed once, here.

    pages, slots: [tokens] int64, where each token's KV is written. segments: the chunks, first in the step. decode_table:
    [rows, pages] int32 and decode_lengths: [rows] int64 (this token included), for the rows after them; host_lengths: the same
    lengths on the host, so that nothing waits for the device. written: told after how many layers the step's KV has been written.
    """

    def __init__(
        self,
        memory: KVMemory,
        kernel: PagedAttentionKernel | None,
        query_heads: int,
        pages: Tensor,
        slots: Tensor,
        segments: Sequence[Segment],
        decode_table: Tensor,
        decode_lengths: Tensor,
        host_lengths: Int64Array,
        written: Callable[[int], None],
    ) -> None:
        self._memory = memory
        self._written = written
        self._kernel = kernel
        self._pages = pages
        self._slots = slots
        self._segments = segments
        self._decode_begin = segments[-1].end if segments else 0
        self._decode_table = decode_table
        self._decode_lengths = decode_lengths
        self._scale = memory.layout.head_dim**-0.5
        self._heads = torch.arange(memory.layout.kv_heads, device=pages.device)[:, None]
        self._masks = [_causal_mask(segment, query_heads // memory.layout.kv_heads, memory) for segment in segments]
        self._parts = self._divided(host_lengths) if kernel is None else []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._memory.view(layer, value=False), self._memory.view(layer, value=True)
        keys[self._pages, :, self._slots] = key
        values[self._pages, :, self._slots] = value
        self._written(layer + 1)
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
        context = segment.context if mask is None else mask.shape[-1]
        key, value = (self._gathered(view, segment.pages)[None, :, :context] for view in (keys, values))
        if segment.start == 0:
            whole = query.transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(whole, key, value, is_causal=True, scale=self._scale, enable_gqa=True)
            return out[0].transpose(0, 1)
        key[:, :, segment.context :] = 0.0  # masked, but a NaN would pass through a mask
        value[:, :, segment.context :] = 0.0
        grouped = query.view(tokens, self._memory.layout.kv_heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)
        out = F.scaled_dot_product_attention(grouped[None], key, value, attn_mask=mask, scale=self._scale)
        return out.view(len(grouped), -1, tokens, dim).permute(2, 0, 1, 3).reshape(tokens, heads, dim)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """query: [rows, heads, dim]. Returns it in parts of rows."""
        if self._kernel is not None:
            return [self._kernel(query, keys, values, self._decode_table, self._decode_lengths, self._scale)]
        grouped = query.view(len(query), self._memory.layout.kv_heads, -1, query.shape[-1])
        outs = []
        for part in self._parts:
            key, value = (self._gathered(view, part.table)[..., : part.context, :] for view in (keys, values))
            if part.beyond is not None:
                key, value = key.masked_fill_(part.beyond, 0.0), value.masked_fill_(part.beyond, 0.0)
            rows = grouped[part.begin : part.end]
            out = F.scaled_dot_product_attention(rows, key, value, attn_mask=part.mask, scale=self._scale)
            outs.append(out.reshape(-1, *query.shape[1:]))
        return outs

    def _divided(self, host_lengths: Int64Array) -> list[_Part]:
        """The decode rows in parts that gather at most GATHER_BYTES per layer.

        Slots beyond a row's length hold what an earlier request left. Their scores are masked, and their bytes are zeroed as
        well: a NaN would pass through a mask.
        """
        layout, device = self._memory.layout, self._decode_table.device
        most = GATHER_BYTES[device.type] // (2 * layout.kv_heads * layout.slot_bytes)
        parts = []
        for begin, end in _runs(host_lengths.tolist(), most):
            longest, shortest = int(host_lengths[begin:end].max()), int(host_lengths[begin:end].min())
            width = layout.pages_for(longest)
            table = self._decode_table[begin:end, :width].long()
            if longest == shortest:
                parts.append(_Part(begin, end, longest, table, None, None))
                continue
            context = width * layout.page_size
            beyond = torch.arange(context, device=device)[None, :] >= self._decode_lengths[begin:end, None]
            mask = torch.zeros(beyond.shape, dtype=self._memory.pool.dtype, device=device).masked_fill_(beyond, -torch.inf)
            parts.append(_Part(begin, end, context, table, beyond[:, None, :, None], mask[:, None, None, :]))
        return parts

    def _gathered(self, view: Tensor, pages: Tensor) -> Tensor:
        """One copy of view [all pages, kv_heads, page_size, dim] at pages [..., pages] → [..., kv_heads, context, dim]."""
        return view[pages[..., None, :], self._heads].flatten(-3, -2)


def _runs(lengths: Sequence[int], most_tokens: int) -> Iterator[tuple[int, int]]:
    """Rows [begin, end) that take at most `most_tokens` when each is as long as their longest; one row at least."""
    begin, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > begin and (row - begin + 1) * longest > most_tokens:
            yield begin, row
            begin, longest = row, length
    if begin < len(lengths):
        yield begin, len(lengths)


def _causal_mask(segment: Segment, group: int, memory: KVMemory) -> Tensor | None:
    """[group * tokens, slots of the segment's pages] in the pool's dtype, added to scores.

    None when the chunk begins its prompt, which the kernels know how to do, and when it is one token, from which nothing is
    hidden. Whole pages and not the context alone, because kernels want rows of a mask to be aligned.
    """
    if segment.start == 0 or segment.end - segment.begin == 1:
        return None
    device = memory.pool.device
    positions = torch.arange(segment.start, segment.context, device=device)
    hidden = torch.arange(len(segment.pages) * memory.layout.page_size, device=device)[None, :] > positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=memory.pool.dtype, device=device).masked_fill_(hidden, -torch.inf)
    return mask.repeat(group, 1)
