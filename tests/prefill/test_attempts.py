"""The prefill scheduler over attempts, priorities, terms, lost links and the end of the instance."""

import msgspec
import pytest

from common.ids import ROUTER, Incarnation, Int32Array, Life, Ticket, pack_ids
from common.instance.ports import Action
from common.messages import (
    Cancel,
    Decline,
    Failed,
    LinkReport,
    LinkTraffic,
    Probe,
    Probed,
    Renew,
    Renewed,
    Repeat,
    Reserve,
    Standing,
    TellLinks,
    Terms,
    TokenDelta,
    Withdraw,
)
from common.messages.transfers import Allow, Connect, Push, PushFailed, Settled
from kv_transfer.handoff_reader import RENEW_S, RENEWALS_AFTER, WRITE_LEASE_S
from tests.builders import LAYOUT, instance, key, result
from tests.prefill.rig import DECODE, LIFE, ME, begun, finish_pushes, generate, grant_for, handoffs, pushing, reserves, scheduler
from tests.schedulers import abandon, deltas, drain, failures, is_home, kinds, link_changed, meet, messages


def reserved(actions: list[Action]) -> list[str]:
    return [reserve.key.request_id for reserve in reserves(actions)]


LOST = link_changed("d", "lost")
GRANTED_BY = Life(DECODE, Incarnation("1"))


# --- who is first ----------------------------------------------------------------------------------------------------------


def test_the_most_urgent_is_computed_first_and_among_equals_the_oldest() -> None:
    made = scheduler(chunk_tokens=4)
    for name, terms in (("young", Terms(age_s=1.0)), ("late", Terms(priority=1, age_s=9.0)), ("old", Terms(age_s=5.0))):
        made.receive(ROUTER, generate(name, 4, terms=terms), 10.0)
    made.receive(ROUTER, generate("urgent", 4, terms=Terms(priority=-1)), 10.0)
    assert [reserved(made.decide(10.0).actions) for _ in range(4)] == [["urgent"], ["old"], ["young"], ["late"]]


def test_a_reservation_says_whose_the_request_is_and_its_age_includes_the_wait_here() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 4, terms=Terms(priority=2, age_s=5.0, timeout_s=30.0, owner="alice")), 10.0)
    (reserve,) = reserves(made.decide(13.0).actions)
    assert reserve.terms == Terms(priority=2, age_s=8.0, timeout_s=27.0, owner="alice")
    assert (reserve.incarnation, reserve.sent_s) == (LIFE, 13.0)
    made.receive(ROUTER, generate("b", 4), 10.0)
    assert reserves(made.decide(20.0).actions)[0].terms.timeout_s == 50.0, "the instance's"


# --- an answer that is resumed ---------------------------------------------------------------------------------------------


def test_the_tokens_of_a_resumed_answer_are_numbered_from_where_it_was() -> None:
    made, decision = begun(generate("a", 6, first=2))
    assert reserves(decision.actions)[0].first == 2
    assert deltas(made.step_done(result(decision.plan, [55]), 0.1)) == [TokenDelta(key("a"), 2, (55,), None)]


@pytest.mark.parametrize("first", [0, 2])
def test_a_failed_push_ends_the_request_with_the_number_of_the_token_after_its_first(first: int) -> None:
    made, decision = begun(generate("a", 6, first=first), is_granted=True)
    made.step_done(result(decision.plan, [55]), 0.1)
    (delta,) = deltas(made.handle(PushFailed(Ticket(1), "cable", quiescent=True), 0.2))
    assert delta.first == first + 1 and isinstance(delta.ending, Failed) and delta.ending.retryable
    assert "cable" in delta.ending.message and is_home(made)


# --- what the router asks --------------------------------------------------------------------------------------------------


def test_a_first_token_and_a_failure_after_it_are_told_again() -> None:
    made, decision = begun(generate("a", 6, first=2), is_granted=True)
    again = Repeat(tokens=((key("a"), 2),))
    assert made.receive(ROUTER, again, 0.0) == []
    made.step_done(result(decision.plan, [55]), 0.1)
    assert deltas(made.receive(ROUTER, again, 0.1)) == [TokenDelta(key("a"), 2, (55,))]
    (failure,) = deltas(made.handle(PushFailed(Ticket(1), "cable", quiescent=True), 0.2))
    assert is_home(made)
    assert deltas(made.receive(ROUTER, again, 0.3)) == [TokenDelta(key("a"), 2, (55,), failure.ending)]


def test_who_decodes_a_request_is_remembered_after_its_handoff_in_case_placed_was_lost() -> None:
    made, push = pushing()
    for next_token in (1, None):
        (answer,) = messages(made.receive(ROUTER, Probe(round=1, keys=(key("a"),)), 30.0))
        assert answer == Probed(round=1, id=ME, incarnation=LIFE, standings=(Standing(key("a"), next_token, GRANTED_BY),))
        finish_pushes(made, push if next_token else [])


