"""The device of `launch bench engine`: its clock, random contents of its memory, and how much of it is free.

Owns how device time is told from host time. Knows no models or plans.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.pages.layout import MemoryRegion
from engine.device import device_of

_FILL_ELEMENTS = 2**27
_CYCLES_PER_S = 2e9
"""More than a card's clock makes, so that a pause is never shorter than asked for."""


def current(name: str) -> torch.device:
    """The device of a name as in `--device`. Kernels that name no device start there from now on."""
    device = device_of(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def free_bytes(device: torch.device) -> int | None:
    """None on CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def timed_s(act: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """How long the device works on it, several times. act: starts work and may return before that is done."""
    act()
    if device.type == "cpu":
        return [_host_s(act) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    began, ended = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))  # type: ignore[no-untyped-call]
    for before, after in zip(began, ended, strict=True):
        before.record()
        act()
        after.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in zip(began, ended, strict=True)]


def device_ms(launch: Callable[[], object], launch_s: float) -> float:
    """How long the CUDA device works on what `launch` starts, without a gap.

    The device is kept busy until the host has given it everything, which takes about launch_s, so it never waits for the host. It
    measures what is started on the current stream.
    """
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(int((3 * launch_s + 1e-3) * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
    before.record()
    launch()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


def fill_randomly(region: MemoryRegion, dtype: torch.dtype) -> None:
    """Numbers as keys and values have them: zeros would be read faster than what is served. region: of a pool."""
    pool = memory_of(region).view(torch.uint8)
    items = pool[: len(pool) // dtype.itemsize * dtype.itemsize].view(dtype)
    for part in torch.split(items, _FILL_ELEMENTS):
        if dtype.itemsize > 1:
            part.normal_()
        else:
            part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=part.device).to(dtype))


def memory_of(region: MemoryRegion) -> Tensor:
    """The bytes of a pool, [bytes] uint8; nothing is copied."""
    if region.device == "cpu":
        return torch.frombuffer((ctypes.c_char * region.region_bytes).from_address(region.address), dtype=torch.uint8)
    with torch.cuda.device(region.device):
        return torch.as_tensor(_CudaArray(region), device=region.device)


class _CudaArray:
    """Memory of a card as libraries exchange it. Source: CUDA Array Interface, version 3."""

    def __init__(self, region: MemoryRegion) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (region.region_bytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


def _host_s(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
