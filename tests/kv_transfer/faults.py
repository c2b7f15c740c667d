"""A transport that goes wrong on purpose, around one that does not.

Owns what a test injects: delay, failure, and writes that land after their push was reported as ended. Knows no backend.
"""

from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.transport import AgentLost, RunsFailed, Transport, TransportEvent


class FaultyTransport:
    """Implements `kv_transfer.transport.Transport`. Every push is held until `land` or `fail`."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._held: dict[Ticket, tuple[str, Int64Array]] = {}
        self._failed: set[Ticket] = set()  # reported, and able to land yet
        self._events: list[TransportEvent] = []

    def land(self, ticket: Ticket) -> None:
        """Let it be written now, also when it was reported as failed before."""
        self._inner.push(ticket, *self._held.pop(ticket))

    def fail(self, ticket: Ticket, quiescent: bool) -> None:
        """Report it as failed; quiescent is a lie if it lands later."""
        self._failed.add(ticket)
        self._events.append(RunsFailed(ticket, "injected", quiescent))

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        return self._inner.register(region)

    def connect(self, pool: PoolDescriptor) -> str:
        return self._inner.connect(pool)

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        self._held[ticket] = agent, runs

    def poll(self) -> list[TransportEvent]:
        """What happens to a push after it was reported as failed is not told."""
        told = [event for event in self._inner.poll() if isinstance(event, AgentLost) or event.ticket not in self._failed]
        events, self._events = self._events + told, []
        return events

    def close(self, agent: str | None = None) -> None:
        self._inner.close(agent)
