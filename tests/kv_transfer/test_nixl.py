"""What only the NIXL transport does: slices, a few at a time, and links that are kept when they are closed."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from common.ids import Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer import nixl
from kv_transfer.nixl import KEPT_S, SLICES_IN_FLIGHT, NixlTransport
from kv_transfer.transport import RunsDone, TransportEvent
from tests.kv_transfer.agent_process import pool_descriptor
from tests.kv_transfer.agents import WAIT_S
from tests.kv_transfer.contract import MIB, rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nixl is for Linux only")
SLICE_BYTES = 64 * 1024


@dataclass(slots=True, eq=False)
class Side:
    """A transport over memory of its own. posted: handles that were posted."""

    memory: "np.ndarray[Any, np.dtype[np.uint8]]" = field(default_factory=lambda: np.zeros(2 * MIB, dtype=np.uint8))
    transport: NixlTransport = field(default_factory=NixlTransport)
    posted: list[object] = field(default_factory=list)
    pool: PoolDescriptor = field(init=False)

    def __post_init__(self) -> None:
        region = MemoryRegion(address=self.memory.ctypes.data, region_bytes=len(self.memory), device="cpu")
        agent, wire = self.transport.register(region)
        self.pool = pool_descriptor(agent, region.address, len(self.memory), wire, backend="nixl")
        self._count_posts(self.transport._agent)

    def _count_posts(self, agent: Any) -> None:
        transfer: Callable[[object], str] = agent.transfer

        def counted(handle: object) -> str:
            self.posted.append(handle)
            return transfer(handle)

        agent.transfer = counted


class Two:
    """Two agents of this process."""

    def __init__(self) -> None:
        self.source, self.target = Side(), Side()
        self.source.memory[:] = np.random.default_rng(1).integers(0, 256, len(self.source.memory), dtype=np.uint8)

    def push(self, ticket: int, size: int) -> None:
        self.source.transport.push(Ticket(ticket), self.target.pool.agent, rows((0, 0, size)))

    def poll(self) -> list[TransportEvent]:
        self.target.transport.poll()
        return self.source.transport.poll()

    def ended(self, ticket: int) -> None:
        until = time.monotonic() + WAIT_S
        while (events := self.poll()) == []:
            assert time.monotonic() < until, f"push {ticket} did not end"
        assert events == [RunsDone(Ticket(ticket))]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Two:
    monkeypatch.setattr(nixl, "SLICE_BYTES", SLICE_BYTES)
    return Two()


def test_one_call_posts_a_few_slices_only_so_that_it_is_short(two: Two) -> None:
    slices = 3 * SLICES_IN_FLIGHT + 1
    two.source.transport.connect(two.target.pool)
    two.push(1, slices * SLICE_BYTES)
    assert 1 <= len(two.source.posted) <= SLICES_IN_FLIGHT
    events: list[TransportEvent] = []
    while not events:
        before = len(two.source.posted)
        events = two.poll()
        assert len(two.source.posted) - before <= SLICES_IN_FLIGHT
    assert events == [RunsDone(Ticket(1))] and len(two.source.posted) == slices
    size = slices * SLICE_BYTES
    np.testing.assert_array_equal(two.target.memory[:size], two.source.memory[:size])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_link_that_is_closed_and_made_again_and_again_opens_no_further_files(two: Two) -> None:
    held = []
    for ticket in range(1, 6):
        two.source.transport.connect(two.target.pool)
        two.push(ticket, SLICE_BYTES)
        two.ended(ticket)
        two.source.transport.close(two.target.pool.agent)
        held.append(open_files())
    assert len(set(held[1:])) == 1, held


def test_a_closed_link_is_forgotten_in_time_and_can_be_made_anew(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    agent: Any = two.source.transport._agent
    remove = agent.remove_remote_agent

    def noted(name: str) -> None:
        removed.append(name)
        remove(name)

    monkeypatch.setattr(agent, "remove_remote_agent", noted)
    two.source.transport.connect(two.target.pool)
    two.source.transport.close(two.target.pool.agent)
    two.poll()
    assert removed == []
    later = time.monotonic() + KEPT_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    two.poll()
    assert removed == [two.target.pool.agent]
    monkeypatch.undo()
    two.source.transport.connect(two.target.pool)
    two.push(1, 4096)
    two.ended(1)
