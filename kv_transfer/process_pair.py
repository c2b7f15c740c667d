"""Two ranks of torch.distributed and their protocol: one slice after the other, each with an answer.

Owns the process groups of one pair and the messages on them. Knows neither tickets nor threads.

    rank 1, the sender                            rank 0, the receiver
    header: how many runs, and where  ─────────►  checks them
    gathers the runs, sends them      ─────────►  receives them, then scatters them into its pool
    the slice has ended               ◄─────────  answers

Measured behaviour that shapes this file:

- Each message costs Gloo 30 to 70 microseconds, so the runs of a slice travel as one.
- A slice lands as a whole, after its last byte. So a slice without an answer may land late, unless the receiver has closed
  the connection.
- A wait cannot be cancelled, and a wait that times out ends the group. So silence ends the pair, and an idle sender sends an
  empty header now and then.
- A group is closed by dropping the last reference; its `abort` and `shutdown` leave the peer waiting.
- When the peer closes the connection, Gloo fails a pending receive at once, but neither a send that is half written nor a receive
  that has half arrived: the wait for these times out, which hides that the peer is gone. So the sender posts the receive of the
  answer before it sends, and waits for the answer first. A receiver whose sender dies within a slice ends after the silence.

On CUDA the bytes go over NCCL, and header and answer over Gloo. Read in torch 2.11 and not measured:

- Everything that a pair does on its device, also its allocations, happens on the stream of its thread (`stream_of`). Torch makes
  such a stream so that it waits for no other, also not for the default one. It need not: the engine has reported the pages as
  written (`kv_transfer/cuda.py`). NCCL's own stream waits for it before it sends, and is waited for on the host after that.
- A slice is answered when the stream that scattered it has come to its end, so its bytes are in the pool by then.
- NCCL takes one process per card (`TorchTransport` refuses more).
- A receiver that dies leaves NCCL waiting. The wait for the answer fails, because the connection of the headers breaks.
"""

import ctypes
import os
import re
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from common.ids import Int64Array
from common.pages.layout import MemoryRegion

SLICE_BYTES = 8 * 2**20
SLICE_RUNS = 1024
NCCL_POLL_S = 50e-6
_PLACE_IN_SOURCE = re.compile(r"^\[\S+\] ")
_CLOSED_BY_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe")


class Landing:
    """A pool that accepts slices until it is closed. pool: [bytes] uint8. May be used from several threads."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._open = True

    def check(self, rows: Int64Array) -> None:
        """rows: [n, 2] of (offset, bytes). Raises ValueError unless they fit into the pool and into a slice."""
        if (rows < 0).any() or (rows.sum(axis=1) > len(self._pool)).any() or rows[:, 1].sum() > SLICE_BYTES:
            raise ValueError("a run is outside of the pool")

    def scatter(self, staged: Tensor, rows: Int64Array) -> bool:
        """Copy the received bytes to their places and wait for that. False: the pool is closed and nothing was written."""
        with self._lock:
            if self._open:
                at = 0
                for offset, run_bytes in rows.tolist():
                    self._pool[offset : offset + run_bytes] = staged[at : at + run_bytes]
                    at += run_bytes
                if self._pool.is_cuda:
                    torch.cuda.current_stream().synchronize()
            return self._open

    def close(self) -> None:
        """Accept nothing more. Waits for a slice that is landing."""
        with self._lock:
            self._open = False


class _Gloo:
    """A process group for tensors on the CPU. Messages arrive in the order of sending.

    Owns the messages under way: Gloo moves no bytes of one that is dropped, and keeps the connection while one is held.
    """

    def __init__(self, store: Store, rank: int, host: str, connect_s: float) -> None:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=connect_s)
        options._threads = 1
        options._devices = [gloo.create_device(hostname=host)]
        self._group: Any = gloo(store, rank, 2, options)
        self._peer = 1 - rank
        self._under_way: list[Any] = []

    def send(self, tensor: Tensor) -> None:
        self._under_way.append(self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: Tensor) -> None:
        self._under_way.append(self._group.recv([tensor], self._peer, 0))

    def finish(self, until: float) -> None:
        """Wait for the messages under way, in the order in which they began. until: a time of the monotonic clock."""
        while self._under_way:
            self._under_way[0].wait(timedelta(seconds=max(1e-3, until - time.monotonic())))  # Gloo takes 0 for no limit
            del self._under_way[0]

    def close(self) -> None:
        """The peer's wait ends at once."""
        self._under_way.clear()
        self._group = None


