"""The in-process transport: pools of one process, copied with memmove, slice by slice. For tests and simulation.

Owns the network that its agents share, and what a test injects: held pushes, failures, dead agents. Knows no pages, threads or
clock: what happens when is the test's to say.
"""

import ctypes
from collections import deque
from dataclasses import dataclass, field

from common.errors import TransferError
from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.runs import slice_runs
from kv_transfer.transport import AgentLost, RunsDone, RunsFailed, TransportEvent

SLICE_BYTES = 16 * 2**20


@dataclass(slots=True, eq=False)
class Write:
    """One slice of a push that is under way, until it is `ended`. writer, reader: the agents. failure: why it did not land.
    quiescent: no byte of it will land any more."""

    writer: str
    reader: str
    source: MemoryRegion
    target: MemoryRegion
    runs: Int64Array
    ended: bool = False
    failure: str | None = None
    quiescent: bool = True

    def land(self) -> None:
        """Its bytes are at the target."""
        for source_offset, target_offset, run_bytes in self.runs.tolist():
            ctypes.memmove(self.target.address + target_offset, self.source.address + source_offset, run_bytes)
        self.ended = True

    def fail(self, reason: str, quiescent: bool) -> None:
        """The transport gives up on it."""
        self.ended, self.failure, self.quiescent = True, reason, quiescent


@dataclass(slots=True, eq=False)
class MemoryNetwork:
    """What the agents of one process share. hold: no slice is posted until `MemoryTransport.release`."""

    regions: dict[str, MemoryRegion] = field(default_factory=dict)
    hold: bool = False
    slice_bytes: int = SLICE_BYTES
    names: int = 0

    def carry(self, write: Write) -> None:
        """A slice was posted: it lands at once. A simulation lets it take time, or fail."""
        write.land()


@dataclass(slots=True, eq=False)
class _Pushing:
    """A ticket on its way: one slice is under way at a time, the others are still to post. failure: why none of them will be."""

    ticket: Ticket
    agent: str
    slices: deque[Int64Array]
    write: Write | None = None
    failure: str | None = None
    quiescent: bool = True


class MemoryTransport:
    """Implements `kv_transfer.transport.Transport` among the agents of one MemoryNetwork."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._name = ""
        self._region: MemoryRegion | None = None
        self._peers: dict[str, PoolDescriptor] = {}
        self._pushing: dict[Ticket, _Pushing] = {}
        self._events: list[TransportEvent] = []

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        self._network.names += 1
        self._name, self._region = f"memory-{self._network.names}", region
        self._network.regions[self._name] = region
        return self._name, b""

    def connect(self, pool: PoolDescriptor) -> str:
        if pool.agent not in self._network.regions:
            raise TransferError(f"agent {pool.agent} is not in this process")
        self._peers[pool.agent] = pool
        return "memmove"

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        pushing = _Pushing(ticket, agent, deque(slice_runs(runs, self._network.slice_bytes)))
        self._pushing[ticket] = pushing
        refusal = self._refusal(agent, runs)
        if refusal is not None:
            _stop(pushing, refusal)
        elif not self._network.hold:
            self._post(pushing)

    def poll(self) -> list[TransportEvent]:
        for agent in [agent for agent in self._peers if agent not in self._network.regions]:
            del self._peers[agent]
            self._events.append(AgentLost(agent, "the agent died"))
        for pushing in list(self._pushing.values()):
            self._advance(pushing, post=not self._network.hold)
        events, self._events = self._events, []
        return events

    def close(self, agent: str | None = None) -> None:
        for pushing in self._pushing.values():
            if agent in (None, pushing.agent):
                _stop(pushing, "the link was closed")
        if agent is not None:
            self._peers.pop(agent, None)
            return
        self._peers.clear()
        self._network.regions.pop(self._name, None)

    # --- what a test injects -----------------------------------------------------------------------------------------------

    def release(self, slices: int | None = None) -> None:
        """Write so many of the slices of each push that is held, or all."""
        for pushing in list(self._pushing.values()):
            for _ in range(len(pushing.slices) if slices is None else slices):
                self._advance(pushing, post=True)

    def fail(self, reason: str, quiescent: bool) -> None:
        """Fail everything that is held."""
        for pushing in self._pushing.values():
            _stop(pushing, reason)
            pushing.quiescent = quiescent

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _advance(self, pushing: _Pushing, post: bool) -> None:
        """Follow the slice under way, post the next when it has ended, and report the ticket when there is none left."""
        write = pushing.write
        if write is not None:
            if not write.ended:
                return
            pushing.write = None
            pushing.quiescent = pushing.quiescent and write.quiescent
            if write.failure is not None:
                _stop(pushing, write.failure)
        if pushing.slices and post and pushing.agent not in self._network.regions:
            _stop(pushing, f"no link to {pushing.agent}")
        if pushing.slices:
            if post:
                self._post(pushing)
            return
        del self._pushing[pushing.ticket]
        if pushing.failure is None:
            self._events.append(RunsDone(pushing.ticket))
        else:
            self._events.append(RunsFailed(pushing.ticket, pushing.failure, pushing.quiescent))

    def _post(self, pushing: _Pushing) -> None:
        assert self._region is not None, "register comes before push"
        target = self._network.regions[pushing.agent]
        pushing.write = Write(self._name, pushing.agent, self._region, target, pushing.slices.popleft())
        self._network.carry(pushing.write)

    def _refusal(self, agent: str, runs: Int64Array) -> str | None:
        """Why nothing of these runs can be written."""
        source, target = self._region, self._network.regions.get(agent)
        if source is None or target is None or agent not in self._peers:
            return f"no link to {agent}"
        ends = runs[:, :2] + runs[:, 2:]
        if (runs < 0).any() or ends[:, 0].max() > source.region_bytes or ends[:, 1].max() > target.region_bytes:
            return "a run is outside of its pool"
        return None


def _stop(pushing: _Pushing, reason: str) -> None:
    """Post nothing more of this ticket."""
    pushing.failure = pushing.failure or reason
    pushing.slices.clear()
