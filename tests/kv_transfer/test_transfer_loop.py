"""The transfer loop over the in-process transport, on a clock that is turned by hand."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from common.ids import Incarnation, InstanceId, Ticket
from common.instance.ports import LinkChanged, Push, PushDone, PushFailed, TransferEvent
from common.messages import InstanceInfo, LinkInfo
from common.pages.layout import KVLayout, MemoryRegion
from kv_transfer.memory import MemoryNetwork, MemoryTransport
from kv_transfer.transfer_loop import PUSH_S, SLOWEST_BYTES_PER_S, TransferLoop
from tests.builders import LAYOUT, instance

PEER = InstanceId("d")
LIFE = Incarnation("1")
PAGES = 8
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True, eq=False)
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True, eq=False)
class Side:
    """One instance's transfers: [pages, page_bytes] of memory and the loop over them."""

    memory: Bytes
    transport: MemoryTransport
    loop: TransferLoop

    def info(self, incarnation: str = "1") -> InstanceInfo:
        return msgspec.structs.replace(instance(PEER, "decode", incarnation), pool=self.loop.descriptor)

    def events(self) -> list[TransferEvent]:
        """Turn once: what came of it."""
        news = self.loop.step()
        events = self.loop.poll()
        assert news == bool(events), "news are announced when there are any"
        return events


