"""The port of a transport backend: register, connect, push, poll, close. It moves runs of bytes and knows nothing else.

Owns no implementation. All calls come from one thread (`kv_transfer/transfer_thread.py`). There is no abort, because no library
has one: every ticket ends in RunsDone or RunsFailed, and RunsFailed says whether it is quiescent.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion


@dataclass(frozen=True, slots=True)
class RunsDone:
    """Every byte of the ticket is visible at the target."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class RunsFailed:
    """The ticket failed. `quiescent`: no byte of it is or will be under way, proven by the backend."""

    ticket: Ticket
    reason: str
    quiescent: bool


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The link to an agent is gone; its tickets have failed or will fail through their own events."""

    agent: str
    reason: str


TransportEvent: TypeAlias = RunsDone | RunsFailed | AgentLost


class Transport(Protocol):
    """One backend. Raises TransferError for what its library refuses; never a foreign error."""

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        """Make the pool's memory known. Returns (agent name unique per process incarnation, opaque wire descriptor)."""

    def connect(self, pool: PoolDescriptor) -> str:
        """Get ready to push to a peer's pool, wire-up included; bounded in time. Idempotent per agent. Returns what link was
        chosen, for people. Raises TransferError."""

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        """Start writing. runs: [n, 3] int64 rows of (source offset, target offset, bytes), offsets from the pools' bases.
        May block for a bounded slice of the copy. A failure arrives through `poll`."""

    def poll(self) -> list[TransportEvent]:
        """Drive progress, ours and that of peers writing to us, and return what happened."""

    def close(self, agent: str | None = None) -> None:
        """Close the link to one agent, or with None everything. The tickets of what is closed end through `poll`
        (or are gone with the process)."""
