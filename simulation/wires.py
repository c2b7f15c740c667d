"""The wires of a simulated fleet: writes take time, and what is under way shares each host's link. No memory is touched.

Owns when writes end. Knows no pages and no messages. A host sends at full speed what was posted first, and takes in what arrived
first; both directions of its link are independent:

    posted ─► waits for the sender's link ─► leaves ─► waits for the receiver's ─► latency ─► done

The network between the hosts is as fast as all of their links together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.transport import AgentLost, Connected, ConnectFailed, RunsDone, RunsFailed, TransportEvent
from simulation.clock import Clock


@dataclass(frozen=True, kw_only=True)
class WireSpeed:
    """bytes_per_s: of each direction of a host's link. latency_s: of a write, whatever its size."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, write_bytes: int) -> float:
        """A write that nothing else delays."""
        return self.latency_s + write_bytes / self.bytes_per_s


@dataclass(slots=True, eq=False)
class _Host:
    """When the last write that was posted here has left, and when the last one that comes here has arrived. writers: who has a
    link to this host."""

    transport: "WireTransport"
    sent_s: float = 0.0
    arrived_s: float = 0.0
    writers: set["WireTransport"] = field(default_factory=set)


class Wires:
    """What the hosts of one fleet share. bytes_written: by writes that have ended well."""

    def __init__(self, clock: Clock, speed: WireSpeed) -> None:
        self.clock = clock
        self.speed = speed
        self.hosts: dict[str, _Host] = {}
        self.names = 0
        self.bytes_written = 0

    def died(self, agent: str) -> None:
        """The process of this agent is gone: those with a link to it see that at once, and what is under way to it fails."""
        host = self.hosts.pop(agent, None)
        if host is not None:
            for writer in sorted(host.writers, key=lambda writer: writer.name):
                writer.lose(agent)

    def arrives_s(self, writer: _Host, reader: _Host, write_bytes: int) -> float:
        """When a write that is posted now ends. It takes its turn on both links."""
        alone_s = write_bytes / self.speed.bytes_per_s
        writer.sent_s = max(self.clock.now, writer.sent_s) + alone_s
        reader.arrived_s = max(writer.sent_s, reader.arrived_s + alone_s)
        return reader.arrived_s + self.speed.latency_s


class WireTransport:
    """Implements `kv_transfer.transport.Transport` over the wires. wake: called when `poll` has news."""

    def __init__(self, wires: Wires, wake: Callable[[], None]) -> None:
        self._wires = wires
        self._wake = wake
        wires.names += 1
        self.name = f"wire-{wires.names}"
        self._linked: set[str] = set()
        self._writes: dict[Ticket, str] = {}
        """What is under way, and to whom."""
        self._events: list[TransportEvent] = []

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        self._wires.hosts[self.name] = _Host(self)
        return self.name, b""

    def connect(self, pool: PoolDescriptor) -> None:
        host = self._wires.hosts.get(pool.agent)
        if host is None:
            self._tell(ConnectFailed(pool.agent, f"agent {pool.agent} is gone"))
            return
        host.writers.add(self)
        self._linked.add(pool.agent)
        self._tell(Connected(pool.agent, "simulated"))

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        reader = self._wires.hosts.get(agent)
        if reader is None or agent not in self._linked:
            self._tell(RunsFailed(ticket, f"no link to {agent}", quiescent=True))
            return
        write_bytes = int(runs[:, 2].sum())
        self._writes[ticket] = agent
        arrives_s = self._wires.arrives_s(self._wires.hosts[self.name], reader, write_bytes)
        self._wires.clock.at(arrives_s, lambda: self._arrived(ticket, write_bytes))

    def poll(self) -> list[TransportEvent]:
        events, self._events = self._events, []
        return events

    def close(self, agent: str | None = None) -> None:
        """What is under way on a closed link arrives all the same."""
        if agent is None:
            self._wires.died(self.name)
        for peer in self._linked.copy() if agent is None else {agent} & self._linked:
            self._linked.discard(peer)
            if peer in self._wires.hosts:
                self._wires.hosts[peer].writers.discard(self)

    def lose(self, agent: str) -> None:
        """The process of this agent is gone."""
        self._linked.discard(agent)
        for ticket in [ticket for ticket, reader in self._writes.items() if reader == agent]:
            del self._writes[ticket]
            self._events.append(RunsFailed(ticket, "the agent died", quiescent=True))
        self._tell(AgentLost(agent, "the agent died"))

    def _arrived(self, ticket: Ticket, write_bytes: int) -> None:
        if self._writes.pop(ticket, None) is not None and self.name in self._wires.hosts:
            self._wires.bytes_written += write_bytes
            self._tell(RunsDone(ticket))

    def _tell(self, event: TransportEvent) -> None:
        self._events.append(event)
        self._wake()
