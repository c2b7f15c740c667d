"""Handoffs at the decode scheduler when messages are lost, late or overtaken, or a writer falls silent.

Whatever happens, the client is told once, and the pages come home when no write can land in them any more.
"""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from common.ids import ROUTER, Incarnation
from common.instance.ports import Action, RouterJoined
from common.messages import Cancel, Grant, Withdraw
from common.messages.transfers import Expect, Settle, Settled
from decode.reservations import MEASURED_S
from decode.scheduler import DecodeScheduler
from kv_transfer.handoff_reader import MARGIN_S, WRITE_LEASE_S
from tests.builders import engine, instance, key, limits
from tests.decode.rig import WRITER, handoff, renew, reserve, scheduler, with_reservation
from tests.schedulers import (
    abandon,
    declined,
    deltas,
    drain,
    failures,
    granted,
    grants,
    is_home,
    kinds,
    meet,
    planned,
    renewed,
    settle,
)

SILENCE_S = WRITE_LEASE_S + MARGIN_S
SUCCESSOR = Incarnation("2")


# --- renewals --------------------------------------------------------------------------------------------------------------


def test_a_renewal_is_answered_and_claimed_reservations_go_on() -> None:
    made, grant = with_reservation()
    actions = made.receive(WRITER, renew(1.0, ("a", grant.generation)), 1.0)
    assert kinds(actions) == ["Renewed"]
    answer = renewed(actions)
    assert (answer.sent_s, answer.write_lease_s, answer.over) == (1.0, WRITE_LEASE_S, ())
    made.receive(WRITER, handoff(grant), 1.1)
    assert len(planned(made.decide(1.1)).decode_rows) == 1


def test_a_successor_that_withdraws_frees_nothing_that_its_predecessor_may_still_write() -> None:
    """The successor has inherited the mail of its name: a Generate of the same key, and then its Cancel."""
    made, grant = with_reservation()
    meet(made, [instance("p", "prefill", SUCCESSOR)], 1.0)
    assert made.receive(WRITER, Withdraw(key=grant.key, incarnation=SUCCESSOR), 1.5) == []
    made.tick(SILENCE_S - 0.1)
    assert not is_home(made), "the predecessor may have pushes in flight"
    settle(made, made.tick(SILENCE_S + 0.1))
    assert is_home(made)


def test_a_lost_grant_is_sent_again() -> None:
    made, grant = with_reservation()
    (again,) = grants(made.receive(WRITER, renew(1.0, ("a", 0)), 1.0))
    assert (again.generation, again.pages, again.sent_s) == (grant.generation, grant.pages, 1.0)


def test_a_grant_after_a_long_wait_answers_the_writers_latest_word() -> None:
    made, first = with_reservation(max_new_tokens=2, max_rows=1)
    made.receive(WRITER, reserve("b", 6, sent_s=0.5), 0.5)
    actions = made.receive(WRITER, renew(1.5, ("a", first.generation), ("b", 0)), 1.5)
    assert kinds(actions) == ["Renewed"] and renewed(actions).over == (), "it waits for its turn"
    settle(made, made.receive(WRITER, Withdraw(key=key("a")), 2.0))
    (grant,) = grants(made.decide(2.0).actions)
    assert grant.key == key("b") and grant.sent_s == 1.5


def test_a_lost_handoff_or_withdraw_ends_the_reservation_as_lost_and_the_request_is_resumed() -> None:
    made, grant = with_reservation()
    actions = made.receive(WRITER, renew(1.0), 1.0)
    assert kinds(actions) == ["Renewed", "Settle", "TokenBatch"]
    assert failures(actions)["a"].retryable and "lost" in failures(actions)["a"].message
    assert made.receive(WRITER, handoff(grant), 1.1) == [], "it was only late"
    settle(made, actions)
    assert is_home(made) and made.report().counters.handoffs_lost == 1


def test_a_renewal_that_overtakes_a_reserve_drops_nothing() -> None:
    made = scheduler()
    made.receive(WRITER, reserve("a", 6, sent_s=2.0), 2.0)
    assert kinds(made.receive(WRITER, renew(1.9), 2.1)) == ["Renewed"]
    grant = grants(made.decide(2.1).actions)[0]
    assert kinds(made.receive(WRITER, renew(1.95), 2.2)) == ["Renewed"]
    made.receive(WRITER, handoff(grant), 2.3)
    assert len(planned(made.decide(2.3)).decode_rows) == 1


