"""Attention over KV pages by FlashInfer (Ye et al. 2025, arXiv 2501.01005): the backend of CUDA.

Owns the wrappers, their workspaces, and the lists of pages that they read. Knows the package by the `FlashInfer` port only, so a
test can stand in for it. Does not know models, sampling or requests, nor when this backend is the right one (`backends.py`).

A pool's view of one layer is what FlashInfer calls "HND": [pages, kv_heads, page_size, dim]. It takes any page and head stride. A
step is planned once for all layers that attend alike:

    chunks        BatchPrefillWithPagedKVCacheWrapper, ragged queries, causal (aligned at the end of the context), by FA3 or FA2
    decode rows   BatchDecodeWithPagedKVCacheWrapper, one query each

**Nothing waits for the device.** FlashInfer's `plan` reads index pointers and last page lengths on the host. So they are made
there from host lengths, in pinned memory. The page ids are gathered on the device, because the page table is there.

**Two steps share one buffer of the host.** `plan` writes its schedule to a pinned buffer of the wrapper and copies it to the
device asynchronously. The next plan must not overwrite the buffer before that copy was made, so an event is recorded behind the
copies of a plan, and the next plan waits for it. The copies come first in a step: while one step runs and one is planned, the
event has passed. (Two wrappers in turn would not do: a graph holds the addresses of one.) The schedule on the device, the float
workspace and the page ids need no such care: one stream writes and reads them in order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from common.ids import Int64Array
from engine.kv_memory import KVMemory
from engine.ports import LayerAttention, Segment, StepTokens
from engine.torch_kernels import Kernels

PrefillKernels = Literal["fa2", "fa3"]
GRAPH_PLAN_BYTES = 2**20
"""The schedule of a decode step in a graph takes 13 bytes for each tile and 4 for each row, of at most 4,096 rows."""
_TILE, _LONG_CONTEXT = 128, 4_096
"""Queries of one block of FA3, and the tokens of a context that are worth sharing between blocks."""
_LEAST_WORKSPACE_BYTES = 2**27
"""What FlashInfer recommends."""


class FlashInfer(Protocol):
    """What is used of the package `flashinfer`, whose module is one of these."""

    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> Callable[..., Any]: ...

    @property
    def BatchDecodeWithPagedKVCacheWrapper(self) -> Callable[..., Any]: ...

    @property
    def fast_decode_plan(self) -> Callable[..., None]: ...


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What attention must handle."""

    memory: KVMemory
    query_heads: int
    layers: Sequence[LayerAttention]
    """How each layer attends."""
    dtype: torch.dtype
    """The dtype of queries and results."""
    max_rows: int
    """Most decode rows of a step."""
    pages_per_row: int
    """Most pages of a row."""
    prefill: PrefillKernels | None = None
    """Which of FlashInfer's kernels compute chunks; None: the fastest that can be had. FA3 leaves some to FA2."""


