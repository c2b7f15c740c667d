"""The memory that pushes read and write: of the host, or of a GPU.

Owns the bytes. Knows where pages lie in them, and no way to push. Imports torch only for a GPU.
"""

import zlib
from typing import Any, Protocol, TypeAlias

import numpy as np

from common.errors import TransferError
from common.ids import Int32Array
from common.pages.host_memory import host_memory
from common.pages.layout import MemoryRegion

Memory: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Pool(Protocol):
    """Memory like that of an instance's pool."""

    @property
    def region(self) -> MemoryRegion: ...

    def fill(self) -> None:
        """Write numbers, of which no two are alike."""

    def checksum(self, pages: Int32Array, page_bytes: int) -> int:
        """CRC-32 of these pages, one after the other."""


class HostPool:
    """bytes: [pool_bytes] uint8. Every page of the system is already touched."""

    def __init__(self, pool_bytes: int, huge_pages: bool) -> None:
        self.bytes: Memory = host_memory(pool_bytes, huge_pages)
        self.bytes[:] = 0
        self.region = MemoryRegion(address=self.bytes.ctypes.data, region_bytes=pool_bytes, device="cpu")

    def fill(self) -> None:
        self.bytes.view(np.int64)[:] = np.arange(len(self.bytes) // 8)

    def checksum(self, pages: Int32Array, page_bytes: int) -> int:
        return zlib.crc32(self.bytes.reshape(-1, page_bytes)[pages].tobytes())


class DevicePool:
    """tensor: [pool_bytes] uint8 on a torch device. Raises TransferError when it cannot be had."""

    def __init__(self, pool_bytes: int, device: str) -> None:
        import torch

        try:
            self.tensor = torch.zeros(pool_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, AssertionError) as error:
            raise TransferError(f"no pool of {pool_bytes} bytes on {device}: {str(error).splitlines()[0]}") from error
        self.region = MemoryRegion(address=self.tensor.data_ptr(), region_bytes=pool_bytes, device=str(self.tensor.device))
        self._wait()

    def fill(self) -> None:
        import torch

        torch.arange(len(self.tensor) // 8, out=self.tensor.view(torch.int64))
        self._wait()

    def checksum(self, pages: Int32Array, page_bytes: int) -> int:
        import torch

        at = torch.from_numpy(pages.astype(np.int64)).to(self.tensor.device)
        return zlib.crc32(self.tensor.view(-1, page_bytes)[at].cpu().numpy().tobytes())

    def _wait(self) -> None:
        """A push is no work of torch's stream, so nothing of it may still run."""
        import torch

        if self.tensor.is_cuda:
            torch.cuda.current_stream(self.tensor.device).synchronize()


def make_pool(device: str, pool_bytes: int, huge_pages: bool) -> HostPool | DevicePool:
    """device: cpu, cuda or cuda:N. Raises TransferError."""
    return HostPool(pool_bytes, huge_pages) if device == "cpu" else DevicePool(pool_bytes, device)
