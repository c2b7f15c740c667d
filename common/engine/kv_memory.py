"""The KV memory: one page-major tensor, and strided views of it per layer.

Owns the bytes of the pool. Rows that only fill a batch write to its spare page. Does not know how many pages there should be
(`kv_budget.py`) or which are free (`common/pages/pool.py`).
"""

import torch
from torch import Tensor

from common.errors import MemoryShort
from common.ids import Int32Array
from common.pages.digest import digest
from common.pages.host_memory import host_memory
from common.pages.layout import ITEM_BYTES, SPARE_PAGES, KVDtype, KVLayout, MemoryRegion


class KVMemory:
    """The pool of one rank. layout: what a page holds. device: a torch device. Raises MemoryShort."""

    def __init__(self, layout: KVLayout, total_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.total_pages = total_pages
        pages = total_pages + SPARE_PAGES
        region_bytes = pages * layout.page_bytes
        try:
            if device.type == "cpu":
                memory = torch.from_numpy(host_memory(region_bytes))
            else:
                memory = torch.zeros(region_bytes, dtype=torch.uint8, device=device)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory is short
            reason = str(error).strip().splitlines()[0]
            raise MemoryShort(f"--kv-memory: cannot allocate {region_bytes} bytes for KV pages on {device}: {reason}") from error
        self.pool = memory.view(torch_dtype(layout.dtype)).view(pages, layout.page_bytes // ITEM_BYTES[layout.dtype])
        """[pages, elements of a page]"""
        self.layers = [(self._view(layer, 0), self._view(layer, 1)) for layer in range(layout.layers)]
        """Keys and values of each layer, each [pages + SPARE_PAGES, kv_heads, page_size, head_dim], strided over the pool."""
        self.region = MemoryRegion(address=self.pool.data_ptr(), region_bytes=region_bytes, device=_region_device(device))

    def _view(self, layer: int, kind: int) -> Tensor:
        layout = self.layout
        layer_stride, kind_stride, head, token, dim = layout.strides
        offset = layer * layer_stride + kind * kind_stride
        size = (self.total_pages + SPARE_PAGES, layout.kv_heads, layout.page_size, layout.head_dim)
        return self.pool.as_strided(size, (self.pool.stride(0), head, token, dim), offset)

    def digest_pages(self, pages: Int32Array) -> bytes:
        """As `Executor.digest_pages`. Pages in host memory are not copied; those on a device are, one after the other."""
        memory = self.pool.view(torch.uint8)
        return digest(memory[page].cpu().numpy() for page in pages.tolist())


def torch_dtype(name: KVDtype) -> torch.dtype:
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "uint8": torch.uint8,
    }[name]


def _region_device(device: torch.device) -> str:
    return f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"