def test_the_requests_of_a_router_that_is_gone_end_without_a_word_to_the_client() -> None:
    made, push = pushing("pushing", chunk_tokens=4)
    for name in ("computing", "waiting"):
        made.receive(ROUTER, generate(name, 8), 0.5)
    plan = made.decide(0.5).plan
    assert kinds(abandon(made, 1.0)) == ["Withdraw"]
    assert kinds(finish_pushes(made, push)) == ["Withdraw"]
    made.step_done(result(plan), 1.1)
    assert is_home(made)


# --- renewals --------------------------------------------------------------------------------------------------------------


def renews(actions: list[Action]) -> list[list[str]]:
    return [[claim.key.request_id for claim in m.claims] for m in messages(actions) if isinstance(m, Renew)]


def test_open_handoffs_are_renewed_from_the_reserve_on_and_for_a_while_after_the_handoff() -> None:
    made, push = pushing()
    assert made.next_deadline() == RENEW_S
    assert renews(made.tick(RENEW_S)) == [["a"]]
    assert len(handoffs(finish_pushes(made, push))) == 1
    for number in range(2, 2 + RENEWALS_AFTER):
        assert renews(made.tick(number * RENEW_S)) == [[]]
    assert made.next_deadline() is None


def test_an_answered_renewal_extends_the_lease() -> None:
    made, _ = pushing()
    made.tick(RENEW_S)
    renewed = Renewed(sent_s=RENEW_S, write_lease_s=WRITE_LEASE_S)
    (allow,) = made.receive(DECODE, renewed, RENEW_S + 0.1)
    assert isinstance(allow, Allow) and allow.until_s == RENEW_S + WRITE_LEASE_S


def test_a_reservation_that_the_decode_instance_does_not_hold_ends_the_request_so_that_it_is_resumed() -> None:
    made, push = pushing()
    made.tick(RENEW_S)
    made.receive(DECODE, Renewed(sent_s=RENEW_S, write_lease_s=WRITE_LEASE_S, over=(key("a"),)), RENEW_S + 0.1)
    actions = finish_pushes(made, push)
    assert kinds(actions) == ["Withdraw", "TokenBatch"] and failures(actions)["a"].retryable
    assert is_home(made)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_cancel_under_a_push_keeps_the_pages_until_it_has_ended_and_the_client_is_told_nothing(is_over: bool) -> None:
    """is_over: the decode instance says that it does not hold the reservation any more."""
    made, push = pushing()
    assert made.receive(ROUTER, Cancel(key=key("a")), 0.2) == []
    if is_over:
        made.tick(RENEW_S)
        made.receive(DECODE, Renewed(sent_s=RENEW_S, write_lease_s=WRITE_LEASE_S, over=(key("a"),)), RENEW_S + 0.1)
    assert made.report().load.pages_free < made.report().load.pages_total
    assert kinds(finish_pushes(made, push)) == ["Withdraw"] and is_home(made)


# --- what is checked -------------------------------------------------------------------------------------------------------


def test_a_handoff_carries_the_digests_of_its_pages_when_they_are_verified() -> None:
    asked: list[list[int]] = []

    def digest(pages: Int32Array) -> bytes:
        asked.append(pages.tolist())
        return b"abcd" * len(pages)

    made, push = pushing(digest=digest)
    (handoff,) = handoffs(finish_pushes(made, push))
    (pushed,) = [action for action in push if isinstance(action, Push)]
    assert handoff.digests == b"abcd" and asked == [pushed.source_pages.tolist()]


def test_nothing_settles_at_a_prefill_instance() -> None:
    with pytest.raises(AssertionError, match="nobody writes to a prefill instance"):
        scheduler().handle(Settled(key("a")), 0.0)


# --- links and peers -------------------------------------------------------------------------------------------------------


def test_the_requests_on_a_lost_link_are_resumed_at_once_and_their_pages_come_home_when_their_pushes_have_ended() -> None:
    made, _ = pushing()
    told = failures(made.handle(LOST, 1.0))["a"]
    assert told.retryable and "cable" in told.message
    load = made.report().load
    assert (load.pages_quarantined, load.pages_total - load.pages_free) == (1, 1)
    made.handle(link_changed("d", "ready"), 2.0)
    assert made.report().load.pages_quarantined == 0, "it is up again"
    actions = made.handle(PushFailed(Ticket(1), "the link was closed", quiescent=True), 5.0)
    assert kinds(actions) == ["Withdraw"] and is_home(made)


def test_what_was_pushed_to_a_peer_is_reported_with_its_link() -> None:
    made, push = pushing()
    finish_pushes(made, push)
    (report,) = [message for message in messages(made.receive(ROUTER, TellLinks(), 1.0)) if isinstance(message, LinkReport)]
    (link,) = report.links
    traffic = LinkTraffic(
        pushes=1, runs=1, bytes_pushed=LAYOUT.page_bytes, push_seconds=0.1, handoffs=1, exposed_seconds=1.0 - 0.1
    )
    assert (link.peer, link.traffic) == (DECODE, traffic)


