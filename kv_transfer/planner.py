"""The planner: turns the page ids of two pools into runs of bytes.

Owns the arithmetic between pages, heads, layers and byte offsets, and checks pools and page ids. Knows layouts. Does not know
transports or requests.

Instances may differ in tensor parallelism. The pages of a rank hold a range of the model's KV heads (`heads_of`), and a source
rank writes to a target rank the heads that both hold. With more ranks than heads, several neighbouring ranks hold the same head,
and `writers` says which of them writes to whom.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np

from common.errors import TransferError
from common.ids import Int32Array, Int64Array
from common.messages import PoolDescriptor
from common.pages.layout import ITEM_BYTES, KVLayout, heads_of
from kv_transfer.transport import merge_runs


@dataclass(frozen=True, slots=True)
class PageSlice:
    """What the pages of one rank hold: the model's heads [first_head, first_head + layout.kv_heads), in this layout."""

    layout: KVLayout
    first_head: int = 0

    @classmethod
    def of(cls, pool: PoolDescriptor) -> Self:
        return cls(pool.layout, pool.first_head)

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.layout.kv_heads)


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The model's heads that the rank `source` writes to the rank `target`."""

    source: int
    target: int
    heads: range


def writers(source_ranks: int, target_ranks: int, kv_heads: int) -> list[HeadRange]:
    """Which source rank writes which heads to which target rank. Each target rank gets each of its heads exactly once, and source
    ranks that hold the same head share the work."""
    plan: list[HeadRange] = []
    replicas = max(1, source_ranks // kv_heads)
    for target in range(target_ranks):
        wanted = heads_of(target, target_ranks, kv_heads)
        for source in range(target % replicas, source_ranks, replicas):
            heads = shared_heads(heads_of(source, source_ranks, kv_heads), wanted)
            if heads:
                plan.append(HeadRange(source, target, heads))
    return plan


def shared_heads(ours: range, theirs: range) -> range:
    """The heads in both ranges; may be empty."""
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))


def plan_runs(
    source_pages: Int32Array, target_pages: Int32Array, source: PageSlice, target: PageSlice, layers: range | None = None
) -> Int64Array:
    """The byte runs that copy the heads held by both from source_pages[i] to target_pages[i], in the order of the pages. Runs
    that are contiguous on both sides are merged.

    source_pages, target_pages: [pages] int32. layers: which to copy; None: all. Returns [runs, 3] int64: source offset, target
    offset, bytes, from the pools' bases. The layouts differ in no field that `mismatch` names but the order. Raises TransferError
    when page counts differ.
    """
    if len(source_pages) != len(target_pages):
        raise TransferError(f"{len(source_pages)} source pages for {len(target_pages)} target pages")
    within = _runs_of_a_page(source, target, range(source.layout.layers) if layers is None else layers)
    runs = np.empty((len(source_pages), len(within), 3), dtype=np.int64)
    np.multiply(source_pages[:, None], np.int64(source.layout.page_bytes), out=runs[:, :, 0])
    np.multiply(target_pages[:, None], np.int64(target.layout.page_bytes), out=runs[:, :, 1])
    runs[:, :, :2] += within[:, :2]
    runs[:, :, 2] = within[:, 2]
    return merge_runs(runs.reshape(-1, 3))


@lru_cache(maxsize=1024)
def _runs_of_a_page(source: PageSlice, target: PageSlice, layers: range) -> Int64Array:
    """[runs, 3] int64, from the start of the page: a block for each layer, key or value, and head held by both; then merged."""
    ours = source.layout
    heads = shared_heads(source.heads, target.heads)
    layer, part, head = np.meshgrid(
        np.arange(layers.start, layers.stop), np.arange(2), np.arange(heads.start, heads.stop), indexing="ij"
    )
    blocks = np.stack([_block_offsets(source, layer, part, head), _block_offsets(target, layer, part, head)], axis=-1).reshape(
        -1, 2
    )
    lengths = np.full((len(blocks), 1), ours.page_size * ours.slot_bytes, dtype=np.int64)
    runs = np.concatenate([blocks, lengths], axis=1)
    return merge_runs(runs[np.argsort(runs[:, 0], kind="stable")])


def _block_offsets(held: PageSlice, layer: Int64Array, part: Int64Array, head: Int64Array) -> Int64Array:
    """The byte offset of each block [page_size, head_dim] within the page."""
    layer_stride, part_stride, head_stride, _, _ = held.layout.strides
    elements = layer * layer_stride + part * part_stride + (head - held.first_head) * head_stride
    offsets: Int64Array = elements * ITEM_BYTES[held.layout.dtype]
    return offsets


def mismatch(ours: KVLayout, theirs: KVLayout) -> str | None:
    """The first field but kv_heads in which two layouts differ, with both values; None when they are equal."""
    for name in KVLayout.__struct_fields__:
        if name != "kv_heads" and getattr(ours, name) != getattr(theirs, name):
            return f"{name} is {getattr(theirs, name)} there and {getattr(ours, name)} here"
    return None


def check_pages(pages: Int32Array, total_pages: int, whose: str) -> None:
    """Raises TransferError unless every id is a page of the pool."""
    if len(pages) and (pages.min() < 0 or pages.max() >= total_pages):
        raise TransferError(f"page ids between {pages.min()} and {pages.max()} are not all in {whose} pool of {total_pages}")


def check_pool(pool: PoolDescriptor) -> None:
    """Raises TransferError unless every byte of the pool has an address, on a known kind of device."""
    if not pool.is_addressable:
        raise TransferError(f"invalid pool of {pool.total_pages} pages at address {pool.address}")
    if not pool.has_known_device:
        raise TransferError(f"its device {pool.device!r} is neither cpu nor cuda:N")
