"""The port of a transport backend: register, connect, push, poll, close. A backend moves runs of bytes and knows nothing else.

Owns no implementation. All calls come from one thread (`kv_transfer/transfer_thread.py`). There is no abort, because no library
has one. Every ticket ends in RunsDone or RunsFailed, and RunsFailed says whether the ticket is quiescent.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion


@dataclass(frozen=True, slots=True)
class Connected:
    """The link to an agent is made. detail: what kind of link was chosen, for people."""

    agent: str
    detail: str


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """There is no link to the agent."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunsDone:
    """Every byte of the ticket is visible at the target."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class RunsFailed:
    """The ticket failed. `quiescent`: the backend has proven that no byte of it is or will be under way."""

    ticket: Ticket
    reason: str
    quiescent: bool


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The link to an agent is gone. Its tickets fail through events of their own."""

    agent: str
    reason: str


TransportEvent: TypeAlias = Connected | ConnectFailed | RunsDone | RunsFailed | AgentLost


class Transport(Protocol):
    """One backend. Raises TransferError for what its library refuses, and never a foreign error."""

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        """Register the pool's memory. Returns (agent name, opaque wire descriptor). Every incarnation has a new name."""

    def connect(self, pool: PoolDescriptor) -> None:
        """Begin to make the link to a peer's pool; waits for no peer. Connected or ConnectFailed arrives through `poll`, within a
        bounded time, unless the link is closed before. Idempotent per agent."""

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        """Start writing. runs: [n, 3] int64 rows of (source offset, target offset, bytes), from the start of each pool.
        May block while a bounded slice is copied. A failure arrives through `poll`."""

    def poll(self) -> list[TransportEvent]:
        """Drive our writes and those of peers to us, and return what happened."""

    def close(self, agent: str | None = None) -> None:
        """Close the link to one agent, or give up making it; with None, close everything. Tickets on closed links still end
        through `poll`, unless the process ends first. What came of an attempt to connect is told no more."""
