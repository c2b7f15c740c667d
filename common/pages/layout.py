"""The layout of KV pages in memory: sizes and strides, in elements and bytes, and which KV heads a rank holds.

Owns the arithmetic, which the model and the planner of transfers share. Knows no tensors, devices or transports.

A pool is page-major: page `p` is the run of `page_bytes` bytes at `base + p * page_bytes`. Inside a page:

    order "layer":  [layer, 2, head, token, dim]        one layer is one run
    order "head":   [head, layer, 2, token, dim]        one slice of heads is one run
"""

from functools import cached_property
from typing import Literal

import msgspec

from common.errors import ConfigError, TransferError
from common.ranges import Count, Size


def heads_of(rank: int, ranks: int, kv_heads: int) -> range:
    """The KV heads that a tensor-parallel rank holds: a share of them, or one head that several ranks hold.

    A latent cache (MLA) is one head that every rank holds. Raises TransferError unless one number divides the other.
    """
    if ranks <= kv_heads and kv_heads % ranks == 0:
        share = kv_heads // ranks
        return range(rank * share, (rank + 1) * share)
    if ranks % kv_heads == 0:
        head = rank * kv_heads // ranks
        return range(head, head + 1)
    raise TransferError(f"{kv_heads} KV heads cannot be divided among {ranks} ranks")


PageOrder = Literal["layer", "head"]
KVDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8"]
ITEM_BYTES: dict[KVDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}
LAYOUT_VERSION = 1
SPARE_PAGES = 1
"""Pages behind a pool that are never given out: links are measured by writing there."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What two instances must agree on before one may write into the other's pages."""

    layers: Size
    kv_heads: Size
    head_dim: Size
    page_size: Size
    dtype: KVDtype
    order: PageOrder = "layer"
    version: Count = LAYOUT_VERSION

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; it is {getattr(self, name)}")

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's key (or value) in one layer and one head."""
        return self.head_dim * ITEM_BYTES[self.dtype]

    @cached_property
    def page_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.page_size * self.slot_bytes

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Element strides inside a page for (layer, key-or-value, head, token, dim)."""
        dim, token = 1, self.head_dim
        block = self.page_size * token
        if self.order == "layer":
            return 2 * self.kv_heads * block, self.kv_heads * block, block, token, dim
        return 2 * block, block, self.layers * 2 * block, token, dim

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)


class MemoryRegion(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a pool: `address` is a process address ("cpu") or a device address ("cuda:0")."""

    address: int
    region_bytes: int
    device: str
