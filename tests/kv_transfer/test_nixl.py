"""What only the NIXL transport does: slices, a few at a time, and links that are kept when they are closed."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.ids import Ticket
from kv_transfer import nixl
from kv_transfer.nixl import KEPT_S, SLICES_IN_FLIGHT, NixlTransport
from kv_transfer.transport import RunsDone, TransportEvent
from tests.kv_transfer.contract import MIB, rows
from tests.kv_transfer.local_agent import LocalAgent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nixl is for Linux only")
SLICE_BYTES = 64 * 1024


class Two:
    """Two agents of this process. posted: handles that the source has posted."""

    def __init__(self) -> None:
        self.source, self.target = (LocalAgent(NixlTransport(), 2 * MIB) for _ in range(2))
        self.source.fill(1)
        self.posted: list[object] = []
        agent: Any = self.source.transport._agent
        transfer: Callable[[object], str] = agent.transfer

        def counted(handle: object) -> str:
            self.posted.append(handle)
            return transfer(handle)

        agent.transfer = counted

    def push(self, ticket: int, size: int) -> None:
        self.source.push(ticket, self.target.pool.agent, rows((0, 0, size)))

    def poll(self) -> list[TransportEvent]:
        self.target.transport.poll()
        return self.source.transport.poll()

    def ended(self, ticket: int) -> None:
        assert self.source.ended(1, self.target) == [RunsDone(Ticket(ticket))]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Two:
    monkeypatch.setattr(nixl, "SLICE_BYTES", SLICE_BYTES)
    return Two()


def test_one_call_posts_only_a_few_slices(two: Two) -> None:
    slices = 3 * SLICES_IN_FLIGHT + 1
    two.source.connect(two.target.pool)
    two.push(1, slices * SLICE_BYTES)
    assert 1 <= len(two.posted) <= SLICES_IN_FLIGHT
    events: list[TransportEvent] = []
    while not events:
        before = len(two.posted)
        events = two.poll()
        assert len(two.posted) - before <= SLICES_IN_FLIGHT
    assert events == [RunsDone(Ticket(1))] and len(two.posted) == slices
    size = slices * SLICE_BYTES
    np.testing.assert_array_equal(two.target.bytes[:size], two.source.bytes[:size])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_link_that_is_closed_and_made_again_and_again_opens_no_further_files(two: Two) -> None:
    held = []
    for ticket in range(1, 6):
        two.source.connect(two.target.pool)
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
    two.source.connect(two.target.pool)
    two.source.transport.close(two.target.pool.agent)
    two.poll()
    assert removed == []
    later = time.monotonic() + KEPT_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    two.poll()
    assert removed == [two.target.pool.agent]
    monkeypatch.undo()
    two.source.connect(two.target.pool)
    two.push(1, 4096)
    two.ended(1)
