"""The in-process transport: pools of one process, copied with memmove. For tests and simulation.

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
from kv_transfer.transport import AgentLost, RunsDone, RunsFailed, TransportEvent


@dataclass(slots=True, eq=False)
class MemoryNetwork:
    """What the agents of one process share. hold: pushes stay in flight, their bytes unwritten, until `release`."""

    regions: dict[str, MemoryRegion] = field(default_factory=dict)
    hold: bool = False
    names: int = 0


@dataclass(slots=True, eq=False)
class _Pushed:
    ticket: Ticket
    agent: str
    runs: Int64Array


class MemoryTransport:
    """Implements `kv_transfer.transport.Transport` among the agents of one MemoryNetwork."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._name = ""
        self._region: MemoryRegion | None = None
        self._peers: dict[str, PoolDescriptor] = {}
        self._in_flight: deque[_Pushed] = deque()
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
        self._in_flight.append(_Pushed(ticket, agent, runs))
        if not self._network.hold:
            self.release()

    def poll(self) -> list[TransportEvent]:
        for agent in [agent for agent in self._peers if agent not in self._network.regions]:
            del self._peers[agent]
            self._events.append(AgentLost(agent, "the agent died"))
        events, self._events = self._events, []
        return events

    def close(self, agent: str | None = None) -> None:
        for pushed in [p for p in self._in_flight if agent in (None, p.agent)]:
            self._in_flight.remove(pushed)
            self._events.append(RunsFailed(pushed.ticket, "the link was closed", quiescent=True))
        if agent is not None:
            self._peers.pop(agent, None)
            return
        self._peers.clear()
        self._network.regions.pop(self._name, None)

    # --- what a test injects -----------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Write everything that is held."""
        while self._in_flight:
            pushed = self._in_flight.popleft()
            self._events.append(self._write(pushed))

    def fail(self, reason: str, quiescent: bool) -> None:
        """Fail everything that is held."""
        while self._in_flight:
            self._events.append(RunsFailed(self._in_flight.popleft().ticket, reason, quiescent))

    def _write(self, pushed: _Pushed) -> TransportEvent:
        source, target = self._region, self._network.regions.get(pushed.agent)
        if source is None or target is None or pushed.agent not in self._peers:
            return RunsFailed(pushed.ticket, f"no link to {pushed.agent}", quiescent=True)
        ends = pushed.runs[:, :2] + pushed.runs[:, 2:]
        if (pushed.runs < 0).any() or ends[:, 0].max() > source.region_bytes or ends[:, 1].max() > target.region_bytes:
            return RunsFailed(pushed.ticket, "a run is outside of its pool", quiescent=True)
        for source_offset, target_offset, run_bytes in pushed.runs.tolist():
            ctypes.memmove(target.address + target_offset, source.address + source_offset, run_bytes)
        return RunsDone(pushed.ticket)