class _Largest(Tensor):
    """Numbers on the host, of which Python sees the largest alone. FlashInfer 0.6.4 asks Python's `max` for the longest context,
    which would make a tensor of each: half a millisecond for 256 rows."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.amax(),))


class _Shared:
    """What all plans of one pool have in common: the arguments of FlashInfer's calls and the workspaces."""

    def __init__(self, needs: AttentionNeeds, kernels: Kernels, library: FlashInfer) -> None:
        self.memory, self.needs, self.kernels, self.library = needs.memory, needs, kernels, library
        memory = needs.memory
        self.device = memory.pool.device
        self.distinct = tuple(dict.fromkeys(needs.layers))
        layout = memory.layout
        self.heads = (needs.query_heads, layout.kv_heads, layout.head_dim, layout.page_size)
        """What `plan` takes by position behind the lists of pages."""
        self.tensor_cores = decodes_on_tensor_cores(needs.query_heads // layout.kv_heads, memory.pool.dtype)
        self.multiprocessors = _multiprocessors(self.device)
        workspace_bytes = float_workspace_bytes(needs, self.multiprocessors)
        self.workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=self.device)
        """All wrappers share it, because kernels use it one after the other. FlashInfer wants it zeroed once."""

    def named(self, how: LayerAttention) -> dict[str, object]:
        """What every `plan` takes by name. FlashInfer counts a window without the token itself."""
        return {
            "window_left": -1 if how.window is None else how.window - 1,
            "logits_soft_cap": how.softcap,
            "sm_scale": how.scale,
            "q_data_type": self.needs.dtype,
            "kv_data_type": self.memory.pool.dtype,
        }

    def on_host(self, *arrays: Int64Array) -> Tensor:
        """The arrays one behind the other, int32 in pinned memory. torch reuses that memory once the copies from it were made."""
        numbers = torch.empty(sum(len(array) for array in arrays), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        np.concatenate(arrays, out=numbers.numpy(), casting="same_kind")
        return numbers

    def decode_wrapper(self, **graph: object) -> Any:
        return self.library.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "HND", use_tensor_cores=self.tensor_cores, backend="fa2", **graph
        )

    def pages_before(self, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Index pointers [rows + 1] and last page lengths [rows] of rows of these lengths."""
        page_size = self.memory.layout.page_size
        indptr = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(-(-lengths // page_size), out=indptr[1:])
        return indptr, (lengths - 1) % page_size + 1


class FlashInferAttention:
    """Implements `Attention` for any step. Takes half-precision queries over pages of the same dtype or of FP8."""

    def __init__(self, needs: AttentionNeeds, kernels: Kernels, library: FlashInfer) -> None:
        self._shared = shared = _Shared(needs, kernels, library)
        self._copied = _Copied(shared.device)
        self._prefills = {
            kind: {
                how: library.BatchPrefillWithPagedKVCacheWrapper(shared.workspace, "HND", backend=kind) for how in shared.distinct
            }
            for kind in dict.fromkeys((needs.prefill, "fa2"))
        }
        self._prefill = self._prefills["fa2"]
        self._decode = {how: shared.decode_wrapper() for how in shared.distinct}
        self._decode_begin = 0
        self._graph_buffers: _GraphBuffers | None = None

    def plan(self, step: StepTokens) -> None:
        self._plan(step, "fa2" if self._shares_contexts(step.chunks) else self._shared.needs.prefill)

    def _plan(self, step: StepTokens, prefill: PrefillKernels | None) -> None:
        self._copied.wait()
        self._decode_begin = step.chunks[-1].end if step.chunks else 0
        self._prefill, shared = self._prefills[prefill], self._shared
        if step.chunks:
            queries = shared.on_host(np.array([0, *(chunk.end for chunk in step.chunks)]))
            rows = shared.on_host(np.array([chunk.row for chunk in step.chunks])).to(shared.device, non_blocking=True).long()
            contexts = np.array([chunk.context for chunk in step.chunks])
            pages, lengths = self._pages(step.table, rows, contexts), shared.on_host(contexts).as_subclass(_Largest)
            for how, wrapper in self._prefill.items():
                wrapper.plan(queries, *pages, *shared.heads, causal=True, seq_lens=lengths, **shared.named(how))
        if len(step.host_lengths):
            pages = self._pages(step.table, step.decode_rows, step.host_lengths)
            lengths = shared.on_host(step.host_lengths).as_subclass(_Largest)
            for how, wrapper in self._decode.items():
                wrapper.plan(*pages, *shared.heads, seq_lens=lengths, **shared.named(how))
        self._copied.record()

    def _shares_contexts(self, chunks: Sequence[Segment]) -> bool:
        """Whether FA2 is faster. It lets several blocks read a part of a long context each, and reads it once for all query heads
        of a KV head. FA3 does neither (`PrefillSM90Plan` in flashinfer/attention/scheduler.cuh): few new tokens over a long
        context, as in each turn of a chat, would leave most of the GPU idle."""
        tiles = sum(-(-(chunk.end - chunk.begin) // _TILE) for chunk in chunks) * self._shared.needs.query_heads
        is_long = any(chunk.context >= _LONG_CONTEXT for chunk in chunks)
        return is_long and tiles < 2 * self._shared.multiprocessors

    def run(self, layer: int, query: Tensor) -> Tensor:
        how, views, begin = self._shared.needs.layers[layer], self._shared.memory.layers[layer], self._decode_begin
        query = query.contiguous()
        out = torch.empty_like(query)
        if begin:
            self._prefill[how].run(query[:begin], views, out=out[:begin])
        if begin < len(query):
            self._decode[how].run(query[begin:], views, out=out[begin:])
        return out

    def load_kernels(self) -> None:
        """Plan and run one chunk and one decode row of one token each, for each way in which layers attend, so that FlashInfer
        compiles and loads all its kernels. Raises what it fails with, RuntimeError as a rule. Reads the pool's spare page."""
        shared = self._shared
        device, spare_page = shared.device, shared.memory.total_pages
        table = torch.full((1, 1), spare_page, dtype=torch.int32, device=device)
        one, row = torch.ones(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        query = torch.zeros(2, shared.needs.query_heads, shared.memory.layout.head_dim, dtype=shared.needs.dtype, device=device)
        for kind in self._prefills:
            self._plan(StepTokens([Segment(0, 1, 0, 1, 0)], table, row, one, np.ones(1, dtype=np.int64)), kind)
            for how in shared.distinct:
                self.run(shared.needs.layers.index(how), query)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # kernels fail when they run

    def for_graph(self, rows: int) -> "FlashInferDecodeGraph":
        if self._graph_buffers is None:
            self._graph_buffers = _GraphBuffers(self._shared)
        return FlashInferDecodeGraph(self._shared, self._graph_buffers, rows)

    def _pages(self, table: Tensor, rows: Tensor, lengths: Int64Array) -> tuple[Tensor, Tensor, Tensor]:
        """The pages that some rows read, as `plan` takes them: index pointers, [rows + 1] int32 on the host, page ids on the
        device, and last page lengths, [rows] int32 on the host. rows: [rows] int64. lengths: [rows] int64, of their contexts."""
        shared = self._shared
        indptr, last = torch.split(shared.on_host(*shared.pages_before(lengths)), [len(lengths) + 1, len(lengths)])
        indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=shared.device)
        shared.kernels.page_indices(table, rows, indptr.to(shared.device, non_blocking=True), indices)
        return indptr, indices, last


class _GraphBuffers:
    """What the graphs of all batch sizes share, because their replays follow each other: the page ids, [max_rows * pages_per_row]
    int32, and a schedule for each way in which layers attend."""

    def __init__(self, shared: _Shared) -> None:
        most = shared.needs.max_rows * shared.needs.pages_per_row
        self.indices = torch.zeros(most, dtype=torch.int32, device=shared.device)
        self.schedules = {how: torch.zeros(GRAPH_PLAN_BYTES, dtype=torch.uint8, device=shared.device) for how in shared.distinct}


class FlashInferDecodeGraph:
    """Implements `Attention` for steps of exactly `rows` decode rows. `run` may be captured: it reads the same buffers each
    time, and FlashInfer starts the same kernels for one batch size. `plan` fills the buffers and stays outside of the graph."""

    def __init__(self, shared: _Shared, buffers: _GraphBuffers, rows: int) -> None:
        self._shared, self._rows = shared, rows
        self._copied = _Copied(shared.device)
        self._numbers = torch.zeros(2 * rows + 1, dtype=torch.int32, device=shared.device)
        self._indptr, last_page_len = torch.split(self._numbers, [rows + 1, rows])
        self._indices = buffers.indices
        self._planned = False
        self._wrappers = {
            how: shared.decode_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self._indptr,
                paged_kv_indices_buffer=self._indices,
                paged_kv_last_page_len_buffer=last_page_len,
            )
            for how in shared.distinct
        }
        for how, wrapper in self._wrappers.items():
            wrapper.reset_workspace_buffer(shared.workspace, buffers.schedules[how])

    def plan(self, step: StepTokens) -> None:
        """The first time by FlashInfer's `plan`, which loads the kernels; then by its faster form, which does not copy the lists,
        because they are in the buffers already."""
        assert not step.chunks and len(step.host_lengths) == self._rows, "a graph is for decode rows of its batch size"
        self._copied.wait()
        shared = self._shared
        numbers = shared.on_host(*shared.pages_before(step.host_lengths))
        self._numbers.copy_(numbers, non_blocking=True)
        indptr, last = torch.split(numbers, [self._rows + 1, self._rows])
        indices = self._indices[: int(indptr[-1])]
        shared.kernels.page_indices(step.table, step.decode_rows, self._indptr, indices)
        for how, wrapper in self._wrappers.items():
            if self._planned:
                shared.library.fast_decode_plan(
                    wrapper, self._indptr, indices, last, *shared.heads, **shared.named(how), global_override_indptr_cpu=indptr
                )
            else:
                wrapper.plan(indptr, indices, last, *shared.heads, **shared.named(how))
        self._planned = True
        self._copied.record()

    def run(self, layer: int, query: Tensor) -> Tensor:
        query = query.contiguous()
        out = torch.empty_like(query)
        shared = self._shared
        self._wrappers[shared.needs.layers[layer]].run(query, shared.memory.layers[layer], out=out)
        return out

    def for_graph(self, rows: int) -> None:
        """None: it is one."""


