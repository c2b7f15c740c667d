"""Runs of bytes, [n, 3] int64 rows of (source offset, target offset, bytes): merges runs and cuts them into slices.

Knows neither pages nor layouts; `kv_transfer/planner.py` makes the runs.
"""

import numpy as np

from common.ids import Int64Array


def merge_runs(runs: Int64Array) -> Int64Array:
    """The same bytes in fewer runs: neighbours that continue each other on both sides become one run."""
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


def slice_runs(runs: Int64Array, slice_bytes: int) -> list[Int64Array]:
    """The same bytes in slices of at most `slice_bytes`, in order. A run that crosses the end of a slice is cut there."""
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
