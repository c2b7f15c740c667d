"""The torch transport: torch.distributed without a world. Gloo moves pools of the CPU, NCCL those of CUDA devices.

Owns the store where peers meet, the process groups of each pair, and the threads of its links. Knows no pages. Every agent hosts
a TCPStore. A sender joins the receiver's store, and the two make a process group of their own with a thread at each end. `poll`
accepts joiners. A pair sends one slice after the other, each with an answer:

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
import queue
import re
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, is_nccl_available  # type: ignore[attr-defined]

from common.errors import TransferError
from common.ids import Int64Array
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from engine.parallel import ERRORS, gloo_group, joined_store, listening_store, nccl_group
from kv_transfer.cuda import card_of, use_device
from kv_transfer.pushes import SlicedTransport, SliceFailed
from kv_transfer.transport import TransportEvent

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


class _Group(ABC):
    """A process group of two. Owns the messages under way, which arrive in the order of sending."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._peer = 1 - rank
        self._under_way: list[Any] = []

    def send(self, tensor: Tensor) -> None:
        self._under_way.append(self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: Tensor) -> None:
        self._under_way.append(self._group.recv([tensor], self._peer, 0))

    def finish(self, until: float) -> None:
        """Wait for the messages under way, in the order in which they began. until: a time of the monotonic clock."""
        while self._under_way:
            self._wait_for(self._under_way[0], until)
            del self._under_way[0]

    @abstractmethod
    def _wait_for(self, message: Any, until: float) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """May be called again."""


class _Gloo(_Group):
    """For tensors on the CPU. Gloo moves no bytes of a message that is dropped, and keeps the connection while one is held."""

    def __init__(self, store: Store, rank: int, host: str, connect_s: float) -> None:
        super().__init__(gloo_group(store, rank, 2, host, timedelta(seconds=connect_s)), rank)

    def _wait_for(self, message: Any, until: float) -> None:
        message.wait(timedelta(seconds=max(1e-3, until - time.monotonic())))  # Gloo takes 0 for no limit

    def close(self) -> None:
        """The peer's wait ends at once."""
        self._under_way.clear()
        self._group = None


class _Nccl(_Group):
    """For tensors on a CUDA device. Watches for silence itself: NCCL's watchdog would end the process.

    The first message makes the communicator, which blocks for as long as the peer lets it. So one byte goes when the pair is
    made: no push waits for it, and whoever waits for the pair does so for a bounded time.
    """

    def __init__(self, store: Store, rank: int, device: str, connect_s: float) -> None:
        super().__init__(nccl_group(store, rank, 2), rank)
        meet = self.receive if rank == 0 else self.send
        meet(torch.zeros(1, dtype=torch.uint8, device=device))
        self.finish(time.monotonic() + connect_s)

    def _wait_for(self, message: Any, until: float) -> None:
        """Wait for the device's copies. NCCL's own `wait` orders streams, raises what has failed, and does not wait."""
        while not message.is_completed():
            if time.monotonic() > until:
                raise RuntimeError("Timed out waiting for NCCL")
            time.sleep(NCCL_POLL_S)
        message.wait()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._under_way.clear()


class RankPair:
    """One end of a pair. name: the name of the pair at the store. rank: 0 receives, 1 sends. host: our address. silence_s: the
    longest that a slice may take. All methods may raise RuntimeError or ValueError; after that only `close` may be called."""

    def __init__(self, store: Store, name: str, rank: int, host: str, device: str, connect_s: float, silence_s: float) -> None:
        self._control = _Gloo(PrefixStore(f"{name}/control", store), rank, host, connect_s)
        self._data: _Group = self._control
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


SILENCE_S = 10.0
"""A peer that does not answer a slice for this long is lost."""
CONNECT_S, CONNECT_NCCL_S = 3.0, 8.0
"""The longest that each step of making a pair may take. NCCL first looks for network cards."""
ACCEPT_S = 5e-3
"""How often the store is checked for joiners."""
CLOSE_S = 2.0
WINDOW = 2
"""Slices queued for a link's thread, so that the next one is ready when one ends."""
AGENT, JOINERS = "agent", "joiners"
"""Keys of the store: the name of its agent, and the queue of the names of new pairs."""
NOTHING = np.empty((0, 3), dtype=np.int64)