def test_a_renewal_that_arrives_before_the_reserve_that_it_claims_takes_it_for_over_and_the_reserve_is_served() -> None:
    made = scheduler()
    assert renewed(made.receive(WRITER, renew(1.0, ("a", 0)), 1.0)).over == (key("a"),)
    made.receive(WRITER, reserve("a", 6, sent_s=0.9), 1.1)
    assert granted(made.decide(1.1).actions) == ["a"]


def test_a_reserve_that_waits_and_is_not_claimed_any_more_leaves_the_line() -> None:
    made, first = with_reservation(max_rows=1)
    made.receive(WRITER, reserve("b", 6, sent_s=0.5), 0.5)
    assert kinds(made.receive(WRITER, renew(1.0, ("a", first.generation)), 1.0)) == ["Renewed"]
    assert made.report().load.waiting_requests == 0


def test_a_renewal_of_another_life_drops_nothing_of_this_one() -> None:
    made, _ = with_reservation(max_rows=1)
    made.receive(WRITER, reserve("b", 6, sent_s=0.5), 0.5)
    assert kinds(made.receive(WRITER, renew(1.0, incarnation=SUCCESSOR), 1.0)) == ["Renewed"]
    assert (made.report().load.waiting_requests, made.report().load.reservations) == (1, 1)


def test_a_claim_of_a_request_that_decodes_already_is_over_and_changes_nothing() -> None:
    """The Handoff has overtaken the Renew."""
    made, grant = with_reservation()
    made.receive(WRITER, handoff(grant), 1.0)
    actions = made.receive(WRITER, renew(0.9, ("a", grant.generation)), 1.1)
    assert kinds(actions) == ["Renewed"]
    assert len(planned(made.decide(1.1)).decode_rows) == 1


def test_a_withdrawal_that_overtakes_its_reserve_is_made_good_by_the_next_renewal() -> None:
    made = scheduler()
    assert made.receive(WRITER, Withdraw(key=key("a")), 0.1) == []
    made.receive(WRITER, reserve("a", 6), 0.2)
    assert granted(made.decide(0.2).actions) == ["a"]
    settle(made, made.receive(WRITER, renew(1.0), 1.0))
    assert is_home(made)


# --- how a request ends while its writer holds it --------------------------------------------------------------------------


def cancelled(made: DecodeScheduler) -> Sequence[Action]:
    return made.receive(ROUTER, Cancel(key=key("a")), 0.5)


def too_late(made: DecodeScheduler) -> Sequence[Action]:
    return made.tick(60.0)


def abandoned(made: DecodeScheduler) -> Sequence[Action]:
    return abandon(made, 0.5)


def drained(made: DecodeScheduler) -> Sequence[Action]:
    return [*drain(made, 25.0), *made.tick(55.0)]


def withdraws(made: DecodeScheduler, grant: Grant, now: float) -> Sequence[Action]:
    return made.receive(WRITER, Withdraw(key=grant.key), now)


def hands_off(made: DecodeScheduler, grant: Grant, now: float) -> Sequence[Action]:
    return made.receive(WRITER, handoff(grant), now)


def hands_off_nonsense(made: DecodeScheduler, grant: Grant, now: float) -> Sequence[Action]:
    return made.receive(WRITER, handoff(grant, first_token=-1), now)


def claims_no_more(made: DecodeScheduler, grant: Grant, now: float) -> Sequence[Action]:
    return made.receive(WRITER, renew(now), now)


def falls_silent(made: DecodeScheduler, grant: Grant, now: float) -> Sequence[Action]:
    return made.tick(now + SILENCE_S)


