"""The port of a transport backend: register, connect, push, poll, close. A backend moves runs of bytes and knows nothing else.

Owns the port, its events, and how runs are merged and cut into slices. Runs are [n, 3] int64 rows of (source offset, target
offset, bytes); `kv_transfer/planner.py` makes them of pages and layouts, which are not known here. All calls come from one thread
(`kv_transfer/transfer_loop.py`). There is no abort, because no library has one. Every ticket ends in RunsDone or RunsFailed, and
RunsFailed says whether the ticket is quiescent.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion


@dataclass(frozen=True, slots=True)
class Connected:
    """The link to an agent is made."""

    agent: str
    detail: str
    """What kind of link was chosen, for people."""


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
    """The ticket failed."""

    ticket: Ticket
    reason: str
    quiescent: bool
    """The backend has proven that no byte of it is or will be under way."""


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
        through `poll`, unless the process ends first. The result of an attempt to connect is not reported any more."""


def merge_runs(runs: Int64Array) -> Int64Array:
    """The same bytes in fewer runs: neighbours that continue each other on both sides become one run."""
    is_start = np.ones(len(runs), dtype=bool)
    ends = runs[:-1, :2] + runs[:-1, 2:]
    np.not_equal(ends[:, 0], runs[1:, 0], out=is_start[1:])
    is_start[1:] |= ends[:, 1] != runs[1:, 1]
    starts = np.flatnonzero(is_start)
    if len(starts) == len(runs):
        return runs
    merged = runs[starts]
    merged[:, 2] = np.add.reduceat(runs[:, 2], starts)
    return merged


def slice_runs(runs: Int64Array, slice_bytes: int) -> list[Int64Array]:
    """The same bytes in slices of at most `slice_bytes`, in order. A run that crosses the end of a slice is cut there."""
    ends = np.cumsum(runs[:, 2])
    if not len(runs) or ends[-1] <= slice_bytes:
        return [runs] if len(runs) else []
    starts = ends - runs[:, 2]
    first = starts // slice_bytes
    pieces = (ends - 1) // slice_bytes - first + 1
    index = np.repeat(np.arange(len(runs)), pieces)
    number = first[index] + np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(starts[index], number * slice_bytes)
    end = np.minimum(ends[index], (number + 1) * slice_bytes)
    offset = begin - starts[index]
    cut = np.stack([runs[index, 0] + offset, runs[index, 1] + offset, end - begin], axis=1)
    return np.split(cut, np.flatnonzero(np.diff(number)) + 1)
