"""CUDA memory as a transport sees it: the device of its thread, whether other processes can map a pool, and which card it is on.

Owns the questions to torch and to NVIDIA's driver. Knows no transport and no stream. Imports torch only when it is asked.

When may bytes be pushed, and when may they be read? Nothing here orders streams; two laws do it together.

- The source: a push is posted only after the engine has reported its layers as written. Before that, the engine waits on the host
  for an event behind the kernels that wrote them. So the pages are in memory, whatever stream copies them.
- The target: a write counts as done when the library says so on the writer's host. For cuda_ipc that is an event behind the copy;
  for RDMA it is the end of the flush behind the writes. Then a message goes to the reader, and only after it does the reader's
  engine launch kernels that have these pages in their tables. The launch orders them: a kernel sees what was in the memory of its
  device at its launch. For network cards that takes a GPU whose attribute GPU_DIRECT_RDMA_WRITES_ORDERING is OWNER or more, which
  "can consistently consume remote writes" (CUDA driver API); where it is NONE, the reader would have to call
  cuFlushGPUDirectRDMAWrites. A kernel that already ran would not see them. vLLM's and SGLang's connectors use no fence either.
"""

import ctypes
import os
from typing import Any

from common.errors import TransferError, first_line
from common.pages.layout import MemoryRegion

_IS_LEGACY_CUDA_IPC_CAPABLE, _RANGE_START_ADDR, _RANGE_SIZE = 10, 11, 12
"""CUpointer_attribute (cuda.h)."""
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ERRORS = (RuntimeError, AssertionError, ValueError)
"""What torch raises. Without CUDA it is an AssertionError."""


def index_of(device: str) -> int:
    """1 for "cuda:1"."""
    return int(device.partition(":")[2] or 0)


def use_device(device: str) -> None:
    """Make this the current device of this thread, with its primary context. Raises TransferError.

    A new thread has device 0 and no context, and libraries take what they find: UCX would make contexts and streams on the wrong
    card. `set_device` alone does nothing where the number is the current one; a call that needs the context makes it current.
    """
    import torch

    try:
        torch.cuda.set_device(index_of(device))
        torch.cuda.mem_get_info(index_of(device))
    except _ERRORS as error:
        raise TransferError(f"{device} cannot be used: {first_line(error)}") from error


def check_can_be_mapped(region: MemoryRegion, driver: Any = None) -> None:
    """Raises TransferError unless other processes can map the pool: it must be (a part of) one allocation of cudaMalloc.

    With expandable segments, torch builds memory of many small pieces. cuda_ipc cannot map those: UCX falls back to TCP without a
    word, hundreds of times slower (https://github.com/ai-dynamo/nixl/issues/1754). driver: libcuda, or a double of it.
    """
    if driver is None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransferError(f"{region.device} cannot be used: NVIDIA's driver cannot be loaded: {error}") from error
    if not _attribute(driver, _IS_LEGACY_CUDA_IPC_CAPABLE, region):
        settings = [f"{name}={os.environ[name]}" for name in _ALLOCATOR_SETTINGS if name in os.environ]
        raise TransferError(
            f"other processes cannot map the KV pages on {region.device}, because torch has not allocated them with cudaMalloc: "
            f"start without expandable_segments and without backend:cudaMallocAsync in {' and '.join(_ALLOCATOR_SETTINGS)} "
            f"({', '.join(settings) or 'neither is set here'})"
        )
    start, size = _attribute(driver, _RANGE_START_ADDR, region), _attribute(driver, _RANGE_SIZE, region)
    if region.address + region.region_bytes > start + size:
        raise TransferError(f"the KV pages on {region.device} are in more than one allocation, and other processes map one only")


def card_of(device: str) -> str:
    """The UUID of the card, which is the same in every process, whatever number the card has there. Raises TransferError."""
    import torch

    try:
        return str(torch.cuda.get_device_properties(index_of(device)).uuid)
    except _ERRORS as error:
        raise TransferError(f"{device} cannot be used: {first_line(error)}") from error


def has_drained(device: str) -> bool:
    """Wait until the device has ended everything that this process gave it. False: the device has failed.

    For a link that was lost in mid write: its library does not report the end of copies that it had begun on its own streams.
    """
    import torch

    try:
        torch.cuda.synchronize(index_of(device))
    except _ERRORS:
        return False
    return True


def _attribute(driver: Any, number: int, region: MemoryRegion) -> int:
    value = ctypes.c_uint64(0)  # wide enough for each of them; the driver writes the low bytes of a shorter one
    status = driver.cuPointerGetAttribute(ctypes.byref(value), ctypes.c_int(number), ctypes.c_uint64(region.address))
    if status != 0:
        raise TransferError(f"{region.address:#x} is not memory of {region.device}: the driver says {status}")
    return value.value
