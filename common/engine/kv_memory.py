"""The KV memory: one page-major tensor, and a strided view of it per layer.

Owns the bytes of the pool and how many pages fit. Does not know which pages are free (`common/pages/pool.py`).
"""

from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError
from common.pages.layout import ITEM_BYTES, KVLayout, MemoryRegion

_CPU_SHARE, _CPU_MOST = 0.2, 2**30
_CUDA_SHARE = 0.85


class KVMemory:
    """The pool of one rank. layout: what a page holds. device: a torch device."""

    def __init__(self, layout: KVLayout, total_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.total_pages = total_pages
        dtype = _dtype_of(layout)
        self.pool = torch.zeros(total_pages, layout.page_bytes // ITEM_BYTES[layout.dtype], dtype=dtype, device=device)
        """[pages, elements of a page]"""
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


def count_pages(layout: KVLayout, kv_bytes: int | None, device: torch.device, context_tokens: int) -> int:
    """Pages that fit `kv_bytes`; with None, into a share of what is free. Raises ConfigError when one context does not fit."""
    if kv_bytes is None:
        kv_bytes = _free_bytes(device)
    pages = kv_bytes // layout.page_bytes
    needed = layout.pages_for(context_tokens)
    if pages < needed:
        raise ConfigError(
            f"--kv-memory gives {pages} pages of {layout.page_bytes} bytes, but one context of {context_tokens} tokens takes "
            f"{needed}: give it at least {needed * layout.page_bytes} bytes"
        )
    return int(pages)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    return int(min(_CPU_MOST, available * _CPU_SHARE))


def _dtype_of(layout: KVLayout) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "uint8": torch.uint8}[layout.dtype]


def _region_device(device: torch.device) -> str:
    return f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"
