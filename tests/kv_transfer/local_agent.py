"""An agent in this process: a transport with its pool.

Owns the pool, and the wait for what the transport reports. Knows no backend.
"""

import time
from typing import Generic, TypeVar

import msgspec
import numpy as np

from common.errors import TransferError
from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import KVLayout, MemoryRegion
from kv_transfer.transport import Connected, ConnectFailed, RunsDone, RunsFailed, Transport, TransportEvent
from tests.kv_transfer.pools import Bytes, HostPool, Pool

WAIT_S = 60.0
"""Longest wait for an answer or an event: an agent that is silent for longer hangs."""
PERIOD_BYTES = 2**20 + 7
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=1, dtype="uint8")
"""A transport knows bytes only, but descriptors must have a layout: this one has pages of two bytes, the smallest."""
T = TypeVar("T", bound=Transport)


def random_bytes(seed: int, pool_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """The same bytes for the same seed, in any process. They repeat with a period that divides no page or slice."""
    return np.resize(np.frombuffer(np.random.default_rng(seed).bytes(PERIOD_BYTES), dtype=np.uint8), pool_bytes)


def region_of(pool: Bytes, device: str = "cpu") -> MemoryRegion:
    return MemoryRegion(address=int(pool.ctypes.data), region_bytes=pool.nbytes, device=device)


def pool_descriptor(agent: str, address: int, pool_bytes: int, wire: bytes, device: str = "cpu") -> PoolDescriptor:
    """A pool of bytes. No transport looks at the backend."""
    pages = pool_bytes // LAYOUT.page_bytes
    return PoolDescriptor(backend="any", agent=agent, address=address, total_pages=pages, device=device, layout=LAYOUT, wire=wire)


class LocalAgent(Generic[T]):
    """bytes: its pool, where that is on the host."""

    def __init__(self, transport: T, pool_bytes: int, device: str = "cpu", memory: Pool | None = None) -> None:
        """device: what the region of a new pool on the host says. memory: the pool, if there is one already."""
        self.pool_bytes = pool_bytes
        self.held: Pool = memory or HostPool(pool_bytes, device)
        self.bytes: Bytes = self.held.bytes if isinstance(self.held, HostPool) else np.empty(0, dtype=np.uint8)
        self.transport = transport
        self._news: list[TransportEvent] = []
        region = self.held.region
        agent, wire = transport.register(region)
        self.pool = pool_descriptor(agent, region.address, pool_bytes, wire, region.device)
        self.everything: Int64Array = np.array([(0, 0, pool_bytes)], dtype=np.int64)

    def fill(self, seed: int) -> None:
        """Fill the pool with `random_bytes(seed, pool_bytes)`."""
        self.held.write(random_bytes(seed, self.pool_bytes))

    def wipe(self, value: int, start: int = 0, end: int | None = None) -> None:
        """Set every byte of the pool, or of a part of it."""
        self.held.wipe(value, start, end)

    def memory(self) -> Bytes:
        """A copy of the pool."""
        return self.held.read()

    def connect(self, pool: PoolDescriptor) -> str:
        """Make the link. Returns its detail. Raises TransferError."""
        self.begin_connect(pool)
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            for event in self.transport.poll():
                if isinstance(event, Connected | ConnectFailed) and event.agent == pool.agent:
                    if isinstance(event, ConnectFailed):
                        raise TransferError(event.reason)
                    return event.detail
                self._news.append(event)
            time.sleep(1e-4)
        raise AssertionError(f"neither connected to {pool.agent} nor failed")

    def begin_connect(self, pool: PoolDescriptor) -> None:
        """Connected or ConnectFailed is among the events then."""
        self.transport.connect(pool)

    def push(self, ticket: int, agent: str, runs: Int64Array | None = None) -> None:
        """runs: those of the whole pool if there are none."""
        self.transport.push(Ticket(ticket), agent, self.everything if runs is None else runs)

    def events(self, timeout_s: float) -> list[TransportEvent]:
        """What was reported since the last call. This agent does not wait: its caller comes again."""
        events, self._news = [*self._news, *self.transport.poll()], []
        return events

    def close(self, agent: str | None = None) -> None:
        self.transport.close(agent)

    def end(self) -> None:
        """Leave in order."""
        self.transport.close()

    def wire_with(self, **change: object) -> bytes:
        """Its descriptor with other values in it."""
        return msgspec.msgpack.encode({**msgspec.msgpack.decode(self.pool.wire), **change})

    def ended(self, pushes: int = 1, *others: "LocalAgent[T]") -> list[TransportEvent]:
        """What was reported until so many pushes had ended. others: agents that make progress meanwhile."""
        events: list[TransportEvent] = []
        until = time.monotonic() + WAIT_S
        while sum(isinstance(event, RunsDone | RunsFailed) for event in events) < pushes:
            assert time.monotonic() < until, events
            for other in others:
                other.transport.poll()
            events += self.events(0.0)
            time.sleep(1e-4)
        return events
