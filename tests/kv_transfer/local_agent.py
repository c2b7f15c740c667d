"""An agent in the test's own process: a transport with its pool.

Owns the pool, and the wait for what the transport reports. Knows no backend.
"""

import time
from typing import Generic, TypeVar

import msgspec
import numpy as np

from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.transport import AgentLost, Transport, TransportEvent
from tests.kv_transfer.agent_process import pool_descriptor

WAIT_S = 60.0
T = TypeVar("T", bound=Transport)


class LocalAgent(Generic[T]):
    def __init__(self, transport: T, pool_bytes: int, device: str = "cpu") -> None:
        self.bytes = np.zeros(pool_bytes, dtype=np.uint8)
        self.transport = transport
        region = MemoryRegion(address=int(self.bytes.ctypes.data), region_bytes=pool_bytes, device=device)
        agent, wire = transport.register(region)
        self.pool: PoolDescriptor = pool_descriptor(agent, region.address, pool_bytes, wire, "any")
        self.everything: Int64Array = np.array([(0, 0, pool_bytes)], dtype=np.int64)

    def wire_with(self, **change: object) -> bytes:
        """Its descriptor with other values in it."""
        return msgspec.msgpack.encode({**msgspec.msgpack.decode(self.pool.wire), **change})

    def push(self, ticket: int, to: PoolDescriptor, runs: Int64Array | None = None) -> None:
        """runs: those of the whole pool if there are none."""
        self.transport.push(Ticket(ticket), to.agent, self.everything if runs is None else runs)

    def ended(self, pushes: int = 1, *others: "LocalAgent[T]") -> list[TransportEvent]:
        """What was reported until so many pushes had ended. others: agents that make progress meanwhile."""
        events: list[TransportEvent] = []
        until = time.monotonic() + WAIT_S
        while sum(not isinstance(event, AgentLost) for event in events) < pushes:
            assert time.monotonic() < until, events
            for other in others:
                other.transport.poll()
            events += self.transport.poll()
            time.sleep(1e-4)
        return events
