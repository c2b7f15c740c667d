"""Pushes in slices: their order, the window, and how tickets end when a link is closed or lost."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.errors import TransferError
from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.pushes import SlicedTransport, SliceFailed
from kv_transfer.transport import AgentLost, Connected, ConnectFailed, RunsDone, RunsFailed, TransportEvent
from tests.kv_transfer.local_agent import pool_descriptor

POOL_BYTES = 1000
SLICE_BYTES = 100
SLICE_RUNS = 4
WINDOW = 2


@dataclass(slots=True, eq=False)
class HeldLink:
    """A link whose slices end when the test says so."""

    detail: str = "held"
    ready: "Future[None] | None" = None
    written: list[tuple[Int64Array, "Future[None]"]] = field(default_factory=list)
    closed: int = 0

    def write(self, runs: Int64Array) -> "Future[None]":
        self.written.append((runs, Future()))
        return self.written[-1][1]

    def close(self) -> None:
        self.closed += 1

    def end(self, number: int, failed: SliceFailed | None = None) -> None:
        if failed is None:
            self.written[number][1].set_result(None)
        else:
            self.written[number][1].set_exception(failed)


class HeldTransport(SlicedTransport):
    """A backend whose links the test makes."""

    library = "held"
    _make_link: Callable[[], HeldLink]

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        self._region = region
        return "me", b""

    def link_to(self, pool: PoolDescriptor) -> HeldLink:
        return self._make_link()

    def connect_by(self, make_link: Callable[[], HeldLink], agent: str = "peer") -> None:
        self._make_link = make_link
        self.connect(pool_descriptor(agent, 0, POOL_BYTES, b""))


@pytest.fixture
def pushes() -> HeldTransport:
    made = HeldTransport(SLICE_BYTES, SLICE_RUNS, WINDOW)
    made.register(MemoryRegion(address=0, region_bytes=POOL_BYTES, device="cpu"))
    return made


def linked(pushes: HeldTransport, agent: str = "peer") -> HeldLink:
    link = HeldLink()
    pushes.connect_by(lambda: link, agent)
    assert pushes.poll() == [Connected(agent, "held")]
    return link


def run_of(run_bytes: int, at: int = 0) -> Int64Array:
    return np.array([(at, at, run_bytes)], dtype=np.int64)


def writing(pushes: HeldTransport, *push_bytes: int) -> HeldLink:
    """A link to the peer with one push for each number of bytes. Tickets count from 1. The first slices have begun."""
    link = linked(pushes)
    for ticket, run_bytes in enumerate(push_bytes, 1):
        pushes.push(Ticket(ticket), "peer", run_of(run_bytes))
    assert pushes.poll() == []
    return link


def test_slices_are_begun_in_order_and_no_more_than_the_window_at_once(pushes: HeldTransport) -> None:
    link = linked(pushes)
    pushes.push(Ticket(1), "peer", run_of(250))
    pushes.push(Ticket(2), "peer", run_of(50, at=500))
    assert not link.written, "a push begins with the next poll"
    begun = [[0], [0, 100], [0, 100, 200], [0, 100, 200, 500]]
    for ended, starts in enumerate(begun[1:]):
        assert pushes.poll() == []
        assert [int(runs[0, 0]) for runs, _ in link.written] == starts
        link.end(ended)
        pushes.poll()
    link.end(3)
    assert pushes.poll() == [RunsDone(Ticket(2))]


def test_a_push_may_begin_before_the_next_poll(pushes: HeldTransport) -> None:
    link = linked(pushes)
    pushes.push(Ticket(1), "peer", run_of(250))
    pushes.begin("peer")
    pushes.begin("nobody")
    assert [int(runs[0, 0]) for runs, _ in link.written] == [0, 100]


def test_a_ticket_is_done_when_its_last_slice_is(pushes: HeldTransport) -> None:
    link = writing(pushes, 200)
    link.end(1)
    assert pushes.poll() == []
    link.end(0)
    assert pushes.poll() == [RunsDone(Ticket(1))]
    assert pushes.poll() == []


def test_a_slice_has_at_most_slice_runs_runs(pushes: HeldTransport) -> None:
    link = linked(pushes)
    runs = np.stack([np.arange(10) * 7, np.arange(10) * 11, np.full(10, 3)], axis=1)
    pushes.push(Ticket(1), "peer", runs)
    events: list[TransportEvent] = []
    for number in range(3):
        events += pushes.poll()
        link.end(number)
    assert [len(runs) for runs, _ in link.written] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate([runs for runs, _ in link.written]), runs)
    assert events + pushes.poll() == [RunsDone(Ticket(1))]


def test_a_push_of_nothing_is_done(pushes: HeldTransport) -> None:
    linked(pushes)
    pushes.push(Ticket(1), "peer", np.empty((0, 3), dtype=np.int64))
    assert pushes.poll() == [RunsDone(Ticket(1))]


@pytest.mark.parametrize("run", [(-1, 0, 5), (0, -1, 5), (0, 0, -5), (996, 0, 5), (0, 996, 5)])
def test_a_run_outside_of_a_pool_fails_the_push_before_anything_is_written(
    pushes: HeldTransport, run: tuple[int, int, int]
) -> None:
    link = linked(pushes)
    pushes.push(Ticket(1), "peer", np.array([(0, 0, 10), run], dtype=np.int64))
    assert pushes.poll() == [RunsFailed(Ticket(1), "a run is outside of its pool", quiescent=True)]
    assert not link.written


def test_a_closed_link_begins_nothing_more_and_its_tickets_end_with_their_slices(pushes: HeldTransport) -> None:
    link = writing(pushes, 400, 100)
    pushes.close("peer")
    assert link.closed == 1
    assert pushes.poll() == [RunsFailed(Ticket(2), "the link was closed", quiescent=True)]
    link.end(0)
    assert pushes.poll() == []
    link.end(1)
    assert pushes.poll() == [RunsFailed(Ticket(1), "the link was closed", quiescent=True)]
    assert len(link.written) == 2
    pushes.push(Ticket(3), "peer", run_of(1))
    assert pushes.poll() == [RunsFailed(Ticket(3), "no link to peer", quiescent=True)]


def test_a_closed_link_can_be_made_again_while_the_old_one_still_writes(pushes: HeldTransport) -> None:
    old = writing(pushes, 100)
    pushes.close("peer")
    new = linked(pushes)
    pushes.push(Ticket(2), "peer", run_of(100))
    pushes.poll()
    new.end(0)
    assert pushes.poll() == [RunsDone(Ticket(2))]
    old.end(0)
    assert pushes.poll() == [RunsFailed(Ticket(1), "the link was closed", quiescent=True)]


@pytest.mark.parametrize("quiescent", [True, False])
def test_a_failed_slice_loses_the_link_once_and_fails_every_push_on_it(pushes: HeldTransport, quiescent: bool) -> None:
    link, other = writing(pushes, 100, 100, 100), linked(pushes, "other")
    pushes.push(Ticket(4), "other", run_of(100))
    pushes.poll()
    link.end(0, SliceFailed("it broke", quiescent))
    assert pushes.poll() == [
        AgentLost("peer", "it broke"),
        RunsFailed(Ticket(1), "it broke", quiescent),
        RunsFailed(Ticket(3), "the link was lost: it broke", quiescent=True),
    ]
    link.end(1, SliceFailed("it broke too", quiescent=False))
    other.end(0)
    assert pushes.poll() == [RunsDone(Ticket(4)), RunsFailed(Ticket(2), "the link was lost: it broke", quiescent=False)]
    assert (link.closed, other.closed) == (1, 0)


def test_a_push_is_quiescent_only_if_all_its_slices_are(pushes: HeldTransport) -> None:
    link = writing(pushes, 200)
    link.end(0, SliceFailed("it broke", quiescent=False))
    pushes.poll()
    link.end(1, SliceFailed("it broke", quiescent=True))
    assert pushes.poll() == [RunsFailed(Ticket(1), "it broke", quiescent=False)]


def test_a_link_that_cannot_be_made_leaves_nothing_behind(pushes: HeldTransport) -> None:
    def refused() -> HeldLink:
        raise TransferError("not today")

    pushes.connect_by(refused)
    assert pushes.poll() == [ConnectFailed("peer", "held could not connect to peer: not today")]
    linked(pushes)
    pushes.push(Ticket(1), "peer", run_of(1))
    assert pushes.poll() == []


def test_closing_everything_closes_every_link(pushes: HeldTransport) -> None:
    links = [linked(pushes, "one"), linked(pushes, "two")]
    pushes.close()
    pushes.close()
    assert [link.closed for link in links] == [1, 1]


def test_a_link_that_is_used_again_is_lost_with_a_write_of_before_it_was_closed(pushes: HeldTransport) -> None:
    link = writing(pushes, 10)
    pushes.close("peer")
    assert pushes.poll() == []
    pushes.connect_by(lambda: link)
    assert pushes.poll() == [Connected("peer", "held")]
    link.end(0, SliceFailed("the endpoint is dead", quiescent=True))
    assert set(map(type, pushes.poll())) == {RunsFailed, AgentLost}
    pushes.push(Ticket(9), "peer", run_of(10))
    assert [type(event) for event in pushes.poll()] == [RunsFailed]


def connecting(pushes: HeldTransport) -> HeldLink:
    """A link to the peer that is being made."""
    link = HeldLink(ready=Future())
    pushes.connect_by(lambda: link)
    return link


def test_a_link_that_is_being_made_carries_nothing_yet_and_is_told_once_when_it_is_ready(pushes: HeldTransport) -> None:
    link = connecting(pushes)
    connecting(pushes)  # is the same attempt
    pushes.push(Ticket(1), "peer", run_of(1))
    assert pushes.poll() == [RunsFailed(Ticket(1), "no link to peer", quiescent=True)]
    assert link.ready is not None
    link.ready.set_result(None)
    assert pushes.poll() == [Connected("peer", "held")]
    pushes.push(Ticket(2), "peer", run_of(1))
    assert pushes.poll() == []
    assert len(link.written) == 1


def test_an_attempt_that_fails_is_told_and_closed(pushes: HeldTransport) -> None:
    link = connecting(pushes)
    assert link.ready is not None
    link.ready.set_exception(TransferError("nobody there"))
    assert pushes.poll() == [ConnectFailed("peer", "held could not connect to peer: nobody there")]
    assert link.closed == 1


@pytest.mark.parametrize("comes_late", [False, True])
def test_an_attempt_that_is_given_up_is_told_no_more_and_another_may_begin(pushes: HeldTransport, comes_late: bool) -> None:
    link = connecting(pushes)
    assert link.ready is not None
    if not comes_late:
        link.ready.set_result(None)
    pushes.close("peer")
    assert link.closed == 1
    if comes_late:
        link.ready.set_result(None)
    assert pushes.poll() == []
    linked(pushes)


def test_what_came_of_an_attempt_is_forgotten_with_its_link(pushes: HeldTransport) -> None:
    pushes.connect_by(HeldLink)
    pushes.poll()
    pushes.connect_by(HeldLink)
    pushes.close("peer")
    assert pushes.poll() == []
