"""The KV memory: one page-major tensor, and a strided view of it per layer.

Owns the bytes of the pool. Does not know how many pages there should be (`kv_budget.py`) or which are free
(`common/pages/pool.py`).
"""

import torch
from torch import Tensor

from common.errors import ConfigError
from common.ids import Int32Array
from common.pages.digest import digest
from common.pages.layout import ITEM_BYTES, KVLayout, MemoryRegion


class KVMemory:
    """The pool of one rank. layout: what a page holds. device: a torch device. Raises ConfigError when it is not to be had."""

    def __init__(self, layout: KVLayout, total_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.total_pages = total_pages
        dtype = _dtype_of(layout)
        shape = (total_pages, layout.page_bytes // ITEM_BYTES[layout.dtype])
        try:
            self.pool = torch.zeros(shape, dtype=dtype, device=device)
            """[pages, elements of a page]"""
        except RuntimeError as error:  # torch's way to say that memory is short, on CPU and (as a subclass) on CUDA
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"--kv-memory: {total_pages * layout.page_bytes} bytes for KV pages are not to be had on {device}: {reason}"
            ) from error
        self.region = MemoryRegion(
            address=self.pool.data_ptr(), region_bytes=total_pages * layout.page_bytes, device=_region_device(device)
        )

    def view(self, layer: int, value: bool) -> Tensor:
        """One layer's keys (or values): [pages, kv_heads, page_size, head_dim], strided over the pool."""
        layout = self.layout
        layer_stride, kind_stride, head, token, dim = layout.strides
        offset = layer * layer_stride + int(value) * kind_stride
        size = (self.total_pages, layout.kv_heads, layout.page_size, layout.head_dim)
        return self.pool.as_strided(size, (self.pool.stride(0), head, token, dim), offset)

    def digest_pages(self, pages: Int32Array) -> bytes:
        """As `Executor.digest_pages`. Copies no page that lies in host memory, and one after the other from a device."""
        memory = self.pool.view(torch.uint8)
        return digest(memory[page].cpu().numpy() for page in pages.tolist())


def _dtype_of(layout: KVLayout) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "uint8": torch.uint8}[layout.dtype]


def _region_device(device: torch.device) -> str:
    return f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"
