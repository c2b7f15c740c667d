"""Attention over KV pages in plain torch: the fallback where neither C nor FlashInfer can be used.

Owns the use of the page tables. Knows rows and pages as tensors. Does not know models, sampling or requests.

The query heads that share a KV head are treated as more tokens of that head, so keys and values are never repeated: neither in
memory nor as a view with a stride of 0, which CUDA's kernels have not always read right (pytorch issues 175764 and 191937):

    chunk     query [1, kv_heads, group * tokens, dim]    keys [1, kv_heads, context, dim]
    decode    query [rows, kv_heads, group, dim]          keys [rows, kv_heads, context, dim]

A chunk that begins a prompt is the exception: it needs no mask, and `enable_gqa` without a mask is in every fast kernel.

A window hides what lies before it, so gathering begins at the first page that a token still sees.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv_memory import KVMemory
from engine.ports import LayerAttention, Segment, StepTokens

GATHER_BYTES = {"cpu": 2**22, "cuda": 2**28}
"""Most bytes of keys and values that decode attention gathers at once, by device; one row may take more. On CPU
they should stay in the cache; on CUDA each call costs a launch, so the limit is the room for them."""

MASK_ELEMENTS = 2**27
"""Most elements of a mask. A chunk that needs more attends in pieces. Besides memory, this keeps indices far from 2**32, beyond
which torch's kernels on CUDA read other rows of a mask (pytorch issue 187225)."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk, or a piece of one."""

    segment: Segment
    pages: Tensor
    """[pages] int64, from which its keys are gathered."""
    context: int
    """How many of their slots it attends to, the first ones."""
    owned: int
    """How many of those slots hold the row's KV; the others are zeroed."""
    begin: int = 0
    """The position of the first slot."""
    masked: bool = False
    """What a token must not see is hidden by a mask [group * tokens, context], added to the scores."""
    mask: Tensor | None = None
    """That mask; None where it is made in each layer anew, because the masks of all pieces would take too much memory."""
    causal: bool = False
    """Nothing is hidden but the tokens of a whole prompt from those before them."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Decode rows [begin, end) that are gathered at once. Some may have slots that are not theirs, or that lie before their
    window."""

    begin: int
    end: int
    context: int
    """How many slots are gathered of each row."""
    table: Tensor
    """[rows, pages] int64."""
    hidden: Tensor | None
    """[rows, 1, context, 1] bool: the slots that a row must not see."""
    mask: Tensor | None
    """[rows, 1, 1, context], added to the scores."""


