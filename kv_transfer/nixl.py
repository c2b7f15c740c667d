"""The NIXL transport: one-sided writes through UCX, on CPU memory between processes, over TCP, RDMA or GPU links.

Owns the NIXL agent and every handle. Knows no pages. All calls come from one thread, so the agent runs unsynchronised and without
its progress thread, which would spin on a core. Measured behaviour that shapes this file:

- `transfer` copies inside the call on many links: tickets are posted in slices, so that a call is short.
- A handle must be polled to its end, also after a failure: NIXL cannot abort, and releasing a handle does not stop it.
- A cut link is reported only with TCP_USER_TIMEOUT, which in turn wants the receiver to poll more often than that.
- A peer is removed only when nothing is in flight to it: before, its handles would fail while their bytes flow on.
- Removing a peer that lives leaves its socket open on both sides: a link that is closed is kept for a while, to be used again.

NIXL: https://github.com/ai-dynamo/nixl, API of 1.5.
"""

import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
KEPT_S = 120.0
"""A link that was closed can be used again for so long: longer than it takes until a lost link is tried again."""
ENGINE_CONFIG = "TCP_USER_TIMEOUT={silence_s}s,TLS=^posix,MAX_RMA_RAILS=1"
"""Silence is reported. On one host bytes go straight from memory to memory, but links are made over TCP: over shared memory, UCX
1.23 crashes in a receiver that was stopped while a sender linked to it and was killed. One rail: it corrupts its heap when one of
two TCP rails times out and the other lives on. UCX_MAX_RMA_RAILS=2 in the environment wins, where bandwidth needs it."""


@dataclass(slots=True, eq=False)
class _Peer:
    """in_flight: handles that have not ended. kept_until_s: when a closed one is forgotten."""

    agent: str
    address: int
    device: int
    memory: str
    in_flight: int = 0
    kept_until_s: float = math.inf


@dataclass(slots=True, eq=False)
class _Pushing:
    """A ticket on its way: slices still to post, and handles that have not ended. failure: why no further slice is posted."""

    ticket: Ticket
    peer: _Peer
    slices: deque[Int64Array]
    handles: list[Any] = field(default_factory=list)
    failure: str | None = None
    quiescent: bool = True


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
        self._closed: dict[str, _Peer] = {}
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
            kept = self._closed.pop(pool.agent, None)
            self._peers[pool.agent] = kept or self._add(pool)
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
        self._forget()
        events, self._events = self._events, []
        return events

    def close(self, agent: str | None = None) -> None:
        self._stop_pushes(agent)
        for name in [name for name in self._peers if agent in (None, name)]:
            self._leave(self._peers[name], KEPT_S if agent else 0.0)
        self._forget()
        if agent is None and self._registered is not None:
            with self._ignoring_errors():
                self._agent.deregister_memory(self._registered)
            self._registered = None

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _add(self, pool: PoolDescriptor) -> _Peer:
        memory, device = _memory_of(pool.device)
        with self._translated(f"connect to {pool.agent}"):
            name = self._agent.add_remote_agent(pool.wire)
            known = name.decode() if isinstance(name, bytes) else str(name)
            if known != pool.agent:
                if known not in self._peers and known not in self._closed:
                    self._agent.remove_remote_agent(known)
                raise TransferError(f"the descriptor of {pool.agent} belongs to {known}")
            self._agent.make_connection(pool.agent)
        return _Peer(pool.agent, pool.address, device, memory)

    def _stop_pushes(self, agent: str | None) -> None:
        for pushing in self._pushing.values():
            if agent in (None, pushing.peer.agent):
                pushing.failure = pushing.failure or "the link was closed"
                pushing.slices.clear()

    def _leave(self, peer: _Peer, kept_s: float) -> None:
        del self._peers[peer.agent]
        self._closed[peer.agent] = peer
        peer.kept_until_s = time.monotonic() + kept_s

    def _forget(self) -> None:
        """Remove the closed peers to which nothing is in flight any more, when they have been kept for long enough."""
        if not self._closed:
            return
        now = time.monotonic()
        for name in [name for name, peer in self._closed.items() if not peer.in_flight and now >= peer.kept_until_s]:
            del self._closed[name]
            with self._ignoring_errors():
                self._agent.remove_remote_agent(name)

    def _post(self, pushing: _Pushing) -> None:
        """Post the next slices, few enough for one call also where each of them is copied inside it."""
        for _ in range(SLICES_IN_FLIGHT - len(pushing.handles)):
            if not pushing.slices:
                return
            try:
                handle = self._prepare(pushing.peer, pushing.slices.popleft())
            except self._errors as error:
                self._refuse(pushing, error)
                return
            pushing.handles.append(handle)
            pushing.peer.in_flight += 1
            self._settle(pushing, handle, self._agent.transfer)

    def _prepare(self, peer: _Peer, runs: Int64Array) -> Any:
        """The handle of one slice; nothing is under way yet. Raises NIXL's errors, such as for memory outside of a pool."""
        assert self._region is not None, "register comes before push"
        memory, device = _memory_of(self._region.device)
        source = self._agent.get_xfer_descs(_descriptors(runs[:, 0] + self._region.address, runs[:, 2], device), memory)
        target = self._agent.get_xfer_descs(_descriptors(runs[:, 1] + peer.address, runs[:, 2], peer.device), peer.memory)
        return self._agent.initialize_xfer("WRITE", source, target, peer.agent)

    def _advance(self, pushing: _Pushing) -> None:
        for handle in list(pushing.handles):
            self._settle(pushing, handle, self._agent.check_xfer_state)
        self._post(pushing)
        if pushing.handles:
            return
        if pushing.failure is not None:
            del self._pushing[pushing.ticket]
            self._events.append(RunsFailed(pushing.ticket, pushing.failure, pushing.quiescent))
        elif not pushing.slices:
            del self._pushing[pushing.ticket]
            self._events.append(RunsDone(pushing.ticket))

    def _settle(self, pushing: _Pushing, handle: Any, state_of: Callable[[Any], str]) -> None:
        """Post or check one handle, and let go of it when it has ended."""
        try:
            state = state_of(handle)
        except self._errors as error:
            self._fail(pushing, error)
        else:
            if state == "PROC":
                return
            if state != "DONE":
                self._refuse(pushing, RuntimeError(f"a write is in state {state}"))
                pushing.quiescent = False
        pushing.handles.remove(handle)
        pushing.peer.in_flight -= 1
        with self._ignoring_errors():
            self._agent.release_xfer_handle(handle)

    def _refuse(self, pushing: _Pushing, error: Exception) -> None:
        """Post nothing more of this ticket."""
        pushing.failure = pushing.failure or f"{type(error).__name__}: {error}"
        pushing.slices.clear()

    def _fail(self, pushing: _Pushing, error: Exception) -> None:
        """A slice failed under way. Only a dead endpoint proves that nothing of it is sent any more.

        What a stopped receiver has in its socket still lands when it goes on: measured, 0.1 MB at its first polls.
        """
        self._refuse(pushing, error)
        kind, peer = type(error).__name__, pushing.peer
        dead = kind in ("nixlRemoteDisconnectError", "nixlBackendError")
        pushing.quiescent = pushing.quiescent and dead
        if dead and self._peers.get(peer.agent) is peer:
            self._events.append(AgentLost(peer.agent, kind))
            self._leave(peer, kept_s=0.0)
            self._stop_pushes(peer.agent)

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
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, lengths, device
    return rows
