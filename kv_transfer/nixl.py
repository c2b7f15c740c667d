"""The NIXL transport: one-sided writes through UCX, on CPU memory between processes, over TCP, RDMA or GPU links.

Owns the NIXL agent and every handle. Knows no pages. All calls come from one thread, so the agent runs unsynchronised and without
its progress thread, which would spin on a core. Measured behaviour that shapes this file:

- On many links `transfer` copies inside the call. Pushes are cut into slices to keep each call short.
- Making a connection returns at once, in 1 to 30 ms, also to a peer that is stopped: its first write waits instead.
- Every handle is polled to its end, also after a failure: NIXL cannot abort, and releasing a handle does not stop its write.
- NIXL reports a cut link only with TCP_USER_TIMEOUT, and then the receiver must poll more often than that.
- A peer is removed only when nothing is in flight to it. Otherwise its handles fail while their bytes flow on.
- Removing a live peer leaves a socket open on both sides, so a closed link is kept for a while and used again.

Read in UCX and NIXL, and not measured, about CUDA memory:

- Between processes of one host UCX copies with cuda_ipc, also on one card: each run is a `cuMemcpyDtoDAsync` on a stream of UCX's
  own, which waits for no other stream. `transfer` returns before the copies have run, and the receiver has no part in them.
- cuda_ipc needs both processes in one PID namespace (containers: share it) and memory of cudaMalloc (`kv_transfer/cuda.py`).
  Otherwise UCX falls back to TCP without a word. The measurement of a new link finds that (`kv_transfer/links.py`).
- A mapping keeps the memory of a dead receiver alive, so writes to it may succeed. The TCP connection tells of the death.
- UCX caches mappings until this process ends, so a new instance may find its GPU full. With UCX_CUDA_IPC_CACHE=n, UCX 1.22 and
  later unmaps when a link is forgotten. But only the first link to each GPU holds its mapping: on others, and on links to
  instances that were started again, writes map and unmap the whole pool whenever none is in flight. So it is not set by default.
- A copy that fails breaks the CUDA context of this process, and UCX never reports its end. The engine fails too, and the process.

NIXL: https://github.com/ai-dynamo/nixl, API of 1.5.
"""

import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from common.errors import TransferError
from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.cuda import check_can_be_mapped, has_drained, index_of, use_device
from kv_transfer.pushes import SlicedTransport, SliceFailed
from kv_transfer.transport import TransportEvent

SLICE_BYTES = 16 * 2**20
SLICE_RUNS = 2**16
SLICES_IN_FLIGHT = 4
SILENCE_S = 10
"""A peer that acknowledges nothing for this long is lost."""
KEPT_S = 120.0
"""A closed link is kept for this long so that it can be used again. Longer than the pause before a lost link is tried again."""
ENGINE_CONFIG = "TCP_USER_TIMEOUT={silence_s}s,TLS=^posix,MAX_RMA_RAILS=1"
"""The timeout makes UCX report a silent peer. All transports but posix are admitted: also cuda_ipc, cuda_copy, cma and RDMA.
On one host bytes go straight from memory to memory, but connections are made over TCP: over shared memory, UCX 1.23 crashes in a
receiver that was stopped while a sender connected and was killed. One rail: UCX corrupts its heap when one of two TCP rails times
out and the other lives on. Set UCX_MAX_RMA_RAILS=2 in the environment where bandwidth needs it."""


class _NixlLink:
    """Implements `kv_transfer.pushes.PushLink` for one remote agent."""

    detail = "NIXL UCX"
    ready = None

    def __init__(self, agent: Any, errors: tuple[type[Exception], ...], source: MemoryRegion, pool: PoolDescriptor) -> None:
        self._agent, self._errors = agent, errors
        self._source, self._source_memory = source, _memory_of(source.device)
        self._pool, self._target_memory = pool, _memory_of(pool.device)
        self.posted: list[tuple[Any, Future[None]]] = []
        """The handles of writes that have not ended, each with the future that waits for it."""
        self.kept_until_s = math.inf
        """When a closed link is forgotten; infinite while it is open."""
        self.is_dead = False
        """NIXL has dropped the agent."""

    def write(self, runs: Int64Array) -> Future[None]:
        ended: Future[None] = Future()
        try:
            handle = self._prepare(runs)
        except self._errors as error:  # nothing is under way, and the link is as good as before
            ended.set_exception(SliceFailed(_reason_of(error), quiescent=True, loses_link=False))
        else:
            if not self._has_ended(handle, ended, self._agent.transfer):
                self.posted.append((handle, ended))
        return ended

    def follow(self) -> None:
        """Check the writes under way."""
        check = self._agent.check_xfer_state
        self.posted = [(handle, ended) for handle, ended in self.posted if not self._has_ended(handle, ended, check)]

    def close(self) -> None:
        self.kept_until_s = time.monotonic() + (0.0 if self.is_dead else KEPT_S)

    def _prepare(self, runs: Int64Array) -> Any:
        """The handle of one slice. Raises NIXL's errors, such as for memory outside of a pool."""
        (our_memory, our_device), (their_memory, their_device) = self._source_memory, self._target_memory
        source = _descriptors(runs[:, 0] + self._source.address, runs[:, 2], our_device)
        target = _descriptors(runs[:, 1] + self._pool.address, runs[:, 2], their_device)
        return self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(source, our_memory),
            self._agent.get_xfer_descs(target, their_memory),
            self._pool.agent,
        )

    def _has_ended(self, handle: Any, ended: Future[None], state_of: Callable[[Any], str]) -> bool:
        """Post or check one handle, and release it when it has ended.

        Only a dead endpoint proves that no more of a failed slice is sent, and on CUDA the end of the copies that it had begun.
        What a stopped receiver has in its socket still lands when it goes on: measured, 0.1 MB at its first polls.
        """
        try:
            state = state_of(handle)
        except self._errors as error:
            is_dead = type(error).__name__ in ("nixlRemoteDisconnectError", "nixlBackendError")
            self.is_dead = self.is_dead or is_dead
            quiescent = is_dead and (self._source.device == "cpu" or has_drained(self._source.device))
            ended.set_exception(SliceFailed(_reason_of(error), quiescent, loses_link=is_dead))
        else:
            if state == "PROC":
                return False
            if state == "DONE":
                ended.set_result(None)
            else:
                ended.set_exception(SliceFailed(f"a write is in state {state}", quiescent=False, loses_link=False))
        with suppress(*self._errors):
            self._agent.release_xfer_handle(handle)
        return True


