"""The planner: page ids of two pools to runs of bytes.

Owns the arithmetic between page ids and byte offsets. Knows layouts. Does not know transports, requests or devices.
"""

import numpy as np

from common.errors import TransferError
from common.ids import Int32Array, Int64Array
from common.messages import PoolDescriptor
from common.pages.layout import KVLayout


def mismatch(ours: KVLayout, theirs: KVLayout) -> str | None:
    """The first field in which two layouts differ, with both values; None when pages of one fit the other."""
    for name in KVLayout.__struct_fields__:
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} is {getattr(theirs, name)} there and {getattr(ours, name)} here"
    return None


def check_pages(pages: Int32Array, total_pages: int, whose: str) -> None:
    """Raises TransferError unless every id is a page of the pool."""
    if len(pages) and (pages.min() < 0 or pages.max() >= total_pages):
        raise TransferError(f"page ids between {pages.min()} and {pages.max()} are not all in {whose} pool of {total_pages}")


def check_pool(pool: PoolDescriptor) -> None:
    """Raises TransferError unless every byte of the pool has an address, on a device that can be."""
    if pool.total_pages < 1 or not pool.is_addressable:
        raise TransferError(f"its pool of {pool.total_pages} pages at address {pool.address} cannot be")
    if not pool.has_known_device:
        raise TransferError(f"its device {pool.device!r} is neither cpu nor cuda:N")


def slice_runs(runs: Int64Array, slice_bytes: int) -> list[Int64Array]:
    """The same bytes in slices of at most `slice_bytes`, in order; a run that reaches into the next is cut."""
    ends = np.cumsum(runs[:, 2])
    if not len(runs) or ends[-1] <= slice_bytes:
        return [runs] if len(runs) else []
    starts = ends - runs[:, 2]
    first = starts // slice_bytes
    pieces = (ends - 1) // slice_bytes - first + 1
    index = np.repeat(np.arange(len(runs)), pieces)
    number = first[index] + np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(starts[index], number * slice_bytes)
    end = np.minimum(ends[index], (number + 1) * slice_bytes)
    offset = begin - starts[index]
    cut = np.stack([runs[index, 0] + offset, runs[index, 1] + offset, end - begin], axis=1)
    return np.split(cut, np.flatnonzero(np.diff(number)) + 1)
