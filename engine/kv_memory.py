"""The KV memory: one page-major tensor, strided views of it per layer, and what a device has left for it.

Owns the bytes of the pool, and the figures of torch's allocator. Rows that only fill a batch write to its spare page. Does not
know how many pages there should be (`kv_budget.py`) or which are free (`common/pages/pool.py`).
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import MemoryShort, first_line
from common.host import host_memory_now
from common.ids import Int32Array
from common.pages.host_memory import digest, host_memory
from common.pages.layout import ITEM_BYTES, SPARE_PAGES, KVDtype, KVLayout, MemoryRegion
from engine.kv_budget import gib


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
            reason = first_line(error)
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
    found: torch.dtype = getattr(torch, name)
    return found


def _region_device(device: torch.device) -> str:
    return f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"


_KEPT_SHARE, _KEPT_BYTES = 0.02, 2**30
"""What stays free of an instance's part of the device, whichever is more: for fragmentation, and for what comes late: buffers of
UCX and NCCL, and the code of kernels that CUDA loads when they are first used. These do not shrink with the card."""
_CONTEXT_BYTES = 2**30
"""What CUDA takes per process beside what torch allocates: its context, the code of cuBLAS, FlashInfer and Triton, and graphs."""


def total_bytes(device: torch.device) -> int:
    """The whole memory of a device; on CPU the host's."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_memory_now().total_bytes


class KVMemoryMeter:
    """What `--kv-memory auto` stands for on CUDA. Make it when the weights are loaded; then run the largest steps on a small
    pool, and see what is left.

    sharers: instances on the device. Each has an equal part of the whole memory for its weights, steps and pages. They start side
    by side, so what is free now would depend on who asks first: then only torch's own memory is measured.
    """

    def __init__(self, device: torch.device, sharers: int) -> None:
        self._device = device
        self._sharers = sharers
        _return_cache(device)
        self._before_bytes = self._taken_bytes()

    def left_bytes(self) -> int:
        """What may still be allocated."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return max(0, min(free_bytes, total_bytes // self._sharers - self._taken_bytes()))

    def peak_bytes(self) -> int:
        """The most that was allocated at a time since the meter was made: torch keeps what steps gave back. Ask before a graph is
        captured, because a capture makes torch give it back."""
        return self._taken_bytes() - self._before_bytes

    def held_bytes(self) -> int:
        """What was allocated since the meter was made and is still in use."""
        _return_cache(self._device)
        return self._taken_bytes() - self._before_bytes

    def left_for_pages(self, workspace_bytes: int, progress: Callable[[str], None]) -> int:
        """Bytes for pages, when steps take workspace_bytes besides them. Call it when nothing of the trial is referenced any
        more. Raises MemoryShort."""
        gc.collect()
        _return_cache(self._device)
        part_bytes = torch.cuda.mem_get_info(self._device)[1] // self._sharers
        taken_bytes, kept_bytes = self._taken_bytes(), max(_KEPT_BYTES, int(part_bytes * _KEPT_SHARE))
        kv_bytes = self.left_bytes() - workspace_bytes - kept_bytes
        part = "" if self._sharers == 1 else f" for each of {self._sharers} instances"
        figures = (
            f"{self._device} has {gib(part_bytes)}{part}: weights and what else is there take {gib(taken_bytes)}, steps and "
            f"graphs {gib(workspace_bytes)}, and {gib(kept_bytes)} stay free for libraries"
        )
        if kv_bytes <= 0:
            free_bytes = torch.cuda.mem_get_info(self._device)[0]
            raise MemoryShort(
                f"no memory is left for KV pages. {figures}; {gib(free_bytes)} are free now: free memory there, or lower "
                f"--chunk-tokens, --max-running or --context-tokens"
            )
        progress(f"{figures}; {gib(kv_bytes)} are left for KV pages")
        return kv_bytes

    def __str__(self) -> str:
        return f"weights and what else is on the device take {gib(self._before_bytes)}"

    def _taken_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        if self._sharers > 1:
            return torch.cuda.memory_reserved(self._device) + _CONTEXT_BYTES
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes


def _return_cache(device: torch.device) -> None:
    """Give back what torch keeps for later, else it counts as used."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
