"""Write leases in the transfer loop: nothing is written without one, and nothing goes on long after one has ended."""

import msgspec
import numpy as np
import pytest

from common.ids import Incarnation, Ticket
from common.messages import PoolDescriptor
from common.messages.transfers import Connect, LinkChanged, PushDone
from kv_transfer.handoff_reader import MARGIN_S, OVERRUN_S, RENEW_S, WRITE_LEASE_S
from kv_transfer.links import RETRY_S, STALL_S
from kv_transfer.transfer_loop import LeaseOverrun
from tests.builders import LAYOUT
from tests.kv_transfer.memory import MemoryNetwork, MemoryTransport
from tests.kv_transfer.two import LIFE, PEER, SlowTransport, Two, failed, linked, refused

EXPIRED = linked("lost", "the lease ended: it does not answer")
NO_LEASE = "the lease to write to d has ended"


def leased(make_transport: type[MemoryTransport] = MemoryTransport, lease_s: float = WRITE_LEASE_S) -> Two:
    """Connected under a lease of so long; what is pushed stays in flight until the test lets it go, slice by slice of a page."""
    two = Two(make_transport, network=MemoryNetwork(hold=True, slice_bytes=LAYOUT.page_bytes))
    two.connect(lease_s)
    two.source.events()
    return two


def writing(make_transport: type[MemoryTransport] = MemoryTransport, pages: int = 1, lease_s: float = WRITE_LEASE_S) -> Two:
    """Leased, with a push of so many pages in flight."""
    two = leased(make_transport, lease_s)
    assert two.pushed(1, list(range(pages)), list(range(pages))) == []
    return two


def expired() -> Two:
    """The lease has ended with the only push in flight, and the push cannot be stopped."""
    two = writing(SlowTransport)
    assert two.after(WRITE_LEASE_S) == [EXPIRED]
    return two


def written(two: Two) -> list[int]:
    """The pages of the target that hold what the source holds there."""
    return np.flatnonzero((two.target.memory == two.source.memory).all(axis=1)).tolist()


def test_the_reader_waits_longer_than_the_writer_takes_to_stop() -> None:
    assert 0.0 < 2 * RENEW_S < WRITE_LEASE_S
    assert WRITE_LEASE_S + STALL_S <= WRITE_LEASE_S + OVERRUN_S < WRITE_LEASE_S + MARGIN_S


def test_a_push_without_a_lease_is_refused() -> None:
    two = Two()
    assert two.told(Connect((two.target.info(),))) == [linked("ready", "memmove")]
    assert two.pushed(1) == [refused(1, NO_LEASE)]
    assert written(two) == []


def test_a_push_at_the_end_of_its_lease_is_refused_and_one_just_before_is_not() -> None:
    two = leased()
    two.network.hold = False
    two.allow(lease_s=1.0)
    assert two.source.events() == [] and two.source.loop.next_deadline() == two.clock.now + WRITE_LEASE_S, "it never moves back"
    two.clock.now += WRITE_LEASE_S - 1e-3
    assert two.pushed(1) == [PushDone(Ticket(1), LAYOUT.page_bytes, 0.0)]
    two.clock.now += 1e-3
    assert two.pushed(2, [1], [1]) == [refused(2, NO_LEASE)]
    assert written(two) == [0]


def test_a_lease_that_is_extended_in_time_goes_on() -> None:
    two = writing(pages=2)
    two.clock.now += WRITE_LEASE_S - 0.5
    two.allow(WRITE_LEASE_S)
    assert two.source.events() == []
    two.clock.now += 1.0
    two.source.transport.release()
    assert two.source.events() == [PushDone(Ticket(1), 2 * LAYOUT.page_bytes, WRITE_LEASE_S + 0.5)]
    assert written(two) == [0, 1]


def test_a_lease_for_another_incarnation_or_an_unknown_peer_does_not_count() -> None:
    two = Two()
    two.allow()
    assert two.told(Connect((two.target.info(),))) == [linked("ready", "memmove")]
    two.allow(incarnation=Incarnation("2"))
    assert two.pushed(1) == [refused(1, NO_LEASE)]


def test_a_peer_that_came_back_needs_a_new_lease() -> None:
    two = leased()
    two.source.loop.submit(Connect((), (PEER,)))
    assert two.told(Connect((two.target.info(),))) == [linked("ready", "memmove")]
    assert two.pushed(1) == [refused(1, NO_LEASE)]


