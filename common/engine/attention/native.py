"""Attention over KV pages by the C kernel (`paged_attention.c`): the backend of CPU where there is a compiler.

Owns the division of a step into items of work, and the memory in which they are computed. Knows rows and pages as tensors. Does
not know models, sampling or requests.

An item is some tokens of one row over some of its context. One call of a layer computes all items for all KV heads: each thread
takes the next one until none is left, the largest first. It takes several heads of it at a time where enough is left for the
other threads: all heads of a page lie together in memory. Long contexts are split, so that few rows give work to all threads.
Each item of a split leaves its result in memory, and the one that ends last merges them. A row is split by its own length,
whatever the other rows and the number of threads are: sums are made in one order, and a greedy answer does not depend on them.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
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
from common.engine.native.function import NativeFunction

SOURCE = Path(__file__).with_name("paged_attention.c")
DTYPES = (torch.float32, torch.bfloat16)
"""Of queries, and of pages. They may differ."""

SPLIT_SLOTS = 512
"""An item of a split covers about so many slots, or more: below that, the merge costs more than the balance gives."""
SPLIT_ITEMS = 128
"""A decode row or a chunk becomes at most about so many items, all KV heads together: more only take memory and time."""
ALONE_COST = 2**14
"""A step of at most this cost runs on one thread: to wake the others takes longer. See `_cost`."""
LIGHTEST = 32
"""A slot costs as much for a few queries as for this many: it must be read, which takes longer than to compute with it."""

_Item = tuple[int, int, int, int, int, int]
"""Token, tokens, position, row, first slot and end of the slots: the first six fields of `item` in C."""


class _StepPlan(ctypes.Structure):
    """`call` in C, which says what each field is. Those of a layer are C's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "items", "workspace", "partials", "done")),
        *((name, ctypes.c_int64) for name in ("item_count", "split_count", "table_stride", "page_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("workspace_floats", "heads", "kv_heads", "page_size", "dim")),
        *((name, ctypes.c_int64) for name in ("window", "threads")),
        *((name, ctypes.c_int32) for name in ("query_is_bfloat16", "pages_are_bfloat16")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out")),
        *((name, ctypes.c_int64) for name in ("next", "together")),
    )


class _LayerCall(ctypes.Structure):
    """`layer_call` in C."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("plan", "query", "keys", "values", "out"))


class _Plan(NamedTuple):
    """A plan, and the memory that it points to."""

    step: _StepPlan
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
        strides = {view.stride() for views in memory.layers for view in views}
        assert len(strides) == 1 and strides.pop()[2:] == (memory.layout.head_dim, 1), "C steps through all pages in one way"
        self._memory = memory
        self._layers = tuple(layers)
        self._dtype = dtype
        self._of_chunks = of_chunks
        self._elsewhere = 0
        self._heads = query_heads
        self._group = query_heads // memory.layout.kv_heads
        self._attend = NativeFunction(library, "paged_attention")
        library.item_queries.restype = library.workspace_floats.restype = ctypes.c_int64
        library.workspace_floats.argtypes = [ctypes.c_int64] * 4
        self._item_tokens = max(1, library.item_queries() // self._group)
        self._workspace_floats = library.workspace_floats(
            self._item_tokens * self._group, memory.layout.kv_heads, self._group, memory.layout.head_dim
        )
        # For all processors, since threads follow the cores that other instances lend. What none uses takes no memory.
        self._most_threads = max(os.cpu_count() or 1, torch.get_num_threads())
        self._workspace = torch.empty(self._most_threads * self._workspace_floats)
        self._plans = {how: _Plan(_StepPlan(), ()) for how in dict.fromkeys(self._layers)}

    def plan(self, step: StepTokens) -> None:
        if self._of_chunks is not None:
            rows, lengths, on_host = step.decode_rows[:0], step.decode_lengths[:0], step.host_lengths[:0]
            self._of_chunks.plan(replace(step, decode_rows=rows, decode_lengths=lengths, host_lengths=on_host))
            self._elsewhere = step.chunks[-1].end if step.chunks else 0
            step = replace(step, chunks=())
        for how, (shared, _) in self._plans.items():
            planned, kept = self._planned(step, how)
            ctypes.memmove(
                ctypes.addressof(shared), ctypes.addressof(planned), ctypes.sizeof(shared)
            )  # recorded calls point to it
            self._plans[how] = _Plan(shared, kept)

    def run(self, layer: int, query: Tensor) -> Tensor:
        if self._of_chunks is None or self._elsewhere == 0:
            return self._computed(layer, query)
        chunks = self._of_chunks.run(layer, query[: self._elsewhere])
        if len(query) == self._elsewhere:
            return chunks
        return torch.cat([chunks, self._computed(layer, query[self._elsewhere :])])

    def for_graph(self, rows: int) -> None:
        """None: there are no CUDA graphs on CPU. Calls may be recorded: what a plan changes is in memory that they point to."""

    def _computed(self, layer: int, query: Tensor) -> Tensor:
        plan = self._plans[self._layers[layer]].step
        keys, values = self._memory.layers[layer]
        query = query.contiguous()
        out = query.new_empty(query.shape)
        self._attend(_LayerCall(ctypes.addressof(plan), query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()))
        return out

    def _planned(self, step: StepTokens, how: LayerAttention) -> _Plan:
        layout = self._memory.layout
        assert step.table.dtype == torch.int32 and step.table.stride(1) == 1
        items: list[tuple[int, ...]] = []
        work, partials, splits = 0, 0, 0
        for whole in self._wholes_of(step, how.window):
            most = max(1, SPLIT_ITEMS // (layout.kv_heads * len(whole)))
            for item in whole:
                first, last = item[4:]
                work += self._cost(item)
                parts = min(most, -(-(last - first) // SPLIT_SLOTS))
                if parts <= 1:
                    items.append((*item, 1, 0, 0, 0))
                    continue
                ends = [first + (last - first) * part // parts for part in range(parts + 1)]
                queries = item[1] * self._group
                items += [
                    (*item[:4], ends[part], ends[part + 1], parts, partials + part * queries, partials, splits)
                    for part in range(parts)
                ]
                partials, splits = partials + parts * queries, splits + 1
        array = np.array(sorted(items, key=self._cost, reverse=True), np.int64).reshape(-1, 10)
        left = torch.empty(partials * layout.kv_heads * (layout.head_dim + 2))
        done = np.empty(splits * layout.kv_heads, np.int64)
        keys = self._memory.layers[0][0]
        plan = _StepPlan(
            table=step.table.data_ptr(), items=array.ctypes.data, workspace=self._workspace.data_ptr(),
            partials=left.data_ptr(), done=done.ctypes.data,
            item_count=len(array), split_count=splits, table_stride=step.table.stride(0),
            page_stride=keys.stride(0), head_stride=keys.stride(1), workspace_floats=self._workspace_floats,
            heads=self._heads, kv_heads=layout.kv_heads, page_size=layout.page_size,
            dim=layout.head_dim, window=2**62 if how.window is None else how.window,
            threads=1 if work * layout.kv_heads <= ALONE_COST else self._most_threads,
            query_is_bfloat16=self._dtype == torch.bfloat16, pages_are_bfloat16=keys.dtype == torch.bfloat16,
            scale=how.scale, softcap=how.softcap or 0.0,
        )  # fmt: skip
        return _Plan(plan, (step.table, left, done, array))

    def _wholes_of(self, step: StepTokens, window: int | None) -> Iterator[list[_Item]]:
        """The items of each chunk and of each decode row, before they are split over their contexts."""
        for chunk in step.chunks:
            yield self._items_of(chunk, window)
        token = step.chunks[-1].end if step.chunks else 0
        for row, length in zip(step.decode_rows.tolist(), step.host_lengths.tolist(), strict=True):
            yield [(token, 1, length - 1, row, 0 if window is None else max(0, length - window), length)]
            token += 1

    def _items_of(self, chunk: Segment, window: int | None) -> list[_Item]:
        items = []
        for begin in range(chunk.begin, chunk.end, self._item_tokens):
            end = min(begin + self._item_tokens, chunk.end)
            start = chunk.start + begin - chunk.begin
            first = 0 if window is None else max(0, start + 1 - window)
            items.append((begin, end - begin, start, chunk.row, first, start + end - begin))
        return items

    def _cost(self, item: Sequence[int]) -> int:
        """Of an item in one KV head: queries times slots."""
        return max(item[1] * self._group, LIGHTEST) * (item[5] - item[4])


def native_library() -> ctypes.CDLL | None:
    """None, and the reason in the log, where it cannot be compiled."""
    return load(SOURCE)
