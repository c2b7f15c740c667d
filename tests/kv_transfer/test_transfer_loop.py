"""The transfer loop over the in-process transport, on a clock that is turned by hand: links, pushes, stalls and retries."""

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from common.ids import Incarnation, Ticket
from common.messages.transfers import Connect, Expect, LinkChanged, PushDone, Settle, Settled
from kv_transfer.links import RETRY_MOST_S, RETRY_S, SLOWEST_BYTES_PER_S, STALL_S
from kv_transfer.transfer_loop import SETTLE_POLLS
from tests.builders import LAYOUT, key
from tests.kv_transfer.two import LIFE, PEER, SlowTransport, Two, failed, linked, refused

NO_LINK = "there is no link to d"


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


@pytest.fixture
def stuck() -> Two:
    """Push 1 is in flight, and goes on when its link is closed."""
    two = Two(SlowTransport)
    two.connect()
    two.network.hold = True
    assert two.pushed(1) == []
    return two


# --- links -----------------------------------------------------------------------------------------------------------------


def test_nothing_happens_before_the_loop_turns(two: Two) -> None:
    two.source.loop.submit(Connect((two.target.info(),)))
    assert two.source.loop.poll() == [] and two.source.loop.active
    assert two.source.events() == [linked("ready", "memmove")]
    assert two.told(Connect((two.target.info(),))) == [], "it is up"
    for seconds in (1.0, 10 * STALL_S):
        assert two.after(seconds) == [], "an idle link never stalls"
        assert two.source.loop.progress_s == two.clock.now
    assert not two.source.loop.active


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": msgspec.structs.replace(LAYOUT, page_size=16)}, "its KV layout differs: page_size is 16 there and 4 here"),
        ({"backend": "pigeons"}, "it uses pigeons and we use memory"),
        ({"address": 2**63 - 1}, "invalid pool of 8 pages at address 9223372036854775807"),
        ({"device": "abacus"}, "its device 'abacus' is neither cpu nor cuda:N"),
    ],
    ids=["layout", "backend", "end", "device"],
)
def test_a_peer_whose_pool_cannot_be_written_is_refused_with_the_reason(two: Two, change: dict[str, Any], reason: str) -> None:
    peer = two.target.info()
    (lost,) = two.told(Connect((msgspec.structs.replace(peer, pools=(msgspec.structs.replace(peer.pools[0], **change),)),)))
    assert isinstance(lost, LinkChanged) and lost == linked("lost", lost.link.detail)
    assert re.fullmatch(reason, lost.link.detail)
    assert two.pushed(1) == [refused(1, NO_LINK)]


def test_a_peer_that_the_transport_cannot_reach_is_reported_with_its_reason(two: Two) -> None:
    two.target.loop.close()
    assert two.told(Connect((two.target.info(),))) == [
        linked("lost", f"agent {two.target.loop.descriptor.agent} is not in this process")
    ]


def test_a_peer_that_came_back_with_another_incarnation_gets_a_new_link(connected: Two) -> None:
    connected.target.loop.close()
    connected.target = connected.side(seed=3)
    assert connected.told(Connect((connected.target.info("2"),))) == [linked("ready", "memmove", "2")]
    assert connected.pushed(1, incarnation=LIFE) == [refused(1, NO_LINK)]
    connected.allow(incarnation=Incarnation("2"))
    assert connected.pushed(2, incarnation=Incarnation("2")) == [PushDone(Ticket(2), LAYOUT.page_bytes, 0.0)]


def test_what_is_in_flight_to_a_peer_that_left_ends(held: Two) -> None:
    assert held.pushed(1) == []
    assert held.told(Connect((), (PEER,))) == [failed(1, "the link was closed", quiescent=True)]


def test_a_peer_that_dies_is_reported_and_pushes_to_it_fail(connected: Two) -> None:
    connected.target.loop.close()
    assert connected.source.events() == [linked("lost", "the agent died")]
    assert connected.pushed(1) == [refused(1, NO_LINK)]


# --- pushes ----------------------------------------------------------------------------------------------------------------