def test_an_idle_link_outlives_its_lease_and_is_written_to_under_the_next() -> None:
    two = leased()
    two.network.hold = False
    assert two.after(100.0) == []
    two.allow(WRITE_LEASE_S)
    assert two.pushed(1) == [PushDone(Ticket(1), LAYOUT.page_bytes, 0.0)]


# --- a process that was stopped --------------------------------------------------------------------------------------------


def test_a_write_in_flight_long_after_its_lease_ends_the_process() -> None:
    two = expired()
    assert failed(1, "", quiescent=True) not in two.after(OVERRUN_S - 1e-3)
    two.clock.now += 1e-3
    with pytest.raises(LeaseOverrun, match="a push to d was in flight 12 s after its lease had ended"):
        two.source.loop.step()
    assert written(two) == []


def test_a_process_that_was_stopped_drives_no_write_before_it_ends() -> None:
    two = writing(pages=2)
    two.network.hold = False
    two.clock.now += WRITE_LEASE_S + OVERRUN_S + 60.0
    with pytest.raises(LeaseOverrun):
        two.source.loop.step()
    assert written(two) == [], "neither what was held nor the next slice"


def test_a_process_that_was_stopped_makes_no_link_before_it_ends() -> None:
    """Making one would drive the writes of the others."""
    connected: list[str] = []

    class Remembers(MemoryTransport):
        def connect(self, pool: PoolDescriptor) -> None:
            connected.append(pool.agent)
            super().connect(pool)

    two = writing(Remembers)
    two.clock.now += WRITE_LEASE_S + OVERRUN_S
    other = msgspec.structs.replace(two.side(seed=3).info(), id="other")
    two.source.loop.submit(Connect((two.target.info(), other)))
    with pytest.raises(LeaseOverrun):
        two.source.loop.step()
    assert connected == [two.target.loop.descriptor.agent]


def test_a_write_that_ends_in_time_ends_nothing_else() -> None:
    two = expired()
    two.clock.now += OVERRUN_S - 1.0
    two.source.transport.release()
    assert PushDone(Ticket(1), LAYOUT.page_bytes, WRITE_LEASE_S + OVERRUN_S - 1.0) in two.source.events()
    two.after(100.0)


def test_a_reader_that_answers_again_saves_the_process_with_its_write_in_flight() -> None:
    two = expired()
    two.clock.now += 1.0
    two.allow(WRITE_LEASE_S)
    two.source.events()
    two.after(OVERRUN_S)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_write_is_watched_after_its_peer_has_left_the_fleet(comes_back: bool) -> None:
    """It may only be out of the router's sight, and gives the pages away when it has not heard of us for long enough."""
    two = writing(SlowTransport)
    two.source.loop.submit(Connect((), (PEER,)))
    if comes_back:
        two.told(Connect((two.target.info(),)))
    two.clock.now += WRITE_LEASE_S + OVERRUN_S
    with pytest.raises(LeaseOverrun):
        two.source.loop.step()


def test_a_peer_that_left_with_a_write_in_flight_is_not_tried_again() -> None:
    two = writing(SlowTransport)
    two.told(Connect((), (PEER,)))
    assert two.after(WRITE_LEASE_S) == []
    two.source.transport.release()
    assert two.source.events() == [PushDone(Ticket(1), LAYOUT.page_bytes, WRITE_LEASE_S)]
    assert two.after(10 * RETRY_S) == []


def test_a_lease_that_ends_while_another_link_is_made_drives_nothing() -> None:
    """Making a link takes time, and may be the moment in which a process is stopped."""
    two = Two()

    class TakesLong(MemoryTransport):
        def connect(self, pool: PoolDescriptor) -> None:
            two.clock.now += WRITE_LEASE_S
            super().connect(pool)

    two = writing(TakesLong, pages=2, lease_s=WRITE_LEASE_S + 1.0)
    two.network.hold = False
    other = msgspec.structs.replace(two.side(seed=3).info(), id="other")
    two.clock.now += 2.0
    two.source.loop.submit(Connect((two.target.info(), other)))
    assert EXPIRED in two.source.events()
    assert written(two) == []


def test_a_link_that_was_lost_with_its_lease_serves_again_under_a_new_one() -> None:
    two = writing()
    assert isinstance(two.after(WRITE_LEASE_S)[0], LinkChanged)
    two.clock.now += RETRY_S
    two.network.hold = False
    two.allow(WRITE_LEASE_S)
    assert linked("ready", "memmove") in two.source.events()
    assert two.pushed(2, incarnation=LIFE) == [PushDone(Ticket(2), LAYOUT.page_bytes, 0.0)]
