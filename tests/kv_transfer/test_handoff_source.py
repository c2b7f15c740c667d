"""The sending end of the handoff, as messages in and actions out."""

import msgspec
import numpy as np
import pytest

from common.ids import Generation, Incarnation, InstanceId, Ticket, pack_ids
from common.instance.ports import Push, PushDone, PushFailed, Send
from common.messages import Decline, Failed, Grant, Handoff, Reserve, Withdraw
from kv_transfer.handoff_source import HandoffSource, Output, SourceClosed
from tests.builders import key, sampling

ME, PEER, OTHER = InstanceId("p"), InstanceId("d"), InstanceId("other")
LIFE = Incarnation("1")
SOURCE_PAGES = np.array([10, 11, 12], dtype=np.int32)
PAGE_SIZE = 4


def opened() -> HandoffSource:
    source = HandoffSource(ME, PAGE_SIZE)
    reserve = Reserve(key=key(), source=ME, prompt=pack_ids(range(10)), sampling=sampling())
    assert source.open(reserve, PEER, LIFE, SOURCE_PAGES) == [Send(PEER, reserve)]
    return source


def unavailable(message: str) -> Failed:
    return Failed(message=message, kind="unavailable_error", status=503)


def grant(pages: tuple[int, ...] = (20, 21, 22), have_tokens: int = 0) -> Grant:
    return Grant(key=key(), generation=Generation(5), pages=pack_ids(pages), have_tokens=have_tokens)


def pushes(outputs: list[Output]) -> list[tuple[list[int], list[int]]]:
    return [(o.source_pages.tolist(), o.target_pages.tolist()) for o in outputs if isinstance(o, Push)]


def done(ticket: int, pushed_bytes: int = 100) -> PushDone:
    return PushDone(Ticket(ticket), pushed_bytes, 0.1)


def test_complete_pages_are_pushed_chunk_by_chunk_and_the_last_page_with_the_first_token() -> None:
    source = opened()
    assert source.receive(PEER, grant()) == []
    assert pushes(source.computed(key(), 6)) == [([10], [20])]
    assert pushes(source.computed(key(), 7)) == []
    assert pushes(source.sampled(key(), 99)) == [([11, 12], [21, 22])]
    assert source.transfer_ended(done(1)) == []
    handoff = Handoff(key=key(), generation=Generation(5), first_token=99, pushed_pages=3, pushed_bytes=200)
    assert source.transfer_ended(done(2)) == [Send(PEER, handoff), SourceClosed(key(), None, True)]
    assert len(source) == 0


def test_pages_wait_for_a_late_grant_and_then_go_at_once() -> None:
    source = opened()
    assert source.computed(key(), 8) == []
    assert source.sampled(key(), 99) == []
    assert pushes(source.receive(PEER, grant())) == [([10, 11, 12], [20, 21, 22])]


def test_pages_that_the_decode_instance_holds_already_are_not_sent() -> None:
    source = opened()
    source.receive(PEER, grant(have_tokens=8))
    assert pushes(source.computed(key(), 8)) == []
    assert pushes(source.sampled(key(), 99)) == [([12], [22])]


def test_a_handoff_without_any_push_follows_the_first_token_at_once() -> None:
    source = opened()
    source.receive(PEER, grant(have_tokens=12))
    outputs = source.sampled(key(), 99)
    assert [type(o) for o in outputs] == [Send, SourceClosed]


def test_giving_up_waits_for_the_push_in_flight_before_it_withdraws() -> None:
    source = opened()
    source.receive(PEER, grant())
    source.computed(key(), 4)
    assert source.give_up(key()) == []
    assert source.computed(key(), 8) == []
    assert source.transfer_ended(done(1)) == [Send(PEER, Withdraw(key=key())), SourceClosed(key(), None, True)]


def test_giving_up_before_the_grant_withdraws_at_once_and_the_late_grant_is_stale() -> None:
    source = opened()
    assert source.give_up(key()) == [Send(PEER, Withdraw(key=key())), SourceClosed(key(), None, True)]
    assert source.receive(PEER, grant()) == []
    assert source.stale == 1


def test_a_failed_push_that_is_drained_withdraws_and_reports_the_reason() -> None:
    source = opened()
    source.receive(PEER, grant())
    source.computed(key(), 4)
    source.computed(key(), 8)
    assert source.transfer_ended(PushFailed(Ticket(1), "cable", quiescent=True)) == []
    outputs = source.transfer_ended(done(2))
    assert outputs == [Send(PEER, Withdraw(key=key())), SourceClosed(key(), unavailable("pushing to d failed: cable"), True)]


def test_a_failed_push_that_may_still_write_never_withdraws() -> None:
    source = opened()
    source.receive(PEER, grant())
    source.computed(key(), 4)
    outputs = source.transfer_ended(PushFailed(Ticket(1), "cable", quiescent=False))
    assert outputs == [SourceClosed(key(), unavailable("pushing to d failed: cable"), quiescent=False)]


def test_a_decline_closes_with_its_reason() -> None:
    source = opened()
    full = Failed(message="full", kind="overloaded_error", status=429)
    assert source.receive(PEER, Decline(key=key(), failed=full)) == [SourceClosed(key(), full, True)]


@pytest.mark.parametrize("have_tokens", [-4, -12, 3, 16])
def test_a_grant_of_pages_that_cannot_be_there_is_refused(have_tokens: int) -> None:
    source = opened()
    source.computed(key(), 8)
    withdraw, closed = source.receive(PEER, msgspec.structs.replace(grant(), have_tokens=have_tokens))
    assert withdraw == Send(PEER, Withdraw(key=key()))
    assert isinstance(closed, SourceClosed) and "have_tokens" in str(closed.failure)


def test_pages_that_the_peer_has_are_not_pushed() -> None:
    source = opened()
    source.receive(PEER, msgspec.structs.replace(grant(), have_tokens=8))
    assert pushes(source.computed(key(), 8)) == []
    assert pushes(source.sampled(key(), 5)) == [([12], [22])]


@pytest.mark.parametrize("pages", [(20, 21), (20, 21, 22, 23)])
def test_a_grant_of_the_wrong_size_is_refused(pages: tuple[int, ...]) -> None:
    source = opened()
    outputs = source.receive(PEER, grant(pages))
    assert isinstance(outputs[-1], SourceClosed) and "granted" in str(outputs[-1].failure)


def test_an_answer_of_another_instance_is_dropped_and_counted() -> None:
    source = opened()
    assert source.receive(OTHER, grant()) == []
    assert source.stale == 1
    assert pushes(source.computed(key(), 8)) == []


def test_a_second_grant_is_dropped() -> None:
    source = opened()
    source.receive(PEER, grant())
    assert source.receive(PEER, grant((30, 31, 32))) == []
    assert pushes(source.computed(key(), 4)) == [([10], [20])]


def test_the_handoffs_to_a_peer_that_left_fail() -> None:
    source = opened()
    assert source.peers_gone([(PEER, LIFE)]) == []
    outputs = source.peers_gone([(PEER, Incarnation("2"))])
    assert outputs[-1] == SourceClosed(key(), unavailable("d left the fleet"), True)