def test_a_push_writes_its_pages_and_reports_bytes_and_seconds(held: Two) -> None:
    before = held.target.memory.copy()
    assert held.pushed(1, [3, 4, 1], [6, 7, 0]) == []
    held.clock.now += 0.5
    held.source.transport.release()
    assert held.source.events() == [PushDone(Ticket(1), 3 * LAYOUT.page_bytes, 0.5, runs=2)]
    assert held.source.loop.idle
    before[[6, 7, 0]] = held.source.memory[[3, 4, 1]]
    np.testing.assert_array_equal(held.target.memory, before)


def test_commands_are_carried_out_in_their_order(two: Two) -> None:
    assert two.pushed(1) == [refused(1, NO_LINK)]
    two.source.loop.submit(Connect((two.target.info(),)))
    assert two.pushed(1) == [refused(1, NO_LINK), linked("ready", "memmove")]
    two.push(1)
    two.allow()
    assert two.pushed(2) == [refused(1, "the lease to write to d has ended"), PushDone(Ticket(2), LAYOUT.page_bytes, 0.0)]
    two.source.loop.submit(Connect((), (PEER,)))
    assert two.pushed(3) == [refused(3, NO_LINK)]


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
    assert connected.pushed(1, source_pages, target_pages) == [refused(1, reason)]
    np.testing.assert_array_equal(connected.target.memory, before)


def test_a_push_that_the_transport_fails_is_reported_with_its_reason_and_proof(held: Two) -> None:
    held.pushed(1)
    held.source.transport.fail("cable", quiescent=False)
    assert held.source.events() == [failed(1, "cable", quiescent=False)]


# --- stalls and retries ----------------------------------------------------------------------------------------------------

ALLOWED_S = STALL_S + 2 * LAYOUT.page_bytes / SLOWEST_BYTES_PER_S
"""What two pages in flight may take without progress."""
STALLED = linked("lost", f"no push completed for {STALL_S:.0f} s")
CLOSED = "the link was closed"


def test_a_link_without_progress_is_lost_and_closed(held: Two) -> None:
    assert held.pushed(1, [0, 2], [0, 2]) == []
    assert held.after(ALLOWED_S - 1e-6) == []
    assert held.after(2e-6) == [STALLED]
    assert held.pushed(2) == [refused(2, NO_LINK), failed(1, CLOSED, quiescent=True)]


def test_a_push_that_completes_is_progress_for_the_others(held: Two) -> None:
    held.pushed(1)
    held.clock.now += 0.8 * STALL_S
    held.source.transport.release()
    assert held.pushed(2, [1], [1]) == [PushDone(Ticket(1), LAYOUT.page_bytes, 0.8 * STALL_S)]
    assert held.after(0.8 * STALL_S) == []
    assert held.after(0.3 * STALL_S) == [linked("lost", f"no push completed for {1.1 * STALL_S:.0f} s")]


def test_a_push_that_begins_is_no_progress_for_the_others(held: Two) -> None:
    held.pushed(1)
    held.clock.now += 0.8 * STALL_S
    held.pushed(2, [1], [1])
    assert held.after(ALLOWED_S - 0.8 * STALL_S + 1e-6) == [STALLED]
    assert held.source.events() == [failed(1, CLOSED, quiescent=True), failed(2, CLOSED, quiescent=True)]


def test_a_push_that_outlives_its_link_ends_with_the_transports_event(stuck: Two) -> None:
    assert stuck.after(STALL_S + 1.0) == [linked("lost", f"no push completed for {STALL_S + 1.0:.0f} s")]
    assert not stuck.source.loop.idle
    stuck.source.transport.release()
    assert stuck.source.events() == [PushDone(Ticket(1), LAYOUT.page_bytes, STALL_S + 1.0)]
    assert stuck.source.loop.idle


def test_a_lost_link_is_not_watched(stuck: Two) -> None:
    agent = stuck.target.loop.descriptor.agent
    del stuck.network.regions[agent]
    assert stuck.source.events() == [linked("lost", "the agent died")]
    assert stuck.after(STALL_S + 1.0) == [linked("lost", f"agent {agent} is not in this process")], "tried again, and no stall"


