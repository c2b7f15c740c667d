"""The in-process transport: copies between pools of one process with memmove.

Owns the network that its agents share, and the faults that a test injects: held writes, failures, dead agents. Knows no pages,
threads or clock: the test decides what happens when.
"""

import ctypes
import sys
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.pushes import SlicedTransport, SliceFailed
from kv_transfer.transport import AgentLost, ConnectFailed, TransportEvent


@dataclass(slots=True, eq=False)
class Write:
    """One slice on its way from the agent `writer` to the agent `reader`."""

    writer: str
    reader: str
    source: MemoryRegion
    target: MemoryRegion
    runs: Int64Array
    landed: "Future[None]" = field(default_factory=Future)
    """Ends when the bytes are at the target, or with the failure."""

    def land(self) -> None:
        """Copy the bytes to the target."""
        for source_offset, target_offset, run_bytes in self.runs.tolist():
            ctypes.memmove(self.target.address + target_offset, self.source.address + source_offset, run_bytes)
        self.landed.set_result(None)

    def fail(self, reason: str, quiescent: bool) -> None:
        """End it. The link goes on, so that each push fails by itself."""
        self.landed.set_exception(SliceFailed(reason, quiescent, loses_link=False))


@dataclass(slots=True, eq=False)
class MemoryNetwork:
    """What the agents of one process share. Transports read slice_bytes and window when they are made."""

    regions: dict[str, MemoryRegion] = field(default_factory=dict)
    hold: bool = False
    """Writes wait for `MemoryTransport.release`."""
    slice_bytes: int = 16 * 2**20
    window: int = sys.maxsize
    """How many slices a link has under way at once."""
    names: int = 0
    silent: "dict[str, Future[None]]" = field(default_factory=dict)
    """Agents that do not answer a peer that connects, until the test decides the result."""

    def carry(self, write: Write) -> None:
        """Carry out a write: it lands at once. A simulation lets it take time, or fail."""
        write.land()


class MemoryTransport(SlicedTransport):
    """Implements `kv_transfer.transport.Transport` among the agents of one network."""

    library = "memmove"

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(network.slice_bytes, sys.maxsize, network.window)
        self.network = network
        self.name = ""
        self._peers: set[str] = set()
        self.held: deque[Write] = deque()
        """Writes that wait for `release`."""

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        self.network.names += 1
        self.name = f"memory-{self.network.names}"
        self.network.regions[self.name] = self._region = region
        return self.name, b""

    def connect(self, pool: PoolDescriptor) -> None:
        if pool.agent not in self.network.regions:
            self._events.append(ConnectFailed(pool.agent, f"agent {pool.agent} is not in this process"))
            return
        self._peers.add(pool.agent)
        super().connect(pool)

    def link_to(self, pool: PoolDescriptor) -> "_MemoryLink":
        return _MemoryLink(self, pool.agent, self.network.regions[pool.agent], self.network.silent.get(pool.agent))

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        super().push(ticket, agent, runs)
        self.begin(agent)

    def poll(self) -> list[TransportEvent]:
        if not self.network.hold:
            self.release()
        lost = [agent for agent in self._peers if agent not in self.network.regions]
        self._peers.difference_update(lost)
        return [*(AgentLost(agent, "the agent died") for agent in lost), *super().poll()]

    def close(self, agent: str | None = None) -> None:
        super().close(agent)
        self._peers = self._peers - {agent} if agent else set()
        if agent is None:
            self.network.regions.pop(self.name, None)

    # --- what a test injects -----------------------------------------------------------------------------------------------

    def release(self, slices: int = sys.maxsize) -> None:
        """Carry out this many of the slices that are held."""
        for _ in range(min(slices, len(self.held))):
            write = self.held.popleft()
            if write.reader in self.network.regions:
                self.network.carry(write)
            else:
                write.fail(f"no link to {write.reader}", quiescent=True)

    def fail(self, reason: str, quiescent: bool, reader: str | None = None) -> None:
        """Fail what is held: everything, or what goes to one reader."""
        failed = [write for write in self.held if reader in (None, write.reader)]
        self.held = deque(write for write in self.held if write not in failed)
        for write in failed:
            write.fail(reason, quiescent)


@dataclass(frozen=True, slots=True)
class _MemoryLink:
    """Implements `kv_transfer.pushes.PushLink`."""

    transport: MemoryTransport
    reader: str
    target: MemoryRegion
    ready: "Future[None] | None" = None
    detail: str = "memmove"

    def write(self, runs: Int64Array) -> "Future[None]":
        network, writer = self.transport.network, self.transport.name
        write = Write(writer, self.reader, network.regions[writer], self.target, runs)
        self.transport.held.append(write)
        if not network.hold:
            self.transport.release()
        return write.landed

    def close(self) -> None:
        self.transport.fail("the link was closed", quiescent=True, reader=self.reader)
