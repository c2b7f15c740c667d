"""CUDA graphs of the decode step: one for each of a ladder of batch sizes, replayed by the host as one launch.

Owns the ladder and how a graph is captured. Does not know what a step computes. Source: CUDA C++ Programming Guide,
"CUDA Graphs".
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from common.errors import ConfigError

Replay = Callable[[], None]


class GraphMaker(Protocol):
    """Captures what a function starts on the device, so that it can be started again at once, on the same storage."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """run: called a few times; it must start the same kernels on the same tensors each time, and wait for none of them.
        Returns a callable that starts them again."""


class CudaGraphs:
    """Implements `GraphMaker`. All graphs share one memory pool, because they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Replay:
        stream = torch.cuda.current_stream()
        run()  # libraries make their handles, and Triton compiles, at the first call
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            # torch 2.13 leaves its allocator waiting for the end of a capture that CUDA has ended: no memory would go back.
            with contextlib.suppress(RuntimeError):  # where it does not wait, it says so
                torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
            first = error.__context__  # torch ends the capture behind it, which fails with what came of it
            if isinstance(first, RuntimeError):
                raise first from None
            raise
        return graph.replay


def ladder(asked: str, max_rows: int) -> tuple[int, ...]:
    """The batch sizes of the graphs, ascending, up to max_rows. asked: "auto" or sizes such as "1,2,4,8". Raises ConfigError.

    auto: steps of one eighth to a half of the size, so that padding wastes little: 1, 2, 4, 8, 16, 24, …, 64, 80, …, 256, 288, …
    """
    if asked == "auto":
        steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
        return (*(size for size in steps if size < max_rows), max_rows)
    try:
        sizes = sorted({int(size) for size in asked.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"--graph-sizes must be auto or batch sizes such as 1,2,4,8; it is {asked!r}")
    if sizes[-1] > max_rows:
        raise ConfigError(f"--graph-sizes: {sizes[-1]} is more than --max-running {max_rows}")
    return tuple(sizes)


def fitting(sizes: Sequence[int], rows: int) -> int | None:
    """The smallest of the ascending sizes that holds so many rows; None if none does."""
    return next((size for size in sizes if size >= rows), None)
