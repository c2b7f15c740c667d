"""Attention over KV pages by the C kernel (`paged_attention.c`): the backend of CPU where there is a compiler.

Owns the division of a step into items of work, and the memory in which they are computed. Knows rows and pages as tensors. Does
not know models, sampling or requests.

An item is some tokens of one row over some of its context. One call of a layer computes all items for all KV heads: each thread
takes the next one until none is left, the largest first. A row that is much longer than the others is split over its context, so
that no thread works alone at the end. Each item of a split leaves its result in memory, and the one that ends last merges them.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.attention.port import Attention, LayerAttention, Segment, StepTokens
from common.engine.kv_memory import KVMemory
from common.engine.native.build import load

SOURCE = Path(__file__).with_name("paged_attention.c")
DTYPES = (torch.float32, torch.bfloat16)
"""Of queries, and of pages. They may differ."""

ITEMS_PER_THREAD = 4
"""No item takes more than one part in so many of what a thread has to do."""
SPLIT_SLOTS = 128
"""An item of a split covers at least so many slots: below that, the merge costs more than the balance gives."""
ALONE_COST = 2**14
"""A step of at most this cost runs on one thread: to wake the others takes longer. See `_cost`."""
LIGHTEST = 32
"""A slot costs as much for a few queries as for this many: it must be read, which takes longer than to compute with it."""

_Item = tuple[int, int, int, int, int, int]
"""Token, tokens, position, row, first slot and end of the slots: the first six fields of `item` in C."""


class _Call(ctypes.Structure):
    """`call` in C, which says what each field is."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "keys", "values", "out", "table", "items", "workspace", "partials", "done")
        ),
        *((name, ctypes.c_int64) for name in ("item_count", "split_count", "table_stride", "page_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("workspace_floats", "partial_floats", "heads", "kv_heads", "page_size", "dim")),
        *((name, ctypes.c_int64) for name in ("window", "threads", "next")),
        *((name, ctypes.c_int32) for name in ("query_is_bfloat16", "pages_are_bfloat16")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class _Plan(NamedTuple):
    """A call that lacks the layer's tensors, and the memory that it points to."""

    call: _Call
    kept: tuple[Tensor | NDArray[np.int64], ...]


class NativeAttention:
    """Implements `Attention` in C. layers: how each layer attends. dtype: of queries. library: the compiled source.

    of_chunks: computes the chunks instead; None: C does.
    """

    def __init__(
        self,
        memory: KVMemory,
        query_heads: int,
        layers: Sequence[LayerAttention],
        dtype: torch.dtype,
        library: ctypes.CDLL,
        of_chunks: Attention | None = None,
    ) -> None:
        assert memory.pool.device.type == "cpu" and {dtype, memory.pool.dtype} <= set(DTYPES)
        self._memory = memory
        self._layers = tuple(layers)
        self._dtype = dtype
        self._of_chunks = of_chunks
        self._elsewhere = 0
        self._heads = query_heads
        self._group = query_heads // memory.layout.kv_heads
        self._run = library.paged_attention
        self._run.argtypes, self._run.restype = [ctypes.POINTER(_Call)], None
        library.item_queries.restype = library.workspace_floats.restype = ctypes.c_int64
        library.workspace_floats.argtypes = [ctypes.c_int64] * 3
        self._item_tokens = max(1, library.item_queries() // self._group)
        self._workspace_floats = library.workspace_floats(self._item_tokens * self._group, self._group, memory.layout.head_dim)
        self._workspace = torch.empty(0)
        self._plans: dict[LayerAttention, _Plan] = {}

    def plan(self, step: StepTokens) -> None:
        if self._of_chunks is not None:
            rows, lengths, on_host = step.decode_rows[:0], step.decode_lengths[:0], step.host_lengths[:0]
            self._of_chunks.plan(replace(step, decode_rows=rows, decode_lengths=lengths, host_lengths=on_host))
            self._elsewhere = step.chunks[-1].end if step.chunks else 0
            step = replace(step, chunks=())
        self._plans = {how: self._planned(step, how) for how in dict.fromkeys(self._layers)}

    def run(self, layer: int, query: Tensor) -> Tensor:
        if self._of_chunks is None or self._elsewhere == 0:
            return self._computed(layer, query)
        chunks = self._of_chunks.run(layer, query[: self._elsewhere])
        if len(query) == self._elsewhere:
            return chunks
        return torch.cat([chunks, self._computed(layer, query[self._elsewhere :])])

    def for_graph(self, rows: int) -> None:
        """None: the items depend on the rows' lengths."""

    def _computed(self, layer: int, query: Tensor) -> Tensor:
        call, _ = self._plans[self._layers[layer]]
        keys, values = self._memory.layers[layer]
        query = query.contiguous()
        out = torch.empty_like(query)
        call.query, call.keys, call.values, call.out = query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()
        self._run(ctypes.byref(call))
        return out

    def _planned(self, step: StepTokens, how: LayerAttention) -> _Plan:
        layout, threads = self._memory.layout, torch.get_num_threads()
        items = [item for chunk in step.chunks for item in self._items_of(chunk, how.window)]
        token = step.chunks[-1].end if step.chunks else 0
        for row, length in zip(step.decode_rows.tolist(), step.host_lengths.tolist(), strict=True):
            items.append((token, 1, length - 1, row, 0 if how.window is None else max(0, length - how.window), length))
            token += 1
        total = sum(map(self._cost, items)) * layout.kv_heads
        threads = 1 if total <= ALONE_COST else threads
        array, partials, splits = self._split(sorted(items, key=self._cost, reverse=True), total, threads)
        partial_floats = self._item_tokens * self._group * (layout.head_dim + 2)
        if len(self._workspace) < threads * self._workspace_floats:
            self._workspace = torch.empty(threads * self._workspace_floats)
        left = torch.empty(partials * layout.kv_heads * partial_floats)
        done = np.empty(splits * layout.kv_heads, np.int64)
        keys = self._memory.layers[0][0]
        call = _Call(
            table=step.table.data_ptr(), items=array.ctypes.data, workspace=self._workspace.data_ptr(), partials=left.data_ptr(),
            done=done.ctypes.data, item_count=len(array), split_count=splits, table_stride=step.table.stride(0),
            page_stride=keys.stride(0), head_stride=keys.stride(1), workspace_floats=self._workspace_floats,
            partial_floats=partial_floats, heads=self._heads, kv_heads=layout.kv_heads, page_size=layout.page_size,
            dim=layout.head_dim, window=2**62 if how.window is None else how.window, threads=threads,
            query_is_bfloat16=self._dtype == torch.bfloat16, pages_are_bfloat16=keys.dtype == torch.bfloat16,
            scale=how.scale, softcap=how.softcap or 0.0,
        )  # fmt: skip
        return _Plan(call, (step.table, self._workspace, left, done, array))

    def _items_of(self, chunk: Segment, window: int | None) -> list[_Item]:
        items = []
        for begin in range(chunk.begin, chunk.end, self._item_tokens):
            end = min(begin + self._item_tokens, chunk.end)
            start = chunk.start + begin - chunk.begin
            first = 0 if window is None else max(0, start + 1 - window)
            items.append((begin, end - begin, start, chunk.row, first, start + end - begin))
        return items

    def _cost(self, item: _Item) -> int:
        """Of an item in one KV head: queries times slots."""
        return max(item[1] * self._group, LIGHTEST) * (item[5] - item[4])

    def _split(self, items: list[_Item], total: int, threads: int) -> tuple[NDArray[np.int64], int, int]:
        """The items as C takes them, with those that are too large split; the number of partial results; the number of splits."""
        largest = total if threads == 1 else -(-total // (threads * ITEMS_PER_THREAD))
        split, partials, splits = [], 0, 0
        for item in items:
            first, last = item[4:]
            parts = max(1, min(-(-self._cost(item) // largest), (last - first) // SPLIT_SLOTS))
            if parts == 1:
                split.append((*item, 1, 0, 0, 0))
                continue
            ends = [first + (last - first) * part // parts for part in range(parts + 1)]
            split += [(*item[:4], ends[p], ends[p + 1], parts, partials + p, partials, splits) for p in range(parts)]
            partials, splits = partials + parts, splits + 1
        return np.array(split, np.int64).reshape(-1, 10), partials, splits


def native_library() -> ctypes.CDLL | None:
    """None, and the reason in the log, where it cannot be compiled."""
    return load(SOURCE)