class _Copied:
    """The point on the device behind the copies that a plan started. On CPU nothing is in flight."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Returns at once if nothing was recorded."""
        if self._event is not None:
            self._event.synchronize()


def decodes_on_tensor_cores(group: int, kv_dtype: torch.dtype) -> bool:
    """Whether decode rows run on tensor cores, where a tile holds the query heads of one KV head. It pays from 4 of them on, and
    for FP8 pages (SGLang chooses alike). FlashInfer's other kernel knows groups of 1, 2, 3, 4 and 8 heads only."""
    return group >= 4 or kv_dtype == torch.float8_e4m3fn


def float_workspace_bytes(needs: AttentionNeeds, multiprocessors: int) -> int:
    """Bytes for the partial results of contexts that several blocks share: for each query head, tile and token of the tile a
    value and a sum, in float32. From `PrefillPlan` and `DecodePlan` in flashinfer/attention/scheduler.cuh, which raise if it is
    short.
    """
    layout = needs.memory.layout
    group = needs.query_heads // layout.kv_heads
    per_head = 4 * (layout.head_dim + 1) * needs.query_heads
    split = 2 * multiprocessors // layout.kv_heads  # two blocks on each, for one KV head
    tiles = split * _TILE  # of FA2 on chunks; decode on CUDA cores takes 16 values for each multiprocessor
    if decodes_on_tensor_cores(group, needs.memory.pool.dtype):
        tile = 16 if group <= 16 else 64 if group <= 64 else 128
        tiles = max(tiles, (-(-needs.max_rows * group // tile) + needs.max_rows - 1) * tile)
    return max(_LEAST_WORKSPACE_BYTES, per_head * tiles + 2**16)


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
