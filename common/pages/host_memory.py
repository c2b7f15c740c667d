"""The bytes of a pool of pages in host memory: their mapping, and their digests.

Owns the mapping, which is private, zeroed, and in huge pages where the system has them, and the format of a digest. Does not know
where pages lie or who compares digests. Copying between processes looks up every page of the system that it touches; a huge page
replaces 512 small ones, which makes it faster (docs/measurements/transports.md).
"""

import mmap
import sys
import zlib
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray


def digest(pages: Iterable[NDArray[np.uint8]]) -> bytes:
    """CRC-32 of each page, little-endian uint32, one after the other. pages: the bytes of each page, contiguous."""
    return np.array([zlib.crc32(page.data) for page in pages], dtype="<u4").tobytes()


def host_memory(size: int, huge_pages: bool = True) -> NDArray[np.uint8]:
    """[size] zeros. The system provides each page of them when it is first touched. Raises MemoryError."""
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error
    if huge_pages and sys.platform == "linux":
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)