class Two:
    """A source, and a target that it may connect to."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.network = MemoryNetwork()
        self.source = self.side(seed=1)
        self.target = self.side(seed=2)

    def side(self, seed: int, layout: KVLayout = LAYOUT) -> Side:
        memory = np.random.default_rng(seed).integers(0, 256, (PAGES, layout.page_bytes), dtype=np.uint8)
        transport = MemoryTransport(self.network)
        region = MemoryRegion(address=memory.ctypes.data, region_bytes=memory.nbytes, device="cpu")
        return Side(memory, transport, TransferLoop(transport, "memory", region, layout, PAGES, self.clock))

    def connect(self) -> None:
        """The link from source to target is up."""
        self.source.loop.connect([self.target.info()])
        assert self.source.events() == [linked("ready", "memmove")]

    def push(self, ticket: int, source_pages: list[int], target_pages: list[int], incarnation: Incarnation = LIFE) -> None:
        pages = (np.array(side, dtype=np.int32) for side in (source_pages, target_pages))
        self.source.loop.push(Push(Ticket(ticket), PEER, incarnation, *pages))


@pytest.fixture
def two() -> Two:
    return Two()


@pytest.fixture
def connected(two: Two) -> Two:
    two.connect()
    return two


@pytest.fixture
def held(connected: Two) -> Two:
    """Connected, and what is pushed stays in flight until the test lets it go."""
    connected.network.hold = True
    return connected


def linked(state: Any, detail: str, incarnation: str = "1") -> LinkChanged:
    return LinkChanged(LinkInfo(peer=PEER, incarnation=Incarnation(incarnation), state=state, detail=detail))


def failed(ticket: int, reason: str, quiescent: bool) -> PushFailed:
    return PushFailed(Ticket(ticket), reason, quiescent)


# --- links -----------------------------------------------------------------------------------------------------------------


def test_a_link_comes_up_once_and_is_reported(two: Two) -> None:
    two.connect()
    two.source.loop.connect([two.target.info()])
    assert two.source.events() == []


def test_nothing_happens_before_the_loop_turns(two: Two) -> None:
    two.source.loop.connect([two.target.info()])
    assert two.source.loop.poll() == [] and two.source.loop.active
    assert two.source.events() == [linked("ready", "memmove")]
    assert not two.source.loop.active


def test_a_peer_with_another_layout_is_refused_by_the_field_that_differs(two: Two) -> None:
    two.target = two.side(seed=2, layout=msgspec.structs.replace(LAYOUT, page_size=16))
    two.source.loop.connect([two.target.info()])
    assert two.source.events() == [linked("lost", "its KV layout differs: page_size is 16 there and 4 here")]
    two.push(1, [0], [0])
    assert two.source.events() == [failed(1, "there is no link to d", quiescent=True)]


def test_a_peer_with_another_backend_is_refused_by_both_names(two: Two) -> None:
    other = two.target.info()
    two.source.loop.connect([msgspec.structs.replace(other, pool=msgspec.structs.replace(other.pool, backend="pigeons"))])
    assert two.source.events() == [linked("lost", "it uses pigeons and we use memory")]


def test_a_peer_that_the_transport_cannot_reach_is_reported_with_its_reason(two: Two) -> None:
    two.target.loop.close()
    two.source.loop.connect([two.target.info()])
    assert two.source.events() == [linked("lost", f"agent {two.target.loop.descriptor.agent} is not in this process")]


def test_a_peer_that_came_back_with_another_incarnation_gets_a_new_link(connected: Two) -> None:
    connected.target.loop.close()
    connected.target = connected.side(seed=3)
    connected.source.loop.connect([connected.target.info("2")])
    assert connected.source.events() == [linked("ready", "memmove", "2")]
    connected.push(1, [0], [0], incarnation=LIFE)
    assert connected.source.events() == [failed(1, "there is no link to d", quiescent=True)]
    connected.push(2, [0], [0], incarnation=Incarnation("2"))
    assert connected.source.events() == [PushDone(Ticket(2), LAYOUT.page_bytes, 0.0)]


def test_a_peer_that_left_has_no_link(connected: Two) -> None:
    connected.source.loop.connect([])
    connected.push(1, [0], [0])
    assert connected.source.events() == [failed(1, "there is no link to d", quiescent=True)]


def test_what_is_in_flight_to_a_peer_that_left_ends(held: Two) -> None:
    held.push(1, [0], [0])
    assert held.source.events() == []
    held.source.loop.connect([])
    assert held.source.events() == [failed(1, "the link was closed", quiescent=True)]


def test_a_peer_that_dies_is_reported_and_pushes_to_it_fail(connected: Two) -> None:
    connected.target.loop.close()
    assert connected.source.events() == [linked("lost", "the agent died")]
    connected.push(1, [0], [0])
    assert connected.source.events() == [failed(1, "there is no link to d", quiescent=True)]


# --- pushes ----------------------------------------------------------------------------------------------------------------


def test_a_push_writes_its_pages_and_reports_bytes_and_seconds(held: Two) -> None:
    before = held.target.memory.copy()
    held.push(1, [3, 4, 1], [6, 7, 0])
    assert held.source.events() == []
    assert not held.source.loop.idle
    held.clock.now += 0.5
    held.source.transport.release()
    assert held.source.events() == [PushDone(Ticket(1), 3 * LAYOUT.page_bytes, 0.5)]
    assert held.source.loop.idle
    before[[6, 7, 0]] = held.source.memory[[3, 4, 1]]
    np.testing.assert_array_equal(held.target.memory, before)


def test_a_push_without_a_link_fails_and_is_quiescent(two: Two) -> None:
    two.push(1, [0], [0])
    assert two.source.events() == [failed(1, "there is no link to d", quiescent=True)]


def test_commands_are_carried_out_in_their_order(two: Two) -> None:
    two.source.loop.connect([two.target.info()])
    two.push(1, [0], [0])
    assert two.source.events() == [linked("ready", "memmove"), PushDone(Ticket(1), LAYOUT.page_bytes, 0.0)]


@pytest.mark.parametrize(
    ("source_pages", "target_pages", "reason"),
    [
        ([0, 8], [0, 1], "page ids between 0 and 8 are not all in our pool of 8"),
        ([0, 1], [-1, 1], "page ids between -1 and 1 are not all in d's pool of 8"),
        ([0, 1], [0], "2 source pages for 1 target pages"),
    ],
    ids=["ours", "theirs", "unequal"],
)
def test_pages_that_cannot_be_pushed_are_named(
    connected: Two, source_pages: list[int], target_pages: list[int], reason: str
) -> None:
    before = connected.target.memory.copy()
    connected.push(1, source_pages, target_pages)
    assert connected.source.events() == [failed(1, reason, quiescent=True)]
    np.testing.assert_array_equal(connected.target.memory, before)


def test_a_push_that_the_transport_fails_is_reported_as_it_says(held: Two) -> None:
    held.push(1, [0], [0])
    held.source.events()
    held.source.transport.fail("cable", quiescent=False)
    assert held.source.events() == [failed(1, "cable", quiescent=False)]


# --- deadlines and the end -------------------------------------------------------------------------------------------------


def test_an_overdue_push_fails_without_proof_and_its_link_is_lost(held: Two) -> None:
    held.push(1, [0, 2], [0, 2])
    assert held.source.events() == []
    held.clock.now += PUSH_S + 2 * LAYOUT.page_bytes / SLOWEST_BYTES_PER_S - 1e-6
    assert held.source.events() == []
    held.clock.now += 2e-6
    assert held.source.events() == [failed(1, "it took too long", quiescent=False), linked("lost", "a push took too long")]
    held.push(2, [0], [0])
    assert failed(2, "there is no link to d", quiescent=True) in held.source.events()


class SlowTransport(MemoryTransport):
    """Ends what it holds long after its link was closed, as a backend may that cannot abort."""

    def close(self, agent: str | None = None) -> None:
        if agent is None:
            super().close()


def test_what_an_overdue_push_comes_to_is_dropped() -> None:
    two = Two()
    transport = SlowTransport(two.network)
    region = MemoryRegion(address=two.source.memory.ctypes.data, region_bytes=two.source.memory.nbytes, device="cpu")
    two.source = Side(two.source.memory, transport, TransferLoop(transport, "memory", region, LAYOUT, PAGES, two.clock))
    two.connect()
    two.network.hold = True
    two.push(1, [0], [0])
    two.source.events()
    two.clock.now += PUSH_S + 1.0
    assert two.source.events()[0] == failed(1, "it took too long", quiescent=False)
    transport.release()
    assert two.source.events() == []


def test_a_push_that_ends_has_no_deadline_left(connected: Two) -> None:
    connected.push(1, [0], [0])
    assert len(connected.source.events()) == 1
    connected.clock.now += 10 * PUSH_S
    assert connected.source.events() == []


def test_overdue_pushes_to_one_peer_all_fail_and_lose_its_link_once(held: Two) -> None:
    held.push(1, [0], [0])
    held.push(2, [1], [1])
    held.source.events()
    held.clock.now += PUSH_S + 1.0
    events = held.source.events() + held.source.events()
    assert sorted(event.ticket for event in events if isinstance(event, PushFailed)) == [1, 2]
    assert [event for event in events if isinstance(event, LinkChanged)] == [linked("lost", "a push took too long")]


def test_closing_ends_what_is_in_flight_without_proof(held: Two) -> None:
    held.push(1, [0], [0])
    held.push(2, [1], [1])
    held.source.events()
    held.source.loop.close()
    held.source.loop.close()
    closed = [failed(ticket, "the transfers were closed", quiescent=False) for ticket in (1, 2)]
    assert held.source.loop.poll() == closed
    assert held.source.loop.idle


def test_expected_writes_keep_the_loop_active(two: Two) -> None:
    two.target.loop.expect(1)
    assert two.target.loop.active and two.target.loop.idle
    two.target.loop.expect(0)
    assert not two.target.loop.active