class PagedAttention:
    """Implements `Attention` in torch, on any device.

    layers: how each layer attends. dtype: of queries; keys and values are converted to it when they are gathered.
    """

    def __init__(self, memory: KVMemory, query_heads: int, layers: Sequence[LayerAttention], dtype: torch.dtype) -> None:
        self._memory = memory
        self._layers = tuple(layers)
        self._dtype = dtype
        self._group = query_heads // memory.layout.kv_heads
        self._heads = torch.arange(memory.layout.kv_heads, device=memory.pool.device)[:, None]
        self._plans: dict[LayerAttention, tuple[list[_Chunk], list[_Part]]] = {}
        """What the layers share that attend alike."""

    def plan(self, step: StepTokens) -> None:
        width = self._memory.layout.pages_for(int(step.host_lengths.max(initial=1)))
        self._decode_table = step.table[step.decode_rows, :width]
        for how in dict.fromkeys(self._layers):
            chunks = [piece for chunk in step.chunks for piece in self._pieces(step, chunk, how)]
            self._plans[how] = chunks, self._parts(step, how)

    def run(self, layer: int, query: Tensor) -> Tensor:
        how = self._layers[layer]
        chunks, parts = self._plans[how]
        keys, values = self._memory.layers[layer]
        outs = [self._chunk(query[c.segment.begin : c.segment.end], keys, values, c, how) for c in chunks]
        decode_begin = chunks[-1].segment.end if chunks else 0
        if len(query) > decode_begin:
            outs += self._decode(query[decode_begin:], keys, values, parts, how)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def for_graph(self, rows: int) -> None:
        """None: what is gathered depends on the rows' lengths."""

    # --- planning ----------------------------------------------------------------------------------------------------------

    def _pieces(self, step: StepTokens, segment: Segment, how: LayerAttention) -> list[_Chunk]:
        """The chunk as it is if its mask is small enough, else in pieces of tokens."""
        whole = self._chunk_plan(step, segment, how)
        most = max(1, MASK_ELEMENTS // (self._group * whole.context))
        if not whole.masked:
            return [whole]
        if segment.end - segment.begin <= most:
            return [dataclasses.replace(whole, mask=self._mask(whole, how))]
        pieces = []
        for begin in range(segment.begin, segment.end, most):
            end = min(begin + most, segment.end)
            start = segment.start + begin - segment.begin
            pieces.append(self._chunk_plan(step, Segment(begin, end, start, start + end - begin, segment.row), how))
        return pieces

    def _chunk_plan(self, step: StepTokens, segment: Segment, how: LayerAttention) -> _Chunk:
        """A mask covers whole pages and not only the context, because kernels want aligned rows of a mask."""
        layout, context = self._memory.layout, segment.context
        first_seen = 0 if how.window is None else max(0, segment.start + 1 - how.window)
        first_page = first_seen // layout.page_size
        begin = first_page * layout.page_size
        pages = step.table[segment.row, first_page : layout.pages_for(context)].long()
        windowed = how.window is not None and context - begin > how.window
        if segment.end - segment.begin == 1 and not windowed:
            return _Chunk(segment, pages, context - begin, context - begin)
        if segment.start == 0 and not windowed and how.softcap is None:
            return _Chunk(segment, pages, context, context, causal=True)
        return _Chunk(segment, pages, len(pages) * layout.page_size, context - begin, begin, masked=True)

    def _mask(self, chunk: _Chunk, how: LayerAttention) -> Tensor:
        device, segment = self._memory.pool.device, chunk.segment
        positions = torch.arange(segment.start, segment.context, device=device)[:, None]
        slots = torch.arange(chunk.begin, chunk.begin + chunk.context, device=device)[None, :]
        hidden = slots > positions
        if how.window is not None:
            hidden |= slots <= positions - how.window
        return self._added(hidden).repeat(self._group, 1)

    def _parts(self, step: StepTokens, how: LayerAttention) -> list[_Part]:
        """The decode rows in parts that gather at most GATHER_BYTES per layer.

        Slots beyond a row's length hold what an earlier request left. Their scores are masked and their bytes are zeroed,
        because a NaN would pass through a mask.
        """
        layout, device = self._memory.layout, self._memory.pool.device
        lengths, host_lengths = step.decode_lengths, step.host_lengths
        first_pages = None
        if how.window is not None:  # from here on, lengths count from the first page that a row's window touches
            first_pages = (lengths - how.window).clamp(min=0) // layout.page_size
            lengths = lengths - first_pages * layout.page_size
            host_lengths = host_lengths - (host_lengths - how.window).clip(min=0) // layout.page_size * layout.page_size
        slot_bytes = layout.head_dim * self._dtype.itemsize
        parts = []
        for begin, end in _runs(host_lengths.tolist(), GATHER_BYTES[device.type] // (2 * layout.kv_heads * slot_bytes)):
            longest, shortest = int(host_lengths[begin:end].max()), int(host_lengths[begin:end].min())
            width = layout.pages_for(longest)
            if first_pages is None:
                table = self._decode_table[begin:end, :width].long()
            else:
                columns = first_pages[begin:end, None] + torch.arange(width, device=device)
                table = self._decode_table[begin:end].gather(1, columns.clamp(max=self._decode_table.shape[1] - 1)).long()
            if longest == shortest and (how.window is None or longest <= how.window):
                parts.append(_Part(begin, end, longest, table, None, None))
                continue
            slots = torch.arange(width * layout.page_size, device=device)[None, :]
            own = lengths[begin:end, None]
            hidden = slots >= own
            if how.window is not None:
                hidden |= slots < own - how.window
            parts.append(_Part(begin, end, slots.shape[1], table, hidden[:, None, :, None], self._added(hidden)[:, None, None]))
        return parts

    def _added(self, hidden: Tensor) -> Tensor:
        """What is added to scores so that what is hidden does not count."""
        return torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

    # --- attending ---------------------------------------------------------------------------------------------------------

    def _chunk(self, query: Tensor, keys: Tensor, values: Tensor, chunk: _Chunk, how: LayerAttention) -> Tensor:
        """Attention of query [tokens, heads, dim] over the slots of the chunk's pages."""
        tokens, heads, dim = query.shape
        key, value = (self._gathered(view, chunk.pages)[None, :, : chunk.context] for view in (keys, values))
        if chunk.causal:
            whole = query.transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(whole, key, value, is_causal=True, scale=how.scale, enable_gqa=True)
            return out[0].transpose(0, 1)
        key[:, :, chunk.owned :] = 0.0  # masked, but a NaN would pass through a mask
        value[:, :, chunk.owned :] = 0.0
        grouped = query.view(tokens, self._memory.layout.kv_heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)
        mask = self._mask(chunk, how) if chunk.masked and chunk.mask is None else chunk.mask
        out = _attention(grouped[None], key, value, mask, how)
        return out.view(len(grouped), -1, tokens, dim).permute(2, 0, 1, 3).reshape(tokens, heads, dim)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, parts: list[_Part], how: LayerAttention) -> list[Tensor]:
        """Attention of the decode rows. query: [rows, heads, dim]. Returns it in parts of rows."""
        grouped = query.view(len(query), self._memory.layout.kv_heads, -1, query.shape[-1])
        outs = []
        for part in parts:
            key, value = (self._gathered(view, part.table)[..., : part.context, :] for view in (keys, values))
            if part.hidden is not None:
                key, value = key.masked_fill_(part.hidden, 0.0), value.masked_fill_(part.hidden, 0.0)
            out = _attention(grouped[part.begin : part.end], key, value, part.mask, how)
            outs.append(out.reshape(-1, *query.shape[1:]))
        return outs

    def _gathered(self, view: Tensor, pages: Tensor) -> Tensor:
        """One copy of view [all pages, kv_heads, page_size, dim] at pages [..., pages] → [..., kv_heads, context, dim]."""
        at = (pages[..., None, :], self._heads)
        if view.dtype == self._dtype:
            return view[at].flatten(-3, -2)
        return view.view(torch.uint8)[at].flatten(-3, -2).view(view.dtype).to(self._dtype)  # not every device indexes FP8


def _attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, how: LayerAttention) -> Tensor:
    """query: [..., queries, dim]; keys, values: [..., context, dim]; mask is added to the scores. Returns the shape of query."""
    if how.softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=how.scale)
    scores = (query @ keys.transpose(-1, -2)).float() * (how.scale / how.softcap)
    scores = how.softcap * torch.tanh(scores)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1).to(query.dtype) @ values


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