Word = Callable[[DecodeScheduler, Grant, float], Sequence[Action]]
SAID: dict[Word, list[str]] = {hands_off: [], claims_no_more: ["Renewed", "Settle"], falls_silent: ["Settle", "Expect"]}
"""What comes of a word about a reservation that was cancelled, where that is not a Settle alone."""
WORDS: tuple[Word, ...] = (withdraws, hands_off, hands_off_nonsense, claims_no_more, falls_silent)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("end", [cancelled, abandoned])
def test_nobody_is_told_of_a_request_that_nobody_waits_for_however_its_writer_lets_go(
    end: Callable[[DecodeScheduler], Sequence[Action]], word: Word
) -> None:
    made, grant = with_reservation()
    assert end(made) == [] and made.report().load.pages_free < made.report().load.pages_total
    actions = word(made, grant, 1.0)
    assert deltas(actions) == []
    assert kinds(actions) == SAID.get(word, ["Settle"]) and is_home(made) == (word is hands_off) and made.decide(1.0).plan is None
    settle(made, actions)
    assert is_home(made) and made.decide(2.0).plan is None


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(("end", "status"), [(too_late, 504), (drained, 503)])
def test_a_request_that_ends_here_is_told_by_its_writer_or_else_by_us_once(
    end: Callable[[DecodeScheduler], Sequence[Action]], status: int, word: Word
) -> None:
    """The writer knows whether the first token went out. Withdrawing it has told the client; else it may not have heard us."""
    made, grant = with_reservation()
    made.receive(WRITER, renew(50.0, ("a", grant.generation)), 50.0)
    told = end(made)
    assert declined(told)["a"].status == status and deltas(told) == []
    assert made.report().load.pages_free < made.report().load.pages_total, "it may still write"
    actions = word(made, grant, 61.0)
    if word is withdraws:
        assert deltas(actions) == []
    else:
        (delta,) = deltas(actions)
        assert failures(actions)["a"].status == status
        assert delta.first == (1 if word in (hands_off, hands_off_nonsense) else 0), "the handoff says that a token went out"
    settle(made, actions)
    assert is_home(made) and made.decide(100.0).plan is None


@pytest.mark.parametrize("word", WORDS)
def test_a_request_that_its_writer_lets_go_of_ends_once(word: Word) -> None:
    made, grant = with_reservation()
    actions = word(made, grant, 1.0)
    if word is hands_off:
        assert actions == [] and len(planned(made.decide(1.0)).decode_rows) == 1
        return
    told = [failed.retryable for failed in failures(actions).values()]
    assert told == ([] if word is withdraws else [True]), "one that withdraws tells the client itself"
    for again in WORDS:
        assert deltas(again(made, grant, 30.0)) == []
    settle(made, actions)
    assert is_home(made)


@pytest.mark.parametrize("word", [withdraws, hands_off_nonsense, claims_no_more, falls_silent])
def test_pages_come_home_only_after_everything_that_arrived_for_them_is_in_memory(word: Word) -> None:
    made, grant = with_reservation()
    actions = word(made, grant, 1.0)
    assert [action for action in actions if isinstance(action, Settle)] == [Settle(key("a"))]
    load = made.report().load
    assert (load.reservations, load.pages_total - load.pages_free) == (0, 3)
    made.receive(ROUTER, Cancel(key=key("a")), 2.0)
    made.tick(60.0)
    assert made.report().load.pages_free < made.report().load.pages_total
    assert made.handle(Settled(key("a")), 61.0) == [] and is_home(made)
    assert made.handle(Settled(key("a")), 62.0) == [], "of what is unknown"


# --- silence ---------------------------------------------------------------------------------------------------------------


def test_the_reservations_of_a_silent_writer_come_home_when_it_cannot_write_any_more() -> None:
    made, _ = with_reservation()
    assert made.next_deadline() == SILENCE_S
    assert made.tick(SILENCE_S - 0.1) == []
    actions = made.tick(SILENCE_S)
    assert failures(actions)["a"].retryable and "silent" in failures(actions)["a"].message
    settle(made, actions)
    assert is_home(made)


def test_a_writer_that_the_router_does_not_see_keeps_its_reservations_as_long_as_it_speaks() -> None:
    made, grant = with_reservation()
    meet(made, [], 1.0)
    for second in range(1, 30):
        made.receive(WRITER, renew(float(second), ("a", grant.generation)), float(second))
        assert made.tick(float(second)) == []
    made.receive(WRITER, handoff(grant), 30.0)
    assert len(planned(made.decide(30.0)).decode_rows) == 1


def test_a_waiting_request_leaves_the_line_when_its_writer_leaves_the_fleet() -> None:
    made, _ = with_reservation(max_rows=1)
    made.receive(WRITER, reserve("b", 6), 0.0)
    assert meet(made, [instance("p", "prefill", "2")], 1.0) == []
    assert (made.report().load.waiting_requests, made.report().load.reservations) == (0, 1)


