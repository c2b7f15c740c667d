"""The planner: page ids of two pools, and what each of them holds of a page, to runs of bytes.

Owns the arithmetic between pages, heads, layers and byte offsets. Knows layouts. Does not know transports, requests or devices.

Instances may differ in tensor parallelism: a rank's page holds a range of the model's KV heads, and a source rank writes to a
target rank the heads that both hold. With more ranks than heads each head is held by several ranks in a row, and `writers` says
which of them writes to whom.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from common.errors import TransferError
from common.ids import Int32Array, Int64Array
from common.pages.layout import KVLayout


@dataclass(frozen=True, slots=True)
class PageSlice:
    """What the pages of one rank hold: heads [first_head, first_head + layout.kv_heads) of the model's, in this layout."""

    layout: KVLayout
    first_head: int = 0

    @property
    def end_head(self) -> int:
        return self.first_head + self.layout.kv_heads


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads [first, end) of the model's that `source` writes to `target`; both are ranks."""

    source: int
    target: int
    first: int
    end: int


def heads_of(rank: int, ranks: int, kv_heads: int) -> range:
    """The KV heads that a tensor-parallel rank holds: a share of them, or one that several ranks hold.

    Raises TransferError unless one number divides the other. A latent cache (MLA) is one head that every rank holds.
    """
    if ranks <= kv_heads and kv_heads % ranks == 0:
        share = kv_heads // ranks
        return range(rank * share, (rank + 1) * share)
    if ranks % kv_heads == 0:
        head = rank * kv_heads // ranks
        return range(head, head + 1)
    raise TransferError(f"{kv_heads} KV heads cannot be divided among {ranks} ranks")


def writers(source_ranks: int, target_ranks: int, kv_heads: int) -> list[HeadRange]:
    """Who writes what to whom, so that each target rank gets each of its heads exactly once, and replicas share the work."""
    plan: list[HeadRange] = []
    replicas = max(1, source_ranks // kv_heads)
    for target in range(target_ranks):
        wanted = heads_of(target, target_ranks, kv_heads)
        for source in range(target % replicas, source_ranks, replicas):
            held = heads_of(source, source_ranks, kv_heads)
            first, end = max(wanted.start, held.start), min(wanted.stop, held.stop)
            if first < end:
                plan.append(HeadRange(source, target, first, end))
    return plan


def plan_runs(
    source_pages: Int32Array, target_pages: Int32Array, source: PageSlice, target: PageSlice, layers: range | None = None
) -> Int64Array:
    """The byte runs that copy source_pages[i] to target_pages[i], as far as both hold the same heads; in order of pages, merged
    where both sides are contiguous.

    source_pages, target_pages: [pages] int32. layers: only these; None: all. Returns [runs, 3] int64: source offset, target
    offset, bytes, from the pools' bases. Raises TransferError when pages do not pair or layouts differ in more than heads.
    """
    if len(source_pages) != len(target_pages):
        raise TransferError(f"{len(source_pages)} source pages for {len(target_pages)} target pages")
    within = _runs_of_a_page(source, target, range(source.layout.layers) if layers is None else layers)
    runs = np.empty((len(source_pages), len(within), 3), dtype=np.int64)
    np.multiply(source_pages[:, None], np.int64(source.layout.page_bytes), out=runs[:, :, 0])
    np.multiply(target_pages[:, None], np.int64(target.layout.page_bytes), out=runs[:, :, 1])
    runs[:, :, :2] += within[:, :2]
    runs[:, :, 2] = within[:, 2]
    return _merged(runs.reshape(-1, 3))


@lru_cache(maxsize=1024)
def _runs_of_a_page(source: PageSlice, target: PageSlice, layers: range) -> Int64Array:
    """[runs, 3] int64: the blocks of one layer, key or value and head that both hold, merged, from the page's beginning."""
    ours, theirs = source.layout, target.layout
    for name in ("layers", "head_dim", "page_size", "dtype"):
        if getattr(ours, name) != getattr(theirs, name):
            raise TransferError(f"{name} is {getattr(theirs, name)} there and {getattr(ours, name)} here")
    first, end = max(source.first_head, target.first_head), min(source.end_head, target.end_head)
    layer, part, head = np.meshgrid(
        np.arange(layers.start, layers.stop), np.arange(2), np.arange(first, max(first, end)), indexing="ij"
    )
    blocks = np.stack([_block_offsets(source, layer, part, head), _block_offsets(target, layer, part, head)], axis=-1).reshape(
        -1, 2
    )
    lengths = np.full((len(blocks), 1), ours.page_size * ours.slot_bytes, dtype=np.int64)
    runs = np.concatenate([blocks, lengths], axis=1)
    return _merged(runs[np.argsort(runs[:, 0], kind="stable")])


def _block_offsets(held: PageSlice, layer: Int64Array, part: Int64Array, head: Int64Array) -> Int64Array:
    """Byte offset in the page of each block [page_size, head_dim]."""
    layer_stride, part_stride, head_stride, _, _ = held.layout.strides
    elements = layer * layer_stride + part * part_stride + (head - held.first_head) * head_stride
    offsets: Int64Array = elements * (held.layout.slot_bytes // held.layout.head_dim)
    return offsets


def _merged(runs: Int64Array) -> Int64Array:
    """Neighbours that continue each other on both sides become one run."""
    is_start = np.ones(len(runs), dtype=bool)
    ends = runs[:-1, :2] + runs[:-1, 2:]
    np.not_equal(ends[:, 0], runs[1:, 0], out=is_start[1:])
    is_start[1:] |= ends[:, 1] != runs[1:, 1]
    starts = np.flatnonzero(is_start)
    if len(starts) == len(runs):
        return runs
    merged = runs[starts]
    merged[:, 2] = np.add.reduceat(runs[:, 2], starts)
    return merged
