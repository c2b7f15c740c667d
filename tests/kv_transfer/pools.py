"""The memory of an agent under test: of the host, or of a card.

Owns the bytes. Each call has ended when it returns, also on a card: a transport's copies are ordered behind no stream of torch.
Imports torch only for a card.
"""

from typing import Any, Protocol, TypeAlias

import numpy as np

from common.pages.layout import MemoryRegion

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Pool(Protocol):
    @property
    def region(self) -> MemoryRegion: ...

    def write(self, values: Bytes, start: int = 0) -> None: ...

    def wipe(self, value: int, start: int = 0, end: int | None = None) -> None:
        """Set every byte of a range."""

    def read(self, start: int = 0, end: int | None = None) -> Bytes:
        """A copy of a range."""


class HostPool:
    """device: what the region says. It is a lie in tests that need no card for what they refuse."""

    def __init__(self, pool_bytes: int, device: str = "cpu") -> None:
        self.bytes: Bytes = np.zeros(pool_bytes, dtype=np.uint8)
        self.region = MemoryRegion(address=int(self.bytes.ctypes.data), region_bytes=pool_bytes, device=device)

    def write(self, values: Bytes, start: int = 0) -> None:
        self.bytes[start : start + len(values)] = values

    def wipe(self, value: int, start: int = 0, end: int | None = None) -> None:
        self.bytes[start:end] = value

    def read(self, start: int = 0, end: int | None = None) -> Bytes:
        return self.bytes[start:end].copy()


class CardPool:
    """device: of torch, with a number."""

    def __init__(self, pool_bytes: int, device: str) -> None:
        import torch

        self._torch = torch
        self._tensor = torch.zeros(pool_bytes, dtype=torch.uint8, device=device)
        self.region = MemoryRegion(address=self._tensor.data_ptr(), region_bytes=pool_bytes, device=device)
        self._wait()

    def write(self, values: Bytes, start: int = 0) -> None:
        self._tensor[start : start + len(values)] = self._torch.from_numpy(np.ascontiguousarray(values).copy())
        self._wait()

    def wipe(self, value: int, start: int = 0, end: int | None = None) -> None:
        self._tensor[start:end] = value
        self._wait()

    def read(self, start: int = 0, end: int | None = None) -> Bytes:
        read: Bytes = self._tensor[start:end].cpu().numpy().copy()
        return read

    def _wait(self) -> None:
        if self._tensor.is_cuda:
            self._torch.cuda.current_stream(self._tensor.device).synchronize()


def make_pool(pool_bytes: int, device: str) -> Pool:
    return HostPool(pool_bytes) if device == "cpu" else CardPool(pool_bytes, device)