def test_pushes_from_before_a_link_was_lost_do_not_stall_it_when_it_is_up_again(stuck: Two) -> None:
    assert isinstance(stuck.after(STALL_S + 1.0)[0], LinkChanged)
    assert stuck.after(RETRY_S + 0.1) == [linked("ready", "memmove")]
    stuck.pushed(2, [1], [1])
    assert stuck.after(STALL_S) == [], "push 1 began long ago, push 2 did not"
    assert stuck.after(1.0) == [linked("lost", f"no push completed for {STALL_S + 1.0:.0f} s")]


def test_a_link_that_stays_lost_is_tried_less_and_less_often(two: Two) -> None:
    descriptor = two.target.loop.descriptor
    region = two.network.regions.pop(descriptor.agent)
    lost = linked("lost", f"agent {descriptor.agent} is not in this process")
    assert two.told(Connect((two.target.info(),))) == [lost]
    wait_s = RETRY_S
    for _ in range(6):
        assert two.after(wait_s) == [], "what is known is not told again"
        wait_s = min(2 * wait_s, RETRY_MOST_S)
    two.network.regions[descriptor.agent] = region
    assert two.after(wait_s - 1e-3) == []
    assert two.after(2e-3) == [linked("ready", "memmove")]
    del two.network.regions[descriptor.agent]
    assert two.source.events() == [linked("lost", "the agent died")]
    two.network.regions[descriptor.agent] = region
    assert two.after(RETRY_S) == [linked("ready", "memmove")], "it was up meanwhile: soon again"


# --- the end ---------------------------------------------------------------------------------------------------------------


def test_closing_ends_what_is_in_flight_without_proof(held: Two) -> None:
    held.push(1)
    held.pushed(2, [1], [1])
    held.source.loop.close()
    held.source.loop.close()
    closed = [failed(ticket, "the transfers were closed", quiescent=False) for ticket in (1, 2)]
    assert held.source.loop.poll() == closed
    assert held.source.loop.idle


def test_a_loop_is_active_while_it_expects_writes_from_another_host(two: Two) -> None:
    """Over TCP they come no faster than progress is driven."""
    paces = []
    for expect in (Expect(1), Expect(1, distant=True), Expect(0, distant=True)):
        two.target.loop.submit(expect)
        two.target.events()
        paces.append((two.target.loop.expecting, two.target.loop.active))
    assert paces == [(True, False), (True, True), (False, False)]
    assert two.target.loop.idle


# --- what landed -----------------------------------------------------------------------------------------------------------


def test_a_key_is_settled_after_enough_polls_to_empty_a_receive_buffer(two: Two) -> None:
    two.target.loop.submit(Settle(key("a")))
    for _ in range(SETTLE_POLLS - 1):
        assert two.target.events() == []
        assert two.target.loop.active, "progress is driven until then"
    two.target.loop.submit(Settle(key("b")))
    assert two.target.events() == [Settled(key("a"))]
    for _ in range(SETTLE_POLLS - 2):
        assert two.target.events() == []
    assert two.target.events() == [Settled(key("b"))]
    assert not two.target.loop.active


# --- since when nothing moves ----------------------------------------------------------------------------------------------


def test_progress_stops_at_the_last_completion_on_a_link_whose_pushes_stand_still(held: Two) -> None:
    began_s = held.clock.now
    held.pushed(1)
    held.after(2.0)
    assert held.source.loop.progress_s == began_s, "since the first of them began"
    held.source.transport.release()
    held.pushed(2, [1], [1])
    held.clock.now += 1.0
    held.pushed(3, [2], [2])
    assert held.source.loop.progress_s == began_s + 2.0, "push 1 has ended; that push 3 began is no progress"


def test_pushes_that_have_ended_do_not_hold_back_progress_on_a_lost_link(held: Two) -> None:
    held.pushed(1)
    del held.network.regions[held.target.loop.descriptor.agent]
    held.source.transport.fail("the agent died", quiescent=True)
    assert failed(1, "the agent died", quiescent=True) in held.source.events()
    held.after(60.0)
    assert held.source.loop.progress_s == held.clock.now
