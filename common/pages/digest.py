"""Digests of pages: CRC-32, little-endian uint32, one after the other.

Owns the format of a digest. Does not know where pages lie or who compares digests.
"""

import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def digest(pages: Iterable[NDArray[np.uint8]]) -> bytes:
    """pages: the bytes of each page, contiguous. Returns four bytes per page."""
    return np.array([zlib.crc32(page.data) for page in pages], dtype="<u4").tobytes()
