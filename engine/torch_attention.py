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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

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
class _Part:
    """Queries [begin, end) that attend at once: those of some decode rows, or of a chunk or a piece of one, which has one row."""

    begin: int
    end: int
    table: Tensor
    """[rows, pages] int64, from which keys are gathered."""
    context: int
    """How many of their slots are attended to, the first ones."""
    owned: int
    """How many of those slots hold KV of the row; the others are zeroed."""
    hidden: Tensor | None = None
    """[rows, 1, context, 1] bool: the slots that are zeroed instead, where rows have several lengths or windows."""
    mask: Tensor | Callable[[], Tensor] | None = None
    """What is added to the scores, [rows, 1, 1, context] or [group * tokens, context]. A callable makes it in each layer anew,
    because the masks of all pieces would take too much memory."""
    causal: bool = False
    """Nothing is hidden but the tokens of a whole prompt from those before them."""


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
        self._plans: dict[LayerAttention, list[_Part]] = {}
        """What the layers share that attend alike."""

    def plan(self, step: StepTokens) -> None:
        width = self._memory.layout.pages_for(int(step.host_lengths.max(initial=1)))
        self._decode_table = step.table[step.decode_rows, :width]
        for how in dict.fromkeys(self._layers):
            pieces = [piece for chunk in step.chunks for piece in self._pieces(step, chunk, how)]
            self._plans[how] = pieces + self._decode_parts(step, how, step.chunks[-1].end if step.chunks else 0)

    def run(self, layer: int, query: Tensor) -> Tensor:
        how = self._layers[layer]
        keys, values = self._memory.layers[layer]
        outs = [self._attend(query[part.begin : part.end], keys, values, part, how) for part in self._plans[how]]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def for_graph(self, rows: int) -> None:
        """None: what is gathered depends on the rows' lengths."""

    # --- planning ----------------------------------------------------------------------------------------------------------

    def _pieces(self, step: StepTokens, segment: Segment, how: LayerAttention) -> list[_Part]:
        """The chunk as it is if its mask is small enough, else in pieces of tokens."""
        whole = self._piece(step, segment, how)
        most = max(1, MASK_ELEMENTS // (self._group * whole.context))
        if not callable(whole.mask):
            return [whole]
        if segment.end - segment.begin <= most:
            return [dataclasses.replace(whole, mask=whole.mask())]
        pieces = []
        for begin in range(segment.begin, segment.end, most):
            end = min(begin + most, segment.end)
            start = segment.start + begin - segment.begin
            pieces.append(self._piece(step, Segment(begin, end, start, start + end - begin, segment.row), how))
        return pieces

    def _piece(self, step: StepTokens, segment: Segment, how: LayerAttention) -> _Part:
        """A mask covers whole pages and not only the context, because kernels want aligned rows of a mask."""
        layout, context = self._memory.layout, segment.context
        first_seen = 0 if how.window is None else max(0, segment.start + 1 - how.window)
        first_page = first_seen // layout.page_size
        begin = first_page * layout.page_size
        table = step.table[segment.row, first_page : layout.pages_for(context)].long()[None]
        make = partial(_Part, segment.begin, segment.end, table)
        windowed = how.window is not None and context - begin > how.window
        if segment.end - segment.begin == 1 and not windowed:
            return make(context - begin, context - begin)
        if segment.start == 0 and not windowed and how.softcap is None:
            return make(context, context, causal=True)
        slots = table.shape[1] * layout.page_size
        return make(slots, context - begin, mask=partial(self._mask, segment, range(begin, begin + slots), how))

    def _mask(self, segment: Segment, covered: range, how: LayerAttention) -> Tensor:
        """covered: the positions of the slots."""
        device = self._memory.pool.device
        positions = torch.arange(segment.start, segment.context, device=device)[:, None]
        slots = torch.arange(covered.start, covered.stop, device=device)[None, :]
        hidden = slots > positions
        if how.window is not None:
            hidden |= slots <= positions - how.window
        return self._added(hidden).repeat(self._group, 1)

    def _decode_parts(self, step: StepTokens, how: LayerAttention, first: int) -> list[_Part]:
        """The decode rows in parts that gather at most GATHER_BYTES per layer. first: where their queries begin.

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
                parts.append(_Part(first + begin, first + end, table, longest, longest))
                continue
            slots = torch.arange(width * layout.page_size, device=device)[None, :]
            own = lengths[begin:end, None]
            hidden = slots >= own
            if how.window is not None:
                hidden |= slots < own - how.window
            make = partial(_Part, first + begin, first + end, table, width * layout.page_size, width * layout.page_size)
            parts.append(make(hidden[:, None, :, None], self._added(hidden)[:, None, None]))
        return parts

    def _added(self, hidden: Tensor) -> Tensor:
        """What is added to scores so that what is hidden does not count."""
        return torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

    # --- attending ---------------------------------------------------------------------------------------------------------

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, part: _Part, how: LayerAttention) -> Tensor:
        """Attention of query [rows * tokens, heads, dim] over the slots of the part's pages."""
        rows, (queries, heads, dim) = len(part.table), query.shape
        key, value = (self._gathered(view, part.table)[..., : part.context, :] for view in (keys, values))
        if part.causal:
            whole = query.transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(whole, key, value, is_causal=True, scale=how.scale, enable_gqa=True)
            return out[0].transpose(0, 1)
        for gathered in (key, value):  # it is masked, but a NaN would pass through a mask
            if part.hidden is not None:
                gathered.masked_fill_(part.hidden, 0.0)
            elif part.owned < part.context:
                gathered[..., part.owned :, :] = 0.0
        kv_heads, tokens = self._memory.layout.kv_heads, queries // rows
        grouped = query.view(rows, tokens, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = part.mask() if callable(part.mask) else part.mask
        out = _attention(grouped, key, value, mask, how)
        return out.view(rows, kv_heads, -1, tokens, dim).permute(0, 3, 1, 2, 4).reshape(queries, heads, dim)

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