def test_a_request_whose_pushes_are_stuck_is_forgotten_and_its_key_is_claimed_on() -> None:
    made, decision = begun(generate("a", 4))
    grant = grant_for(decision.actions)
    made.receive(DECODE, grant, 0.0)
    made.step_done(result(decision.plan, [5]), 0.1)
    actions = made.handle(PushFailed(Ticket(1), "cable", quiescent=False), 0.2)
    assert kinds(actions) == ["TokenBatch"], "no Withdraw"
    for second in range(1, 3 + RENEWALS_AFTER):
        assert renews(made.tick(float(second))) == [["a"]]
    assert kinds(made.receive(DECODE, Renewed(sent_s=4.0, write_lease_s=WRITE_LEASE_S, over=(key("a"),)), 5.0)) == ["Allow"]
    assert made.receive(DECODE, Decline(key=key("a"), failed=Failed(message="late")), 5.0) == []
    assert made.receive(DECODE, grant, 5.0) == []
    assert made.report().load.pages_quarantined == 1 and made.report().load.running_requests == 0
    assert made.pool.free_pages == made.pool.total_pages - 1, "the push may still read it"


def test_a_request_that_cannot_fit_beside_quarantined_pages_is_refused_and_the_next_is_admitted() -> None:
    made, _ = pushing(total_pages=4)
    made.receive(ROUTER, generate("large", 16), 0.2)
    made.receive(ROUTER, generate("small", 8), 0.2)
    assert made.decide(0.2).plan is None, "its page may still come home"
    made.handle(PushFailed(Ticket(1), "cable", quiescent=False), 0.3)
    decision = made.decide(0.3)
    told = failures(decision.actions)["large"]
    assert told.retryable and "lacks memory" in told.message
    assert reserved(decision.actions) == ["small"]


def test_a_request_whose_peer_left_is_drained_and_then_fails_so_that_it_is_resumed() -> None:
    made, _ = pushing()
    assert meet(made, [], 1.0) == [Connect((), (DECODE,))]
    actions = made.handle(PushFailed(Ticket(1), "the link was closed", quiescent=True), 1.1)
    assert kinds(actions) == ["Withdraw", "TokenBatch"] and "left the fleet" in failures(actions)["a"].message


def test_a_successor_of_a_decode_instance_hears_of_its_own_handoffs_only() -> None:
    made, _ = pushing()
    meet(made, [instance("d", "decode", "2")], 0.5)
    made.receive(ROUTER, generate("b", 4), 0.5)
    assert reserved(made.decide(0.5).actions) == ["b"]
    assert [renews(made.tick(second)) for second in (1.0, 1.5, 2.5)] == [[], [["b"]], [["b"]]]


# --- the end of the instance -----------------------------------------------------------------------------------------------


def test_it_has_drained_when_what_runs_is_handed_off_and_its_pushes_have_ended() -> None:
    made, push = pushing()
    drain(made, 0.5)
    assert not made.report().drained
    assert len(handoffs(finish_pushes(made, push))) == 1
    assert made.report().drained


def test_requests_that_still_run_when_the_drain_times_out_fail_so_that_they_are_resumed() -> None:
    made, push = pushing()
    drain(made, 0.0)
    assert failures(made.tick(29.0)) == {}
    told = failures(made.tick(30.0))["a"]
    assert told.retryable and not made.report().drained
    assert kinds(finish_pushes(made, push)) == ["Withdraw"] and made.report().drained


# --- the worst of messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent_s", [float("nan"), float("inf"), -1e300])
def test_nothing_that_a_decode_instance_says_raises(sent_s: float) -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 4), 0.0)
    actions = made.decide(0.0).actions
    grant = grant_for(actions)
    for write_lease_s in (float("nan"), float("-inf"), 1e300):
        made.receive(DECODE, Renewed(sent_s=sent_s, write_lease_s=write_lease_s, over=(key("a"), key("b"))), 0.1)
    for _ in range(2):
        made.receive(DECODE, grant, 0.2)
        made.receive(DECODE, Decline(key=key("a"), failed=Failed(message="no")), 0.2)


@pytest.mark.parametrize("pages", [b"", pack_ids(range(9))])
def test_an_invalid_grant_fails_the_request_and_not_the_process(pages: bytes) -> None:
    made, decision = begun(generate("a", 4))
    grant = msgspec.structs.replace(grant_for(decision.actions), pages=pages)
    assert kinds(made.receive(DECODE, grant, 0.1)) == ["Withdraw", "TokenBatch"]
    made.step_done(result(decision.plan, [5]), 0.2)
    assert is_home(made)


def test_withdrawals_are_never_sent_while_a_push_is_in_flight() -> None:
    made, push = pushing()
    said: list[Action] = []
    said += made.receive(ROUTER, Cancel(key=key("a")), 0.2)
    said += made.receive(DECODE, Decline(key=key("a"), failed=Failed(message="no")), 0.3)
    said += made.tick(1.0)
    said += made.receive(DECODE, Renewed(sent_s=1.0, write_lease_s=WRITE_LEASE_S, over=(key("a"),)), 1.1)
    said += made.handle(LOST, 1.2)
    said += meet(made, [], 1.3)
    said += made.tick(60.0)
    assert not any(isinstance(message, Withdraw | Reserve) for message in messages(said))
    assert kinds(finish_pushes(made, push)) == ["Withdraw"] and is_home(made)
