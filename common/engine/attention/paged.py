"""Attention over KV pages in torch, and in C for decode rows on CPU: the backend of CPU, and the fallback on CUDA.

Owns the use of the page tables. Knows rows and pages as tensors. Does not know models, sampling or requests.

The query heads that share a KV head are treated as more tokens of that head, so keys and values are never repeated: neither in
memory nor as a view with a stride of 0, which CUDA's kernels have not always read right (pytorch issues 175764 and 191937):

    chunk     query [1, kv_heads, group * tokens, dim]    keys [1, kv_heads, context, dim]
    decode    query [rows, kv_heads, group, dim]          keys [rows, kv_heads, context, dim]

A chunk that begins a prompt is the exception: it needs no mask, and `enable_gqa` without a mask is in every fast kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.attention.native import PagedAttentionKernel
from common.engine.attention.port import Segment, StepTokens
from common.engine.kv_memory import KVMemory

GATHER_BYTES = {"cpu": 2**22, "cuda": 2**28}
"""Most bytes of keys and values that decode attention without a kernel gathers at once, by device; one row may take more. On CPU
they should stay in the cache; on CUDA each call costs a launch, so the limit is the room for them."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Decode rows [begin, end) that are gathered at once, over `context` slots. table: [rows, pages] int64.

    If the rows differ in length, the shorter ones have slots that are not theirs. beyond: [rows, 1, context, 1] bool, those
    slots. mask: [rows, 1, 1, context], added to the scores.
    """

    begin: int
    end: int
    context: int
    table: Tensor
    beyond: Tensor | None
    mask: Tensor | None


class PagedAttention:
    """The backend of CPU and CUDA: torch, and for decode rows the C kernel where there is one. Implements `Attention`."""

    def __init__(self, memory: KVMemory, query_heads: int, kernel: PagedAttentionKernel | None) -> None:
        self._memory = memory
        self._kernel = kernel
        self._group = query_heads // memory.layout.kv_heads
        self._scale = memory.layout.head_dim**-0.5
        self._heads = torch.arange(memory.layout.kv_heads, device=memory.pool.device)[:, None]
        self._masks: list[Tensor | None] = []
        self._pages: list[Tensor] = []
        self._parts: list[_Part] = []

    def plan(self, step: StepTokens) -> None:
        self._step = step
        layout = self._memory.layout
        self._pages = [step.table[chunk.row, : layout.pages_for(chunk.context)].long() for chunk in step.chunks]
        width = layout.pages_for(int(step.host_lengths.max(initial=1)))
        self._decode_table = step.table[step.decode_rows, :width]
        self._masks = [_causal_mask(chunk, self._group, self._memory) for chunk in step.chunks]
        if self._kernel is None:
            self._parts = self._divided(step)

    def run(self, layer: int, query: Tensor) -> Tensor:
        keys, values = self._memory.layers[layer]
        step = self._step
        parts = [
            self._chunk(query[chunk.begin : chunk.end], keys, values, chunk, pages, mask)
            for chunk, pages, mask in zip(step.chunks, self._pages, self._masks, strict=True)
        ]
        decode_begin = step.chunks[-1].end if step.chunks else 0
        if len(query) > decode_begin:
            rows = query[decode_begin:]
            if self._kernel is None:
                parts += self._decode(rows, keys, values)
            else:
                parts.append(self._kernel(rows, keys, values, self._decode_table, step.decode_lengths, self._scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def for_graph(self, rows: int) -> None:
        """None: what is gathered depends on the rows' lengths."""

    def _chunk(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, pages: Tensor, mask: Tensor | None) -> Tensor:
        """Causal attention of query [tokens, heads, dim] over the first `context` slots of pages [pages]."""
        tokens, heads, dim = query.shape
        context = segment.context if mask is None else mask.shape[-1]
        key, value = (self._gathered(view, pages)[None, :, :context] for view in (keys, values))
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
        """Attention of the decode rows without the kernel. query: [rows, heads, dim]. Returns it in parts of rows."""
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

    def _divided(self, step: StepTokens) -> list[_Part]:
        """The decode rows in parts that gather at most GATHER_BYTES per layer.

        Slots beyond a row's length hold what an earlier request left. Their scores are masked and their bytes are zeroed,
        because a NaN would pass through a mask.
        """
        layout, device, host_lengths = self._memory.layout, self._memory.pool.device, step.host_lengths
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
            beyond = torch.arange(context, device=device)[None, :] >= step.decode_lengths[begin:end, None]
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

    None when the chunk begins its prompt, because the kernels handle that case, and when it is one token, because nothing is
    hidden from it. It covers whole pages and not only the context, because kernels want aligned rows of a mask.
    """
    if segment.start == 0 or segment.end - segment.begin == 1:
        return None
    device = memory.pool.device
    positions = torch.arange(segment.start, segment.context, device=device)
    slots = memory.layout.pages_for(segment.context) * memory.layout.page_size
    hidden = torch.arange(slots, device=device)[None, :] > positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=memory.pool.dtype, device=device).masked_fill_(hidden, -torch.inf)
    return mask.repeat(group, 1)
