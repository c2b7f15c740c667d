"""Decode attention by the small C kernel, called through ctypes.

Owns the call. Does not know models or rows. Without a compiler there is no kernel, and the caller uses torch.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor, empty, empty_like, float32

from common.engine.native.build import load

SOURCE = Path(__file__).with_name("paged_attention.c")


class PagedAttentionKernel:
    """Decode attention in C. threads: how many threads share the rows."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._function = library.paged_attention
        self._function.restype = ctypes.c_int
        pointers, sizes, counts = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 6, [ctypes.c_int] * 4
        self._function.argtypes = [*pointers, *sizes, *counts, ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p]
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "attention") if threads > 1 else None

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """query: [rows, heads, dim] float32. keys, values: a layer's views [pages, kv_heads, page_size, dim] float32.

        page_table: [rows, pages] int32. lengths: [rows] int64, this step's token included. window: most tokens that a row sees;
        None: all. Returns [rows, heads, dim].
        """
        query = query.contiguous()
        out = empty_like(query)
        rows, heads, dim = query.shape
        kv_heads, page_size = keys.shape[1], keys.shape[2]

        def run(part: tuple[int, int]) -> None:
            scores = empty(page_size, dtype=float32)
            status = self._function(
                query.data_ptr(), keys.data_ptr(), values.data_ptr(), page_table.data_ptr(), lengths.data_ptr(), part[0], part[1],
                page_table.stride(0), keys.stride(0), keys.stride(1), window or 0, heads, kv_heads, page_size, dim, scale,
                scores.data_ptr(), out.data_ptr(),
            )  # fmt: skip
            assert status == 0, "the kernel refuses these shapes"

        if self._pool is None or rows == 1:
            run((0, rows))
            return out
        step = -(-rows // self._threads)
        list(self._pool.map(run, [(begin, min(rows, begin + step)) for begin in range(0, rows, step)]))
        return out


def load_kernel(threads: int) -> PagedAttentionKernel | None:
    """None where there is no library."""
    library = load(SOURCE)
    return None if library is None else PagedAttentionKernel(library, threads)
