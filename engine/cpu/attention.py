"""Attention over KV pages by the C kernel (`paged_attention.c`): the backend of CPU where there is a compiler.

Owns how a step is told to C, and the memory in which it is computed. Knows rows and pages as tensors. Does not know models,
sampling or requests.

An item is some tokens of one row over some of its context (`plan.h`). One call of a layer computes all items for all KV heads:
each thread takes the next one until none is left, the largest first. It takes several heads of it at a time where enough is left
for the other threads: all heads of a page lie together in memory. Each item of a split leaves its result in memory, and the one
that ends last merges them. A row is split by its own length alone, so a greedy answer does not depend on other rows and threads.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.ids import Int64Array
from engine.cpu.build import NativeFunction, load
from engine.kv_memory import KVMemory
from engine.ports import Attention, LayerAttention, StepTokens

SOURCE = Path(__file__).with_name("paged_attention.c")
DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of queries, and of pages. They may differ."""

SPLIT_SLOTS = 512
"""An item of a split covers about so many slots, or more: below that, the merge costs more than the balance gives."""
SPLIT_ITEMS = 128
"""A decode row or a chunk becomes at most about so many items, all KV heads together: more only take memory and time."""
ALONE_COST = 2**14
"""A step of at most this cost runs on one thread: to wake the others takes longer."""
LIGHTEST = 32
"""A slot costs as much for a few queries as for this many: it must be read, which takes longer than to compute with it."""

_ITEM_NUMBERS = 11
"""How many numbers an `item` in C has."""


class _Planning(ctypes.Structure):
    """`planning` in C."""

    _fields_ = (
        ("segments", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "group", "kv_heads", "window")),
        *((name, ctypes.c_int64) for name in ("item_tokens", "split_slots", "split_items", "lightest")),
        ("items", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("item_count", "splits", "partials", "cost")),
    )


class _AttentionCall(ctypes.Structure):
    """`call` in C, which says what each field is. What is of one layer is C's own."""

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
        self._of_chunks = of_chunks
        self._elsewhere = 0
        self._group = query_heads // memory.layout.kv_heads
        self._attend = NativeFunction(library, "paged_attention", "plan query keys values out")
        library.item_queries.restype = library.workspace_floats.restype = ctypes.c_int64
        library.workspace_floats.argtypes = [ctypes.c_int64] * 4
        self._item_tokens = max(1, library.item_queries() // self._group)
        self._workspace_floats = library.workspace_floats(
            self._item_tokens * self._group, memory.layout.kv_heads, self._group, memory.layout.head_dim
        )
        self._most_threads = 0
        self._workspace = torch.empty(0)
        self._plan_items = library.plan_items
        self._plan_items.argtypes, self._plan_items.restype = [ctypes.c_void_p], None
        keys, layout = memory.layers[0][0], memory.layout
        self._calls = {
            how: _AttentionCall(
                workspace_floats=self._workspace_floats,
                page_stride=keys.stride(0), head_stride=keys.stride(1), heads=query_heads, kv_heads=layout.kv_heads,
                page_size=layout.page_size, dim=layout.head_dim, window=2**62 if how.window is None else how.window,
                query_is_bfloat16=dtype == torch.bfloat16, pages_are_bfloat16=keys.dtype == torch.bfloat16,
                scale=how.scale, softcap=how.softcap or 0.0,
            )
            for how in self._layers
        }  # fmt: skip
        self._kept: list[tuple[Tensor | Int64Array, ...]] = []
        """The memory that the calls point to."""

    def plan(self, step: StepTokens) -> None:
        if self._of_chunks is not None:
            none, on_host = step.decode_rows[:0], step.host_lengths[:0]
            self._of_chunks.plan(replace(step, decode_rows=none, decode_lengths=none, host_lengths=on_host))
            self._elsewhere = step.chunks[-1].end if step.chunks else 0
            step = replace(step, chunks=())
        assert step.table.dtype == torch.int32 and step.table.stride(1) == 1
        if torch.get_num_threads() > self._most_threads:
            # For all processors at least, since threads follow the cores that other instances lend, also amid a step. What none
            # uses takes no memory.
            self._most_threads = max(os.cpu_count() or 1, torch.get_num_threads())
            self._workspace = torch.empty(self._most_threads * self._workspace_floats)
        first, decode_rows = step.chunks[-1].end if step.chunks else 0, len(step.host_lengths)
        segments = np.empty((len(step.chunks) + decode_rows, 4), dtype=np.int64)  # `segment` in C, in the order of the step
        for at, chunk in enumerate(step.chunks):
            segments[at] = chunk.begin, chunk.end, chunk.start, chunk.row
        rows = segments[len(step.chunks) :]
        rows[:, 0] = np.arange(first, first + decode_rows)
        rows[:, 1] = rows[:, 0] + 1
        rows[:, 2] = step.host_lengths - 1
        rows[:, 3] = step.decode_rows.numpy()
        kv_heads, self._kept = self._memory.layout.kv_heads, []
        for call in self._calls.values():
            planning = _Planning(
                segments=segments.ctypes.data, count=len(segments), group=self._group, kv_heads=kv_heads, window=call.window,
                item_tokens=self._item_tokens, split_slots=SPLIT_SLOTS, split_items=SPLIT_ITEMS, lightest=LIGHTEST,
            )  # fmt: skip
            self._plan_items(ctypes.addressof(planning))
            items = np.empty(planning.item_count * _ITEM_NUMBERS, dtype=np.int64)
            planning.items = items.ctypes.data
            self._plan_items(ctypes.addressof(planning))
            left = torch.empty(planning.partials * kv_heads * (self._memory.layout.head_dim + 2))
            done = np.empty(planning.splits * kv_heads, dtype=np.int64)
            call.workspace = self._workspace.data_ptr()
            call.table, call.table_stride = step.table.data_ptr(), step.table.stride(0)
            call.items, call.item_count = items.ctypes.data, planning.item_count
            call.partials, call.done, call.split_count = left.data_ptr(), done.ctypes.data, planning.splits
            call.threads = 1 if planning.cost * kv_heads <= ALONE_COST else self._most_threads
            self._kept.append((step.table, items, left, done))

    def run(self, layer: int, query: Tensor) -> Tensor:
        chunks = None
        if self._of_chunks is not None and self._elsewhere:
            chunks, query = self._of_chunks.run(layer, query[: self._elsewhere]), query[self._elsewhere :]
            if not len(query):
                return chunks
        keys, values = self._memory.layers[layer]
        query = query.contiguous()
        out = query.new_empty(query.shape)
        self._attend(ctypes.addressof(self._calls[self._layers[layer]]), query, keys, values, out)
        return out if chunks is None else torch.cat([chunks, out])

    def for_graph(self, rows: int) -> None:
        """None: there are no CUDA graphs on CPU. Calls may be recorded: what a plan changes is in memory that they point to."""


def native_library() -> ctypes.CDLL | None:
    """None, and the reason in the log, where it cannot be compiled."""
    return load(SOURCE)
