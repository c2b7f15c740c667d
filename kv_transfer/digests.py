"""Digests of pages: whether the pages that landed are the pages that were sent.

Owns the comparison. The digests themselves are the executor's (`Executor.digest_pages`): CRC-32, little-endian uint32.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from common.ids import Int32Array

Digest: TypeAlias = Callable[[Int32Array], bytes]
"""Computes the digests of some pages, concatenated."""


def corrupt_pages(sent: bytes, landed: bytes) -> int:
    """How many pages differ. A digest that is missing on either side counts as a difference."""
    pages = max(len(sent), len(landed)) // 4
    ours, theirs = (np.frombuffer(digests[: len(digests) // 4 * 4], dtype="<u4") for digests in (landed, sent))
    common = min(len(ours), len(theirs))
    return pages - int((ours[:common] == theirs[:common]).sum())
