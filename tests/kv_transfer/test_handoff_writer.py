"""The sending end of the handoff, as messages in and actions out; and what went over each link, in sums."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from common.ids import Generation, Incarnation, InstanceId, Life, Ticket, pack_ids
from common.instance.ports import Send
from common.messages import Decline, Failed, Grant, Handoff, LinkTraffic, Withdraw
from common.messages.transfers import Allow, Push, PushDone, PushFailed
from kv_transfer.handoff_reader import WRITE_LEASE_S, DigestPages
from kv_transfer.handoff_writer import HandoffClosed, HandoffGranted, HandoffRefused, PeerTraffic, SourcePagesRead, traffic_of
from tests.builders import LAYOUT, key
from tests.kv_transfer.sources import BEGAN_S, ME, D, Source, grant, reserve

LIFE, OTHER = Incarnation("1"), InstanceId("other")
PEER = Life(D, LIFE)
SOURCE_PAGES = np.array([10, 11, 12], dtype=np.int32)
CLOSED = HandoffClosed(key(), None, quiescent=True)
WITHDRAW = Send(D, Withdraw(key=key(), incarnation=ME, generation=Generation(5)))
WITHDRAWN = [WITHDRAW, CLOSED]
UNGRANTED = Send(D, Withdraw(key=key(), incarnation=ME))


def opened(digest: DigestPages | None = None) -> Source:
    source = Source(ME, LAYOUT, digest=digest)
    assert source.reserve(reserve(), PEER, SOURCE_PAGES) == [Send(D, reserve())]
    return source


def granted(have_tokens: int = 0, digest: DigestPages | None = None) -> Source:
    source = opened(digest)
    assert source.receive(D, grant(have_tokens=have_tokens), BEGAN_S + 0.1) == [
        Allow(D, LIFE, BEGAN_S + WRITE_LEASE_S),
        HandoffGranted(key(), have_tokens // LAYOUT.page_size),
    ]
    return source


def pushing(*computed: int) -> Source:
    """Granted, and so many tokens of the prompt are computed, one after the other: a push is in flight for each."""
    source = granted()
    for tokens in computed:
        assert len(pushes(source.computed(key(), tokens))) == 1
    return source


def unavailable(message: str) -> Failed:
    return Failed(message=message, kind="unavailable_error", status=503, retryable=True)


def pushes(outputs: list[Any]) -> list[tuple[list[int], list[int]]]:
    return [(o.source_pages.tolist(), o.target_pages.tolist()) for o in outputs if isinstance(o, Push)]


def done(ticket: int, pushed_bytes: int = 100) -> PushDone:
    return PushDone(Ticket(ticket), pushed_bytes, 0.1)


# --- the way of a handoff --------------------------------------------------------------------------------------------------


def test_complete_pages_are_pushed_chunk_by_chunk_and_the_last_page_with_the_first_token() -> None:
    source = granted()
    push, _ = source.computed(key(), 6)
    assert isinstance(push, Push) and (push.peer, push.incarnation) == (D, LIFE) and pushes([push]) == [([10], [20])]
    assert pushes(source.computed(key(), 7)) == []
    assert pushes(source.sampled(key(), 99)) == [([11, 12], [21, 22])]
    assert source.transfer_ended(done(1)) == [SourcePagesRead(key(), 1)]
    handoff = Handoff(key=key(), generation=Generation(5), first_token=99, pushed_pages=3, pushed_bytes=200)
    assert source.transfer_ended(done(2)) == [Send(D, handoff), CLOSED]
    assert len(source) == 0 and source.pushes_in_flight == 0


def test_pages_are_read_for_the_last_time_when_the_prompt_is_computed_and_every_push_of_them_has_ended() -> None:
    source = pushing(4, 8)
    assert source.transfer_ended(done(1)) == [], "the chunks that follow attend to them"
    assert SourcePagesRead(key(), 1) in source.sampled(key(), 99)
    assert source.transfer_ended(done(3)) == [], "an earlier one is on its way"
    assert source.transfer_ended(done(2))[-1] == CLOSED


def layered(outputs: list[Any]) -> list[tuple[list[int], range | None]]:
    return [(o.target_pages.tolist(), o.layers) for o in outputs if isinstance(o, Push)]


def test_the_last_chunk_is_pushed_layer_by_layer_while_it_is_computed_and_the_rest_with_the_first_token() -> None:
    source = granted()
    assert layered(source.computed(key(), 4)) == [([20], None)]
    assert layered(source.layers_computed(key(), 1)) == [([21, 22], range(1))]
    assert layered(source.layers_computed(key(), 1)) == []
    assert layered(source.sampled(key(), 99)) == [([21, 22], range(1, LAYOUT.layers))]
    assert [source.transfer_ended(done(ticket)) for ticket in (1, 2)] == [[SourcePagesRead(key(), 1)], []]
    handoff = Handoff(key=key(), generation=Generation(5), first_token=99, pushed_pages=3, pushed_bytes=300)
    assert source.transfer_ended(done(3)) == [Send(D, handoff), CLOSED]


def test_when_every_layer_was_pushed_while_the_last_chunk_was_computed_the_first_token_waits_for_those_pushes_alone() -> None:
    source = pushing(4)
    source.layers_computed(key(), 1)
    assert layered(source.layers_computed(key(), LAYOUT.layers)) == [([21, 22], range(1, LAYOUT.layers))]
    for ticket in (1, 2, 3):
        source.transfer_ended(done(ticket))
    assert [type(output.message) for output in source.sampled(key(), 99) if isinstance(output, Send)] == [Handoff]


def test_layers_wait_for_a_late_grant_and_go_behind_the_pages_that_were_complete_before_them() -> None:
    source = opened()
    assert source.computed(key(), 4) == source.layers_computed(key(), 1) == []
    assert layered(source.receive(D, grant(), BEGAN_S + 0.1)) == [([20], None), ([21, 22], range(1))]


def test_pages_wait_for_a_late_grant_and_then_go_at_once_under_its_lease() -> None:
    source = opened()
    assert source.computed(key(), 8) == source.layers_computed(key(), 1) == source.sampled(key(), 99) == []
    outputs = source.receive(D, grant(), BEGAN_S + 0.1)
    assert outputs[0] == Allow(D, LIFE, BEGAN_S + WRITE_LEASE_S), "the lease comes first"
    assert pushes(outputs) == [([10, 11, 12], [20, 21, 22])] and layered(outputs) == [([20, 21, 22], None)], "not in layers"


def test_pages_that_the_decode_instance_holds_already_are_not_sent() -> None:
    source = granted(have_tokens=8)
    assert pushes(source.computed(key(), 8)) == []
    sampled = source.sampled(key(), 99)
    assert pushes(sampled) == [([12], [22])] and SourcePagesRead(key(), 2) in sampled
    handoff, _ = source.transfer_ended(done(1))
    assert isinstance(handoff, Send) and isinstance(handoff.message, Handoff) and handoff.message.pushed_pages == 1
    whole = granted(have_tokens=12).sampled(key(), 99)
    assert [type(output) for output in whole] == [Send, HandoffClosed], "without any push"


def test_a_handoff_carries_the_digests_of_the_pages_that_were_pushed() -> None:
    source = granted(have_tokens=4, digest=lambda pages: b"".join(bytes([page] * 4) for page in pages.tolist()))
    source.computed(key(), 8)
    source.sampled(key(), 99)
    assert source.transfer_ended(done(1)) == [], "they are read until then"
    handoff, _ = source.transfer_ended(done(2))
    assert isinstance(handoff, Send) and isinstance(handoff.message, Handoff)
    assert handoff.message.digests == bytes([11] * 4 + [12] * 4)


# --- giving up -------------------------------------------------------------------------------------------------------------


def test_giving_up_waits_for_the_push_in_flight_before_it_withdraws() -> None:
    source = pushing(4)
    assert source.give_up(key()) == []
    assert source.computed(key(), 8) == source.layers_computed(key(), 1) == source.sampled(key(), 1) == []
    assert source.transfer_ended(done(1)) == WITHDRAWN


def test_giving_up_before_the_grant_withdraws_at_once_and_the_late_grant_is_stale() -> None:
    source = opened()
    assert source.give_up(key()) == [UNGRANTED, CLOSED]
    assert source.give_up(key()) == source.computed(key(), 4) == source.sampled(key(), 1) == [], "it is over"
    assert source.receive(D, grant(), BEGAN_S) == []
    assert source.stale == 1


@pytest.mark.parametrize("quiescent", [True, False])
def test_a_failed_push_reports_the_reason_and_withdraws_unless_it_may_still_write(quiescent: bool) -> None:
    source = pushing(4, 8)
    assert source.transfer_ended(PushFailed(Ticket(1), "cable", quiescent=quiescent)) == []
    withdraws = [WITHDRAW] if quiescent else []
    closed = HandoffClosed(key(), unavailable("pushing to d failed: cable"), quiescent)
    assert source.transfer_ended(done(2)) == [*withdraws, closed]


def test_the_first_reason_to_drain_is_the_one_that_is_told() -> None:
    source = pushing(4, 8)
    source.give_up(key())
    source.transfer_ended(PushFailed(Ticket(1), "cable", quiescent=True))
    assert source.transfer_ended(done(2)) == WITHDRAWN


@pytest.mark.parametrize("event", [done(7), PushFailed(Ticket(7), "cable", quiescent=True)])
def test_the_end_of_a_push_that_is_not_ours_is_counted(event: PushDone | PushFailed) -> None:
    source = granted()
    assert source.transfer_ended(event) == [] and source.stale == 1


# --- what decode instances say ---------------------------------------------------------------------------------------------


FULL = Failed(message="full", kind="overloaded_error", status=429, retryable=True)


DECLINE = Decline(key=key(), failed=FULL)
REFUSED = HandoffRefused(key(), FULL)
DECLINED = HandoffClosed(key(), FULL, quiescent=True)


def test_a_decline_before_the_grant_refuses_with_its_reason_and_giving_up_then_closes() -> None:
    source = opened()
    assert source.receive(D, DECLINE, BEGAN_S) == [REFUSED]
    assert source.give_up(key()) == [CLOSED]


def moved(source: Source) -> Source:
    """Its peer has declined, and another one is asked, half a second later."""
    again = reserve(sent_s=BEGAN_S + 0.5)
    source.receive(D, DECLINE, BEGAN_S + 0.1)
    assert source.reserve(again, Life(OTHER, LIFE), SOURCE_PAGES) == [Send(OTHER, again)]
    return source


def test_what_was_computed_before_a_decline_is_pushed_to_whoever_grants() -> None:
    source = opened()
    source.computed(key(), 8)
    moved(source)
    assert pushes(source.sampled(key(), 99)) == []
    outputs = source.receive(OTHER, grant(), BEGAN_S + 0.6)
    assert pushes(outputs) == [([10, 11, 12], [20, 21, 22])]
    (handoff, _) = source.transfer_ended(done(1))
    assert isinstance(handoff, Send) and handoff.to == OTHER and isinstance(handoff.message, Handoff)


@pytest.mark.parametrize("answer", [grant(), DECLINE], ids=["grant", "decline"])
def test_a_late_answer_of_a_former_candidate_is_never_used(answer: Grant | Decline) -> None:
    source = moved(opened())
    source.computed(key(), 8)
    assert source.receive(D, answer, BEGAN_S + 0.6) == ([WITHDRAW] if isinstance(answer, Grant) else [])
    assert source.stale == 1 and len(source) == 1
    assert pushes(source.receive(OTHER, grant(), BEGAN_S + 0.7)) == [([10, 11], [20, 21])]


def test_a_decline_of_an_earlier_reserve_says_nothing_about_the_latest() -> None:
    source = moved(opened())
    source.receive(OTHER, DECLINE, BEGAN_S + 0.6)
    source.reserve(reserve(sent_s=BEGAN_S + 0.7), PEER, SOURCE_PAGES)
    assert source.receive(D, msgspec.structs.replace(DECLINE, sent_s=BEGAN_S), BEGAN_S + 0.8) == []
    assert source.receive(D, msgspec.structs.replace(DECLINE, sent_s=BEGAN_S + 0.7), BEGAN_S + 0.9) == [REFUSED]


def test_a_peer_that_cannot_be_reached_loses_what_it_has_not_granted_and_is_told_so() -> None:
    lost = unavailable("the link was lost")
    assert opened().cannot_reach(D, lost) == [UNGRANTED, HandoffRefused(key(), lost)]
    assert granted().cannot_reach(D, lost) == opened().cannot_reach(OTHER, lost) == []


def test_a_decline_after_the_grant_takes_it_back_and_is_answered_when_the_pushes_have_ended() -> None:
    source = pushing(4)
    assert source.receive(D, DECLINE, BEGAN_S + 1.0) == []
    assert source.transfer_ended(done(1)) == [WITHDRAW, DECLINED]
    assert granted().receive(D, DECLINE, BEGAN_S + 1.0) == [WITHDRAW, DECLINED], "at once: nothing is in flight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"have_tokens": tokens}, "have_tokens") for tokens in (3, 16)]
    + [({"pages": pages}, "invalid grant from d") for pages in (pack_ids((20, 21)), pack_ids((20, 21, 22, 23)), b"")],
)
def test_a_grant_of_pages_that_cannot_be_there_or_of_the_wrong_size_is_refused(change: dict[str, Any], reason: str) -> None:
    source = opened()
    source.computed(key(), 8)
    withdraw, closed = source.receive(D, msgspec.structs.replace(grant(), **change), BEGAN_S)
    assert withdraw == WITHDRAW
    assert isinstance(closed, HandoffClosed) and reason in str(closed.failure)


@pytest.mark.parametrize(("answer", "actions"), [(grant(), [replace(WITHDRAW, to=OTHER)]), (DECLINE, [])])
def test_an_answer_of_another_instance_is_counted_and_a_grant_is_given_back(answer: Grant | Decline, actions: list[Any]) -> None:
    source = opened()
    assert source.receive(OTHER, answer, BEGAN_S) == actions
    assert source.stale == 1 and len(source) == 1
    assert pushes(source.computed(key(), 8)) == []


def test_a_second_grant_is_dropped() -> None:
    source = granted()
    assert source.receive(D, grant(pages=(30, 31, 32)), BEGAN_S) == []
    assert source.stale == 1
    assert pushes(source.computed(key(), 4)) == [([10], [20])]


def test_a_grant_that_answers_what_was_not_said_yet_is_dropped_and_counted() -> None:
    """A former process of our name may have said it, on another clock."""
    source = opened()
    assert source.receive(D, grant(sent_s=BEGAN_S + 0.2), BEGAN_S + 0.1) == []
    assert source.stale == 1 and pushes(source.computed(key(), 8)) == []


@pytest.mark.parametrize("sent_s", [math.nan, -math.inf, math.inf])
def test_a_grant_with_an_impossible_time_raises_nothing_and_allows_nothing(sent_s: float) -> None:
    outputs = opened().receive(D, grant(sent_s=sent_s), BEGAN_S)
    assert not any(isinstance(output, Allow) and output.until_s > BEGAN_S for output in outputs)


# --- peers -----------------------------------------------------------------------------------------------------------------


GONE = unavailable("d left the fleet")
LEFT = HandoffClosed(key(), GONE, quiescent=True)


@pytest.mark.parametrize("now_there", [[], [(D, Incarnation("2"))]], ids=["left", "came back as another"])
def test_a_peer_that_left_grants_nothing(now_there: list[tuple[InstanceId, Incarnation]]) -> None:
    source = opened()
    assert source.peers_gone([(D, LIFE)]) == []
    assert source.peers_gone(now_there) == [UNGRANTED, HandoffRefused(key(), GONE)]


def test_nothing_is_kept_of_a_peer_that_came_back_as_another_once_its_last_push_has_ended() -> None:
    source = pushing(4)
    assert source.peers_gone([(D, Incarnation("2"))]) == source.peers_gone([]) == []
    ended = source.transfer_ended(PushFailed(Ticket(1), "the link was closed", quiescent=True))
    assert ended == [WITHDRAW, LEFT], "its pages come home when the push has ended"
    assert len(source) == 0 and source.next_deadline() is None and not source._sessions
    assert source.peers_gone([]) == []


A, B = InstanceId("a"), InstanceId("b")


def test_pushes_and_handoffs_add_up_for_each_peer_and_in_all() -> None:
    traffic = PeerTraffic()
    traffic.add(A, traffic_of(PushDone(Ticket(1), 100, 0.5, runs=3)))
    traffic.add(A, traffic_of(PushDone(Ticket(2), 20, 0.25, runs=1)))
    traffic.add(B, traffic_of(PushDone(Ticket(3), 7, 1.0, runs=2)))
    traffic.add(A, LinkTraffic(handoffs=1, exposed_seconds=0.125))
    to_a = LinkTraffic(pushes=2, runs=4, bytes_pushed=120, push_seconds=0.75, handoffs=1, exposed_seconds=0.125)
    assert traffic.to(A) == to_a
    assert traffic.total == LinkTraffic(pushes=3, runs=6, bytes_pushed=127, push_seconds=1.75, handoffs=1, exposed_seconds=0.125)
    traffic.keep([B])
    assert (traffic.to(A), traffic.to(B).pushes, traffic.total.pushes) == (LinkTraffic(), 1, 3), "who left counts in the total"


@pytest.mark.parametrize(
    ("begun", "quiescent", "counted"),
    [
        (False, True, LinkTraffic(pushes_refused=1)),
        (True, True, LinkTraffic(pushes_broken=1)),
        (True, False, LinkTraffic(pushes_unproven=1)),
    ],
)
def test_a_failure_is_counted_by_its_kind(begun: bool, quiescent: bool, counted: LinkTraffic) -> None:
    traffic = PeerTraffic()
    traffic.add(A, traffic_of(PushFailed(Ticket(1), "cable", quiescent=quiescent, begun=begun)))
    assert traffic.to(A) == counted and traffic.total.pushes_failed == 1