class NixlTransport(SlicedTransport):
    """Implements `kv_transfer.transport.Transport`."""

    library = "NIXL"

    def __init__(self, silence_s: int = SILENCE_S) -> None:
        super().__init__(SLICE_BYTES, SLICE_RUNS, SLICES_IN_FLIGHT)
        try:
            from nixl import _bindings
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransferError(f"NIXL cannot be loaded: {error}. Install nixl>=1.5.1 (Linux)") from error
        self._name = f"nixl-{uuid.uuid4().hex}"
        self._errors = _errors_of(vars(_bindings).values())
        self._agent_class: Any = nixl_agent
        self._agent_config: Any = nixl_agent_config(enable_prog_thread=False, backends=[])
        self._engine_config = ENGINE_CONFIG.format(silence_s=silence_s)
        self._agent: Any = None
        self._registered: Any = None
        self._links: dict[str, _NixlLink] = {}
        """Every agent that NIXL knows, by name: also closed links that are kept."""

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        """Also makes the agent: UCX must find the pool's device current on this thread."""
        memory, device = _memory_of(region.device)
        what = f"register the pool on {region.device}"
        if memory == "VRAM":
            use_device(region.device)
            check_can_be_mapped(region)
            if "UCX_TLS" in os.environ:
                what += f" (UCX_TLS is {os.environ['UCX_TLS']}: it must admit cuda_copy and cuda_ipc)"
        with self._translated("start"):
            self._agent = self._agent_class(self._name, self._agent_config)
            self._agent.create_backend("UCX", {"engine_config": self._engine_config})
        with self._translated(what):
            self._registered = self._agent.register_memory([(region.address, region.region_bytes, device, "")], memory)
            self._region = region
            return self._name, bytes(self._agent.get_agent_metadata())

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        super().push(ticket, agent, runs)
        self.begin(agent)

    def poll(self) -> list[TransportEvent]:
        with self._translated("drive progress"):
            self._agent.get_new_notifs()
        for link in self._links.values():
            if link.posted:
                link.follow()
        events = super().poll()
        self._forget()
        return events

    def close(self, agent: str | None = None) -> None:
        super().close(agent)
        if agent is None:
            for link in self._links.values():
                link.kept_until_s = 0.0
        self._forget()
        if agent is None and self._registered is not None:
            with suppress(*self._errors):
                self._agent.deregister_memory(self._registered)
            self._registered = None

    # --- inside ------------------------------------------------------------------------------------------------------------

    def link_to(self, pool: PoolDescriptor) -> _NixlLink:
        """The link that was kept, or a new one."""
        self._forget()
        link = self._links.get(pool.agent)
        if link is None:
            link = self._links[pool.agent] = self._add(pool)
        elif link.is_dead:
            raise TransferError("writes over the lost link have not ended")
        link.kept_until_s = math.inf
        return link

    def _add(self, pool: PoolDescriptor) -> _NixlLink:
        with self._translated():
            name = self._agent.add_remote_agent(pool.wire)
            known = name.decode() if isinstance(name, bytes) else str(name)
            if known != pool.agent:
                if known not in self._links:
                    self._agent.remove_remote_agent(known)
                raise TransferError(f"the descriptor belongs to {known}")
            self._agent.make_connection(pool.agent)
        return _NixlLink(self._agent, self._errors, self.region, pool)

    def _forget(self) -> None:
        """Remove closed links that are dead or have been kept for long enough, once nothing is in flight over them. Earlier, NIXL
        would report their writes as failed while the bytes flow on."""
        now = time.monotonic()
        for name, link in list(self._links.items()):
            is_over = now >= link.kept_until_s or (link.is_dead and link.kept_until_s < math.inf)
            if is_over and not link.posted:
                del self._links[name]
                with suppress(*self._errors):
                    self._agent.remove_remote_agent(name)

    @contextmanager
    def _translated(self, what: str = "") -> Iterator[None]:
        """what: what NIXL could not do then; "": the caller says."""
        try:
            yield
        except self._errors as error:
            raise TransferError((f"NIXL could not {what}: " if what else "") + _reason_of(error)) from error


def _reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _errors_of(names: Iterable[object]) -> tuple[type[Exception], ...]:
    """What NIXL raises: its own errors, which have no common base class, and Python's errors for C++ exceptions."""
    own = [name for name in names if isinstance(name, type) and issubclass(name, Exception)]
    return (*own, RuntimeError, ValueError)


def _memory_of(device: str) -> tuple[str, int]:
    """NIXL's memory type and device number of "cpu" or "cuda:N": the number that the card has in the process that registered it,
    for NIXL finds the registration by it."""
    return ("DRAM", 0) if device == "cpu" else ("VRAM", index_of(device))


def _descriptors(addresses: Int64Array, lengths: Int64Array, device: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """[runs, 3] uint64 rows of (address, bytes, device)."""
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, lengths, device
    return rows