class _Nccl:
    """A process group for tensors on a CUDA device. Watches for silence itself: NCCL's watchdog would end the process.

    The first message makes the communicator, which blocks for as long as the peer lets it. So one byte goes when the pair is
    made: no push waits for it, and whoever waits for the pair does so for a bounded time.
    """

    def __init__(self, store: Store, rank: int, device: str, connect_s: float) -> None:
        for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
            os.environ.setdefault(name, "0")
        nccl: Any = torch.distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(days=1)
        self._group: Any = nccl(store, rank, 2, options)
        self._peer = 1 - rank
        self._under_way: list[Any] = []
        meet = self.receive if rank == 0 else self.send
        meet(torch.zeros(1, dtype=torch.uint8, device=device))
        self.finish(time.monotonic() + connect_s)

    def send(self, tensor: Tensor) -> None:
        self._under_way.append(self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: Tensor) -> None:
        self._under_way.append(self._group.recv([tensor], self._peer, 0))

    def finish(self, until: float) -> None:
        """Wait for the device's copies. NCCL's own `wait` orders streams, raises what has failed, and does not wait."""
        while self._under_way:
            while not self._under_way[0].is_completed():
                if time.monotonic() > until:
                    raise RuntimeError("Timed out waiting for NCCL")
                time.sleep(NCCL_POLL_S)
            self._under_way[0].wait()
            del self._under_way[0]

    def close(self) -> None:
        """May be called again."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._under_way.clear()


class Pair:
    """One end of a pair. name: the name of the pair at the store. rank: 0 receives, 1 sends. host: our address. silence_s: the
    longest that a slice may take. All methods may raise RuntimeError or ValueError; after that only `close` may be called."""

    def __init__(self, store: Store, name: str, rank: int, host: str, device: str, connect_s: float, silence_s: float) -> None:
        self._control = _Gloo(PrefixStore(f"{name}/control", store), rank, host, connect_s)
        self._data: _Gloo | _Nccl = self._control
        if device != "cpu":
            self._data = _Nccl(PrefixStore(f"{name}/data", store), rank, device, connect_s)
        self._silence_s = silence_s
        self._header = torch.zeros(1 + 2 * SLICE_RUNS, dtype=torch.int64)
        self._answer = torch.zeros(1, dtype=torch.int64)
        self._staging = torch.empty(SLICE_BYTES, dtype=torch.uint8, device=device)

    def send_slice(self, pool: Tensor, runs: Int64Array) -> None:
        """Returns when the runs have landed."""
        until = time.monotonic() + self._silence_s
        self._header[0] = len(runs)
        self._rows(len(runs))[:] = runs[:, 1:]
        self._control.receive(self._answer)  # first, so that `finish` waits for it first
        self._control.send(self._header)
        staged = self._staging[: int(runs[:, 2].sum())]
        if len(staged):
            torch.cat([pool[offset : offset + run_bytes] for offset, _, run_bytes in runs.tolist()], out=staged)
            self._data.send(staged)
        self._control.finish(until)
        self._data.finish(until)

    def take_slice(self, landing: Landing) -> bool:
        """Returns False when the landing is closed; then the pair must be closed too."""
        self._control.receive(self._header)
        self._control.finish(time.monotonic() + self._silence_s)
        until = time.monotonic() + self._silence_s
        rows = self._rows(int(self._header[0]))
        landing.check(rows)
        staged = self._staging[: int(rows[:, 1].sum())]
        if len(staged):
            self._data.receive(staged)
            self._data.finish(until)
        if not landing.scatter(staged, rows):
            return False
        self._control.send(self._answer)
        self._control.finish(until)
        return True

    def close(self) -> None:
        """May be called after an error. No other method may run at the same time or afterwards."""
        self._data.close()
        self._control.close()

    def _rows(self, runs: int) -> Int64Array:
        """The header's rows of (target offset, bytes)."""
        if not 0 <= runs <= SLICE_RUNS:
            raise ValueError(f"a slice of {runs} runs")
        rows: Int64Array = self._header[1 : 1 + 2 * runs].numpy().reshape(-1, 2)
        return rows


class _CudaBytes:
    """Describes a range of CUDA memory to torch."""

    def __init__(self, region: MemoryRegion) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.region_bytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


def bytes_of(region: MemoryRegion) -> Tensor:
    """The memory itself as a tensor, [bytes] uint8 on its device. The memory must outlive the tensor. Raises RuntimeError."""
    if region.device == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * region.region_bytes).from_address(region.address), dtype=torch.uint8)
    return torch.as_tensor(_CudaBytes(region), device=region.device)


def stream_of(device: str) -> AbstractContextManager[object]:
    """A CUDA stream, and its device, for the work of one thread; does nothing on the CPU. Raises RuntimeError."""
    cuda: Any = torch.cuda
    return nullcontext() if device == "cpu" else cuda.stream(cuda.Stream(device))


def reason_of(error: Exception) -> str:
    """The first sentence of torch's message, without the place in its source code."""
    return _PLACE_IN_SOURCE.sub("", str(error)).split("\n")[0].split(". ")[0]


def is_closed_by_peer(error: Exception) -> bool:
    """Whether the peer has closed its end of the connection, so that nothing more lands there."""
    return _CLOSED_BY_PEER.search(str(error)) is not None
