"""The NIXL transport: one-sided writes through UCX, on CPU memory between processes, over TCP, RDMA or GPU links.

Owns the NIXL agent and every handle. Knows no pages. All calls come from one thread, so the agent runs unsynchronised and without
its progress thread, which would spin on a core. Measured behaviour that shapes this file:

- `transfer` copies inside the call on many links: tickets are posted in slices, so that a call is short.
- A handle must be polled to its end, also after a failure: NIXL cannot abort, and releasing a handle does not stop it.
- A cut link is reported only with TCP_USER_TIMEOUT, which in turn wants the receiver to poll more often than that.

NIXL: https://github.com/ai-dynamo/nixl, API of 1.5.
"""

import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import TransferError
from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.runs import slice_runs
from kv_transfer.transport import AgentLost, RunsDone, RunsFailed, TransportEvent

SLICE_BYTES = 16 * 2**20
SLICES_IN_FLIGHT = 4
SILENCE_S = 10
"""A peer that acknowledges nothing for so long is lost."""
ENGINE_CONFIG = "TCP_USER_TIMEOUT={silence_s}s,POSIX_ERROR_HANDLING=y"
"""Silence is reported, and shared memory on one host is used with failures reported."""


@dataclass(slots=True, eq=False)
class _Pushing:
    """A ticket on its way: slices still to post, and handles that have not ended. failure: why no further slice is posted."""

    ticket: Ticket
    peer: "_Peer"
    slices: deque[Int64Array]
    handles: list[Any] = field(default_factory=list)
    failure: str | None = None
    quiescent: bool = True


@dataclass(slots=True, eq=False)
class _Peer:
    agent: str
    address: int
    device: int
    memory: str