def test_a_writer_that_has_fallen_silent_is_granted_nothing() -> None:
    made, _ = with_reservation(max_rows=1)
    made.receive(WRITER, reserve("b", 6, sent_s=0.0), SILENCE_S - 0.1)  # it was long under way
    settle(made, made.tick(SILENCE_S + 0.1))
    actions = made.decide(SILENCE_S + 0.1).actions
    assert grants(actions) == [] and declined(actions)["b"].retryable
    assert is_home(made)


def test_a_writer_that_was_stopped_for_long_is_told_that_everything_is_over() -> None:
    made, grant = with_reservation()
    settle(made, made.tick(SILENCE_S))
    assert made.receive(WRITER, handoff(grant), 30.0) == []
    assert renewed(made.receive(WRITER, renew(30.0, ("a", grant.generation)), 30.0)).over == (key("a"),)
    assert is_home(made) and made.report().counters.messages_stale == 1


@pytest.mark.parametrize("sent_s", [float("nan"), float("inf"), float("-inf")])
def test_messages_with_an_impossible_time_raise_nothing_and_hold_nothing_for_ever(sent_s: float) -> None:
    made = scheduler()
    made.receive(WRITER, reserve("a", 6, sent_s=sent_s), 0.0)
    made.decide(0.0)
    for second in range(1, 4):
        made.receive(WRITER, renew(sent_s, ("a", 0), ("b", 7)), float(second))
    settle(made, made.tick(3.0 + SILENCE_S))
    assert made.report().load.reservations == 0


# --- the writes that are expected ------------------------------------------------------------------------------------------


def expected(actions: Sequence[Action]) -> list[Expect]:
    return [action for action in actions if isinstance(action, Expect)]


def unmet() -> DecodeScheduler:
    """It has never heard of its peers."""
    made = DecodeScheduler(instance("d", "decode"), engine(), limits())
    made.handle(RouterJoined(ROUTER, 1), 0.0)
    return made


THERE = [instance("p", "prefill")]


def test_the_writes_with_which_a_new_writer_measures_its_link_are_expected() -> None:
    made = unmet()
    said = [*meet(made, THERE, 0.0), *made.tick(0.0), *made.tick(MEASURED_S / 2)]
    assert said == [Expect(1)]
    said += [*meet(made, THERE, MEASURED_S), *made.tick(MEASURED_S)]
    assert said == [Expect(1), Expect(0)], "a writer that is known is not measured again"


def test_writes_from_another_host_are_expected_as_distant() -> None:
    made = unmet()
    there = instance("p", "prefill")
    elsewhere = tuple(msgspec.structs.replace(rank, host="elsewhere") for rank in there.ranks)
    meet(made, [msgspec.structs.replace(there, ranks=elsewhere)], 0.0)
    assert made.tick(0.0) == [Expect(1, distant=True)]


def test_a_writer_of_another_host_that_joins_while_one_of_this_host_is_measured_is_expected_as_distant() -> None:
    made = unmet()
    assert [*meet(made, THERE, 0.0), *made.tick(0.0)] == [Expect(1)]
    other = instance("q", "prefill")
    elsewhere = tuple(msgspec.structs.replace(rank, host="elsewhere") for rank in other.ranks)
    both = [*THERE, msgspec.structs.replace(other, ranks=elsewhere)]
    assert [*meet(made, both, 1.0), *made.tick(1.0)] == [Expect(1, distant=True)]
    assert made.tick(1.0 + MEASURED_S) == [Expect(0)]


def test_the_transfers_are_told_how_many_reservations_there_are_when_that_changes() -> None:
    made = scheduler()
    said = [*made.tick(0.0)]
    for name in ("a", "b"):
        made.receive(WRITER, reserve(name, 6), 0.0)
    for _ in range(3):
        said += [*made.decide(0.0).actions, *made.tick(0.0)]
    for name in ("a", "b"):
        made.receive(WRITER, Withdraw(key=key(name)), 1.0)
        said += [*made.tick(1.0), *made.tick(1.0)]
    assert expected(said) == [Expect(2), Expect(1), Expect(0)]
