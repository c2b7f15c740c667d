"""The small C kernel: compiled by the system's compiler at first use, cached, and called through ctypes.

Owns the compiled library. Does not know models or rows. Without a compiler there is no kernel, and the caller uses torch.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor, empty, empty_like, float32

SOURCE = Path(__file__).with_name("paged_attention.c")
FLAGS = (
    *("-O3", "-march=native", "-shared", "-fPIC"),
    # These let the compiler vectorise sums. Not -ffast-math: a library linked with it turns off subnormal numbers in the process.
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-freciprocal-math"),
)
COMPILE_S = 60.0

_log = logging.getLogger(__name__)


class PagedAttentionKernel:
    """Decode attention in C. threads: how many threads share the rows."""

    def __init__(self, library: Path, threads: int) -> None:
        self._function = ctypes.CDLL(str(library)).paged_attention
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
    """The kernel, compiled now unless it is cached. Returns None, and logs why, when it cannot be compiled."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _log.warning("no C compiler: decode attention gathers pages with torch, which is slower")
        return None
    try:
        return PagedAttentionKernel(_compiled(compiler), threads)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the attention kernel could not be compiled (%s): decode attention gathers pages with torch", error)
        return None


def _compiled(compiler: str) -> Path:
    """The library for this source, these flags, this compiler and this processor."""
    cpu = Path("/proc/cpuinfo")
    model = next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "") if cpu.exists() else ""
    parts = (SOURCE.read_text(), *FLAGS, compiler, platform.machine(), model)
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
    library = folder / f"paged_attention-{name}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / library.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
        made.replace(library)  # atomic: two processes may compile at once
    return library