class NixlTransport:
    """Implements `kv_transfer.transport.Transport`."""

    def __init__(self, silence_s: int = SILENCE_S) -> None:
        try:
            from nixl import _bindings
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransferError(f"NIXL cannot be loaded: {error}. Install nixl>=1.5.1 (Linux)") from error
        self._name = f"nixl-{uuid.uuid4().hex}"
        self._errors = _errors_of(vars(_bindings).values())
        with self._translated("start"):
            self._agent = nixl_agent(self._name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend("UCX", {"engine_config": ENGINE_CONFIG.format(silence_s=silence_s)})
        self._region: MemoryRegion | None = None
        self._registered: Any = None
        self._peers: dict[str, _Peer] = {}
        self._pushing: dict[Ticket, _Pushing] = {}
        self._events: list[TransportEvent] = []

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        memory, device = _memory_of(region.device)
        with self._translated("register the pool"):
            self._registered = self._agent.register_memory([(region.address, region.region_bytes, device, "")], memory)
            self._region = region
            return self._name, bytes(self._agent.get_agent_metadata())

    def connect(self, pool: PoolDescriptor) -> str:
        if pool.agent not in self._peers:
            memory, device = _memory_of(pool.device)
            with self._translated(f"connect to {pool.agent}"):
                name = self._agent.add_remote_agent(pool.wire)
                known = name.decode() if isinstance(name, bytes) else str(name)
                if known != pool.agent:
                    self._agent.remove_remote_agent(known)
                    raise TransferError(f"the descriptor of {pool.agent} belongs to {known}")
                self._agent.make_connection(pool.agent)
            self._peers[pool.agent] = _Peer(pool.agent, pool.address, device, memory)
        return "NIXL UCX"

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        peer = self._peers.get(agent)
        if peer is None:
            self._events.append(RunsFailed(ticket, f"no link to {agent}", quiescent=True))
            return
        pushing = _Pushing(ticket, peer, deque(slice_runs(runs, SLICE_BYTES)))
        self._pushing[ticket] = pushing
        self._post(pushing)

    def poll(self) -> list[TransportEvent]:
        with self._translated("drive progress"):
            self._agent.get_new_notifs()
        for pushing in list(self._pushing.values()):
            self._advance(pushing)
        events, self._events = self._events, []
        return events

    def close(self, agent: str | None = None) -> None:
        for pushing in self._pushing.values():
            if agent in (None, pushing.peer.agent):
                pushing.failure = pushing.failure or "the link was closed"
                pushing.slices.clear()
        for name in [name for name in self._peers if agent in (None, name)]:
            del self._peers[name]
            with self._ignoring_errors():
                self._agent.remove_remote_agent(name)
        if agent is None and self._registered is not None:
            with self._ignoring_errors():
                self._agent.deregister_memory(self._registered)
            self._registered = None

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _post(self, pushing: _Pushing) -> None:
        while pushing.slices and len(pushing.handles) < SLICES_IN_FLIGHT and pushing.failure is None:
            runs = pushing.slices.popleft()
            try:
                handle = self._start(pushing.peer, runs)
            except self._errors as error:
                self._fail(pushing, error)
            else:
                if handle is not None:
                    pushing.handles.append(handle)

    def _start(self, peer: _Peer, runs: Int64Array) -> Any | None:
        """Post one slice; the handle while it is in flight, None when it is done already. Raises NIXL's errors."""
        assert self._region is not None, "register comes before push"
        memory, device = _memory_of(self._region.device)
        source = self._agent.get_xfer_descs(_descriptors(runs[:, 0] + self._region.address, runs[:, 2], device), memory)
        target = self._agent.get_xfer_descs(_descriptors(runs[:, 1] + peer.address, runs[:, 2], peer.device), peer.memory)
        handle = self._agent.initialize_xfer("WRITE", source, target, peer.agent)
        if self._agent.transfer(handle) == "DONE":
            self._agent.release_xfer_handle(handle)
            return None
        return handle

    def _advance(self, pushing: _Pushing) -> None:
        for handle in list(pushing.handles):
            try:
                if self._agent.check_xfer_state(handle) == "PROC":
                    continue
            except self._errors as error:
                self._fail(pushing, error)
            pushing.handles.remove(handle)
            with self._ignoring_errors():
                self._agent.release_xfer_handle(handle)
        self._post(pushing)
        if pushing.handles:
            return
        if pushing.failure is not None:
            del self._pushing[pushing.ticket]
            self._events.append(RunsFailed(pushing.ticket, pushing.failure, pushing.quiescent))
        elif not pushing.slices:
            del self._pushing[pushing.ticket]
            self._events.append(RunsDone(pushing.ticket))

    def _fail(self, pushing: _Pushing, error: Exception) -> None:
        """A slice failed. Only a dead endpoint proves that nothing of it is under way."""
        kind = type(error).__name__
        pushing.failure = pushing.failure or f"{kind}: {error}"
        pushing.slices.clear()
        dead = kind in ("nixlRemoteDisconnectError", "nixlBackendError")
        pushing.quiescent = pushing.quiescent and dead
        if dead and pushing.peer.agent in self._peers:
            self._events.append(AgentLost(pushing.peer.agent, kind))
            self.close(pushing.peer.agent)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransferError(f"NIXL could not {what}: {type(error).__name__}: {error}") from error

    @contextmanager
    def _ignoring_errors(self) -> Iterator[None]:
        """For what must be tried on the way out and whose failure changes nothing: the peer may be gone."""
        try:
            yield
        except self._errors:
            return


def _errors_of(names: Iterable[object]) -> tuple[type[Exception], ...]:
    """What calls of NIXL raise: its own errors, which have no common base, and what its bindings make of C++ exceptions."""
    own = [name for name in names if isinstance(name, type) and issubclass(name, Exception)]
    return (*own, RuntimeError, ValueError)


def _memory_of(device: str) -> tuple[str, int]:
    """NIXL's memory type and device number of "cpu" or "cuda:N"."""
    if device.startswith("cuda"):
        return "VRAM", int(device.partition(":")[2] or 0)
    return "DRAM", 0


def _descriptors(addresses: Int64Array, lengths: Int64Array, device: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """[runs, 3] uint64 rows of (address, bytes, device)."""
    return np.stack([addresses, lengths, np.full(len(addresses), device)], axis=1).astype(np.uint64)