class _TorchAddress(msgspec.Struct, frozen=True):
    """What a pool's descriptor says to other agents: where the agent's store is."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    card: str = ""
    """The UUID of the GPU with its pool; empty on CPU."""


@dataclass(slots=True, eq=False)
class _Job:
    """A slice to send."""

    runs: Int64Array
    ended: "Future[None]" = field(default_factory=Future)


class _Sender:
    """Implements `kv_transfer.pushes.PushLink`: a pair and the thread that makes it and sends."""

    def __init__(self, source: MemoryRegion, pool: PoolDescriptor, wire: _TorchAddress, host: str, silence_s: float) -> None:
        self.detail = "torch.distributed " + ("Gloo" if pool.device == "cpu" else "NCCL")
        self.ready: Future[None] = Future()
        self._source, self._pool, self._wire, self._host, self._silence_s = source, pool, wire, host, silence_s
        self._pair: RankPair | None = None
        self._failure = ""
        self._closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="torch-sender", daemon=True)
        self.thread.start()

    def write(self, runs: Int64Array) -> Future[None]:
        job = _Job(runs)
        self._jobs.put(job)
        return job.ended

    def close(self) -> None:
        self._closed = True
        self._jobs.put(None)

    # --- on the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(stream_of(self._source.device))
                self._pair = self._join()
            except (*ERRORS, TransferError) as error:
                self.ready.set_exception(TransferError(reason_of(error) or "it does not answer"))
                return
            self.ready.set_result(None)
            while (job := self._next()) is not None:
                failed = self._send(job.runs)
                if failed is None:
                    job.ended.set_result(None)
                else:
                    job.ended.set_exception(failed)
        self._part("the link was closed")

    def _join(self) -> RankPair:
        """Meet the receiver at its store. Raises ERRORS and TransferError."""
        host, port = self._wire.host, self._wire.port
        socket.create_connection((host, port), CONNECT_S).close()  # fails at once if the store is gone; TCPStore would retry
        device, connect_s = self._source.device, connect_s_of(self._source.device)
        store = joined_store(host, port, connect_s)
        agent = store.get(AGENT).decode()
        if agent != self._pool.agent:
            raise TransferError(f"the descriptor belongs to {agent}")
        name = uuid.uuid4().hex
        store.queue_push(JOINERS, name)
        return RankPair(store, name, 1, self._host, device, connect_s, self._silence_s)

    def _next(self) -> _Job | None:
        """What to send next. An empty job, as a sign of life, if there is nothing to send. None when the link is closed."""
        try:
            return self._jobs.get(timeout=self._silence_s / 10)
        except queue.Empty:
            return _Job(NOTHING)

    def _send(self, runs: Int64Array) -> SliceFailed | None:
        if self._closed:
            self._part("the link was closed")
        if self._pair is None:
            return SliceFailed(self._failure, quiescent=True)
        try:
            self._pair.send_slice(bytes_of(self._source), runs)
        except ERRORS as error:
            self._part(reason_of(error))
            return SliceFailed(self._failure, quiescent=is_closed_by_peer(error))
        return None

    def _part(self, reason: str) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair, self._failure = None, reason


class TorchTransport(SlicedTransport):
    """Implements `kv_transfer.transport.Transport`. host: the address of this host that peers can reach."""

    library = "torch.distributed"

    def __init__(self, host: str, silence_s: float = SILENCE_S) -> None:
        super().__init__(SLICE_BYTES, SLICE_RUNS, WINDOW)
        self._host, self._silence_s = host, silence_s
        self._name = f"torch-{uuid.uuid4().hex}"
        self._landing: Landing | None = None
        self._store: TCPStore | None = None
        self._port = 0
        self._card = ""
        self._accept_at = 0.0
        self._threads: list[threading.Thread] = []

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        if region.device != "cpu" and not is_nccl_available():
            raise TransferError(f"torch.distributed has no NCCL in this build of torch, and the pool is on {region.device}")
        if region.device != "cpu":
            use_device(region.device)
            self._card = card_of(region.device)
        try:
            self._store = listening_store(self._host)
            self._store.set_timeout(timedelta(seconds=CONNECT_S))
            self._port = self._store.port
            self._store.set(AGENT, self._name)
            self._landing = Landing(bytes_of(region))
        except ERRORS as error:
            raise TransferError(f"torch.distributed could not start on {self._host}: {reason_of(error)}") from error
        self._region = region
        return self._name, msgspec.msgpack.encode(_TorchAddress(self._host, self._port, self._card))

    def poll(self) -> list[TransportEvent]:
        self._accept()
        return super().poll()

    def close(self, agent: str | None = None) -> None:
        """With None, nothing lands in the pool any more, and the threads end: at once, or when a silent peer times out."""
        super().close(agent)
        if agent is None and self._landing is not None:
            self._landing.close()
            self._store = None
            until = time.monotonic() + CLOSE_S
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))

    # --- inside ------------------------------------------------------------------------------------------------------------

    def link_to(self, pool: PoolDescriptor) -> _Sender:
        """A link whose thread makes the connection."""
        if pool.device.partition(":")[0] != self.region.device.partition(":")[0]:
            raise TransferError(f"its pool is on {pool.device} and ours on {self.region.device}")
        wire = msgspec.msgpack.decode(pool.wire, type=_TorchAddress)
        if wire.card and wire.card == self._card:
            raise TransferError(
                f"its pool ({pool.device}) and ours ({self.region.device}) are on the same GPU, {wire.card}, and NCCL takes one "
                f"process per GPU: use --transport nixl, or give each instance a GPU of its own with --device cuda:N"
            )
        sender = _Sender(self.region, pool, wire, self._host, self._silence_s)
        self._threads.append(sender.thread)
        return sender

    def _accept(self) -> None:
        """Accept the joiners that wait at the store, and forget threads that have ended."""
        now = time.monotonic()
        if self._store is None or now < self._accept_at:
            return
        self._accept_at = now + ACCEPT_S
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        try:
            while self._store.queue_len(JOINERS):
                self._receive_from(self._store.queue_pop(JOINERS, False).decode(errors="replace"))
        except ERRORS as error:
            raise TransferError(f"torch.distributed: the store failed: {reason_of(error)}") from error

    def _receive_from(self, name: str) -> None:
        thread = threading.Thread(target=self._receive, args=(name,), name="torch-receiver", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _receive(self, name: str) -> None:
        """On a thread of its own: receive from one sender until the pair ends. The sender reports why it ended."""
        assert self._landing is not None, "register comes before poll"
        try:
            device, connect_s = self.region.device, connect_s_of(self.region.device)
            store = joined_store(self._host, self._port, connect_s)
            with (
                stream_of(device),
                closing(RankPair(store, name, 0, self._host, device, connect_s, self._silence_s)) as pair,
            ):
                while pair.take_slice(self._landing):
                    pass
        except ERRORS:
            return


def connect_s_of(device: str) -> float:
    """The longest that each step of making a pair may take."""
    return CONNECT_S if device == "cpu" else CONNECT_NCCL_S
