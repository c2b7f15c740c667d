"""The torch transport: torch.distributed without a world. Gloo moves pools of the CPU, NCCL those of CUDA devices.

Owns the store where peers meet, and the threads of its links. Knows no pages. What two ranks say to each other is in
`kv_transfer/process_pair.py`. Every agent hosts a TCPStore. A sender joins the receiver's store, and the two make a process group
of their own with the receiver as rank 0 and a thread at each end. `poll` accepts joiners.
"""

import queue
import socket
import threading
import time
import uuid
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

import msgspec
import numpy as np
from torch.distributed import TCPStore, is_nccl_available  # type: ignore[attr-defined]

from common.errors import TransferError
from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.cuda import card_of, use_device
from kv_transfer.process_pair import SLICE_BYTES, SLICE_RUNS, Landing, Pair, bytes_of, is_closed_by_peer, reason_of, stream_of
from kv_transfer.pushes import Pushes, SliceFailed
from kv_transfer.transport import TransportEvent

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
ERRORS = (RuntimeError, ValueError, OSError)
"""What torch.distributed raises. Its own errors are RuntimeErrors."""
NOTHING = np.empty((0, 3), dtype=np.int64)


class _Wire(msgspec.Struct, frozen=True):
    """The descriptor: where the agent's store is. card: the UUID of the GPU with its pool; empty on CPU."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    card: str = ""


@dataclass(slots=True, eq=False)
class _Job:
    """A slice to send."""

    runs: Int64Array
    ended: "Future[None]" = field(default_factory=Future)


class _Sender:
    """Implements `kv_transfer.pushes.Link`: a pair and the thread that makes it and sends."""

    def __init__(self, source: MemoryRegion, pool: PoolDescriptor, wire: _Wire, host: str, silence_s: float) -> None:
        self.detail = "torch.distributed " + ("Gloo" if pool.device == "cpu" else "NCCL")
        self.ready: Future[None] = Future()
        self._source, self._pool, self._wire, self._host, self._silence_s = source, pool, wire, host, silence_s
        self._pair: Pair | None = None
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
                what = f"torch.distributed could not connect to {self._pool.agent}"
                self.ready.set_exception(TransferError(f"{what}: {reason_of(error) or 'it does not answer'}"))
                return
            self.ready.set_result(None)
            while (job := self._next()) is not None:
                failed = self._send(job.runs)
                if failed is None:
                    job.ended.set_result(None)
                else:
                    job.ended.set_exception(failed)
        self._part("the link was closed")

    def _join(self) -> Pair:
        """Meet the receiver at its store. Raises ERRORS and TransferError."""
        host, port = self._wire.host, self._wire.port
        socket.create_connection((host, port), CONNECT_S).close()  # fails at once if the store is gone; TCPStore would retry
        device, connect_s = self._source.device, connect_s_of(self._source.device)
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=connect_s), wait_for_workers=False)
        agent = store.get(AGENT).decode()
        if agent != self._pool.agent:
            raise TransferError(f"the descriptor belongs to {agent}")
        name = uuid.uuid4().hex
        store.queue_push(JOINERS, name)
        return Pair(store, name, 1, self._host, device, connect_s, self._silence_s)

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


class TorchTransport:
    """Implements `kv_transfer.transport.Transport`. host: the address of this host that peers can reach."""

    def __init__(self, host: str, silence_s: float = SILENCE_S) -> None:
        self._host, self._silence_s = host, silence_s
        self._name = f"torch-{uuid.uuid4().hex}"
        self._region: MemoryRegion | None = None
        self._landing: Landing | None = None
        self._store: TCPStore | None = None
        self._port = 0
        self._card = ""
        self._accept_at = 0.0
        self._threads: list[threading.Thread] = []
        self._pushes = Pushes(SLICE_BYTES, SLICE_RUNS, WINDOW)

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        if region.device != "cpu" and not is_nccl_available():
            raise TransferError(f"torch.distributed has no NCCL in this build of torch, and the pool is on {region.device}")
        if region.device != "cpu":
            use_device(region.device)
            self._card = card_of(region.device)
        try:
            family = socket.getaddrinfo(self._host, 0)[0][0]
            listener = socket.create_server((self._host, 0), family=family)  # by itself a store would listen on every address
            self._port = listener.getsockname()[1]
            self._store = TCPStore(
                self._host,
                self._port,
                is_master=True,
                timeout=timedelta(seconds=CONNECT_S),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            self._store.set(AGENT, self._name)
            self._landing = Landing(bytes_of(region))
        except ERRORS as error:
            raise TransferError(f"torch.distributed could not start on {self._host}: {reason_of(error)}") from error
        self._region = region
        self._pushes.register(region)
        return self._name, msgspec.msgpack.encode(_Wire(self._host, self._port, self._card))

    def connect(self, pool: PoolDescriptor) -> None:
        self._pushes.connect(pool, lambda: self._link(pool))

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        self._pushes.push(ticket, agent, runs)

    def poll(self) -> list[TransportEvent]:
        self._accept()
        return self._pushes.poll()

    def close(self, agent: str | None = None) -> None:
        """With None, nothing lands in the pool any more, and the threads end: at once, or when a silent peer times out."""
        self._pushes.close(agent)
        if agent is None and self._landing is not None:
            self._landing.close()
            self._store = None
            until = time.monotonic() + CLOSE_S
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _link(self, pool: PoolDescriptor) -> _Sender:
        """A link whose thread makes the connection."""
        assert self._region is not None, "register comes before connect"
        what = f"torch.distributed could not connect to {pool.agent}"
        if pool.device.partition(":")[0] != self._region.device.partition(":")[0]:
            raise TransferError(f"{what}: its pool is on {pool.device} and ours on {self._region.device}")
        try:
            wire = msgspec.msgpack.decode(pool.wire, type=_Wire)
        except msgspec.DecodeError as error:
            raise TransferError(f"{what}: {error}") from error
        if wire.card and wire.card == self._card:
            raise TransferError(
                f"{what}: its pool ({pool.device}) and ours ({self._region.device}) are on the same GPU, {wire.card}, and NCCL "
                f"takes one process per GPU: use --transport nixl, or give each instance a GPU of its own with --device cuda:N"
            )
        sender = _Sender(self._region, pool, wire, self._host, self._silence_s)
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
        assert self._region is not None and self._landing is not None, "register comes before poll"
        try:
            device, connect_s = self._region.device, connect_s_of(self._region.device)
            store = TCPStore(
                self._host, self._port, is_master=False, timeout=timedelta(seconds=connect_s), wait_for_workers=False
            )
            with (
                stream_of(device),
                closing(Pair(store, name, 0, self._host, device, connect_s, self._silence_s)) as pair,
            ):
                while pair.take_slice(self._landing):
                    pass
        except ERRORS:
            return


def connect_s_of(device: str) -> float:
    """The longest that each step of making a pair may take."""
    return CONNECT_S if device == "cpu" else CONNECT_NCCL_S
