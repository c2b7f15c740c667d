"""Late choice at the decode scheduler: reservations that do not wait, and those that have moved to another reader."""

from msgspec.structs import replace

from common.errors import NoRoom
from common.ids import ROUTER, Generation
from common.instance.ports import Action
from common.instance.waiting_line import PATIENCE_S
from common.messages import Cancel, Claim, Decline, Renew, Terms
from decode.memory import RETURNS_S, WAITS_S
from decode.scheduler import DecodeScheduler
from tests.builders import key
from tests.decode.rig import WRITER, WRITERS_LIFE, decoding, renew, reserve, reserved, scheduler, with_reservation
from tests.schedulers import declined, granted, is_home, kinds, messages, renewed, settle

ROOM = 4


def full() -> DecodeScheduler:
    """Memory for four pages, and all but one are reserved."""
    made = scheduler(total_pages=ROOM)
    reserved(made, "holds", tokens=8)
    return made


def ask(made: DecodeScheduler, name: str = "a", tokens: int = 8, now: float = 0.5, waits: bool = False) -> list[Action]:
    """A turn in which a Reserve has arrived."""
    return [*made.receive(WRITER, reserve(name, tokens, sent_s=now, waits=waits), now), *made.decide(now).actions]


def moved(sent_s: float, name: str, *claims: tuple[str, int]) -> Renew:
    held = tuple(Claim(key(each), Generation(generation)) for each, generation in claims)
    return Renew(incarnation=WRITERS_LIFE, sent_s=sent_s, claims=(*held, Claim(key(name), Generation(0), moved=True)))


# --- without waiting -------------------------------------------------------------------------------------------------------


def test_a_reservation_that_does_not_wait_is_granted_or_declined_in_its_turn() -> None:
    assert granted(ask(scheduler())) == ["a"]
    actions = ask(full())
    (decline,) = (message for message in messages(actions) if isinstance(message, Decline))
    assert (decline.failed.status, decline.failed.retryable, decline.sent_s) == (429, True, 0.5)
    assert "no room now" in decline.failed.message


def test_memory_that_comes_home_in_the_same_turn_is_room() -> None:
    assert list(declined(ask(decoding("holds", tokens=8, total_pages=ROOM)))) == ["a"]
    made = decoding("holds", tokens=8, total_pages=ROOM)
    made.receive(WRITER, reserve("b", 8, sent_s=0.6, waits=False), 0.6)
    made.receive(ROUTER, Cancel(key=key("holds")), 0.6)
    assert granted(made.decide(0.6).actions) == ["b"]


def test_a_request_that_was_declined_for_lack_of_room_may_come_again_to_wait() -> None:
    made = full()
    assert list(declined(ask(made))) == ["a"]
    assert made.report().load.waiting_requests == 0 and made.next_deadline() is not None
    assert ask(made, now=0.6, waits=True) == []
    assert made.report().load.waiting_requests == 1
    assert made.report().counters.messages_stale == 0


def test_a_request_that_finds_the_line_full_may_come_again_to_wait() -> None:
    made = scheduler(total_pages=ROOM, max_waiting=1)
    reserved(made, "holds", tokens=8)
    ask(made, "waits", waits=True)
    assert list(declined(ask(made))) == ["a"]
    made.receive(ROUTER, Cancel(key=key("waits")), 0.6)
    assert ask(made, now=0.7, waits=True) == [] and made.report().load.waiting_requests == 1


def test_a_reserve_that_comes_twice_is_answered_twice_if_it_was_declined_and_once_if_it_was_granted() -> None:
    made = full()
    made.receive(WRITER, reserve("a", 8, sent_s=0.5, waits=False), 0.5)
    assert kinds(ask(made)) == ["Decline"], "both came in one turn"
    assert kinds(ask(made, now=0.6)) == ["Decline"]
    made, _ = with_reservation("a")
    assert ask(made, tokens=6) == []


def test_a_request_that_was_cancelled_after_its_decline_does_not_come_again() -> None:
    made = full()
    ask(made)
    made.receive(ROUTER, Cancel(key=key("a")), 0.6)
    assert ask(made, now=0.7, waits=True) == [] and made.report().load.waiting_requests == 0


def test_a_request_that_does_not_wait_does_not_pass_one_that_has_waited_long() -> None:
    made = scheduler(total_pages=8)
    reserved(made, "holds", tokens=8)
    ask(made, "patient", tokens=28, now=0.5, waits=True)
    assert granted(ask(made, "early", tokens=1, now=0.6)) == ["early"]
    assert list(declined(ask(made, "late", tokens=1, now=0.5 + PATIENCE_S))) == ["late"]


def test_a_more_urgent_request_that_does_not_wait_and_does_not_fit_hides_nobody_that_has_waited_long() -> None:
    made = scheduler(total_pages=8)
    reserved(made, "holds", tokens=8)
    ask(made, "patient", tokens=28, now=0.5, waits=True)
    late_s = 0.5 + PATIENCE_S
    urgent = reserve("urgent", 28, sent_s=late_s, waits=False, terms=Terms(priority=-1))
    made.receive(WRITER, urgent, late_s)
    assert list(declined(ask(made, "small", tokens=1, now=late_s))) == ["urgent", "small"]


# --- rounds ----------------------------------------------------------------------------------------------------------------


def test_a_reservation_that_waits_is_declined_after_a_while_and_leaves_no_trace() -> None:
    made = full()
    assert ask(made, waits=True) == [] and made.next_deadline() == 0.5 + WAITS_S
    assert made.report().counters.requests_accepted == 1, "it may be declined, and a counter never falls"
    assert made.tick(0.4 + WAITS_S) == []
    (refused,) = declined(made.tick(0.5 + WAITS_S)).values()
    assert refused.kind == NoRoom.kind and refused.retryable
    counters = made.report().counters
    assert (counters.requests_accepted, counters.requests_ended) == (1, 0), "only the one that runs counts"
    assert ask(made, now=2.0, waits=True) == [] and made.report().load.waiting_requests == 1


def test_a_reservation_that_was_granted_in_time_is_not_declined_later() -> None:
    made, _ = with_reservation()
    assert declined(made.tick(WAITS_S)) == {} and made.report().load.reservations == 1
    assert made.report().counters.requests_accepted == 1


def test_going_round_neither_resets_how_long_a_request_has_waited_nor_gives_its_memory_to_others() -> None:
    """Half of the memory is taken. "patient" needs more than the other half, in which "small" would fit."""
    made = scheduler(total_pages=8)
    reserved(made, "holds", tokens=8)
    patient = reserve("patient", 28, sent_s=0.5, terms=Terms(age_s=1.0))
    made.receive(WRITER, replace(patient, waited_s=PATIENCE_S), 0.5)
    ask(made, "small", tokens=1, now=0.6, waits=True)
    away_s = 0.5 + WAITS_S
    assert list(declined(made.tick(away_s))) == ["patient"]
    assert granted(made.decide(away_s).actions) == [], "its place is kept"
    made.receive(WRITER, replace(patient, sent_s=away_s, waited_s=PATIENCE_S + WAITS_S), away_s + 0.05)
    assert granted(made.decide(away_s + 0.05).actions) == []
    assert list(declined(made.tick(0.6 + WAITS_S))) == ["small"], "it goes round too"
    ask(made, "small", tokens=1, now=away_s + 0.2, waits=True)
    gone_s = away_s + 0.05 + WAITS_S
    assert list(declined(made.tick(gone_s))) == ["patient"]
    assert granted(made.decide(gone_s).actions) == []
    made.tick(gone_s + RETURNS_S)
    assert granted(made.decide(gone_s + RETURNS_S).actions) == [], "small went round meanwhile"
    assert granted(ask(made, "small", tokens=1, now=gone_s + RETURNS_S + 0.1)) == ["small"]


# --- moved -----------------------------------------------------------------------------------------------------------------


def test_a_reservation_whose_handoff_has_moved_is_freed_without_a_word_to_the_client() -> None:
    made, _ = with_reservation()
    actions = made.receive(WRITER, moved(1.0, "a"), 1.0)
    assert kinds(actions) == ["Renewed", "Settle"] and renewed(actions).over == ()
    settle(made, actions)
    assert is_home(made)
    assert made.report().counters.handoffs_lost == 0


def test_a_request_that_waits_and_has_moved_leaves_the_line() -> None:
    made = full()
    ask(made, waits=True)
    made.receive(WRITER, moved(1.0, "a", ("holds", 1)), 1.0)
    assert made.report().load.waiting_requests == 0


def test_a_renewal_from_before_the_latest_reserve_does_not_take_it_away() -> None:
    made, _ = with_reservation(now=1.0)
    made.receive(WRITER, moved(0.5, "a"), 1.1)
    assert made.report().load.reservations == 1


def test_nothing_is_over_that_has_moved() -> None:
    answer = renewed(scheduler().receive(WRITER, moved(1.0, "unknown"), 1.0))
    assert answer.over == ()
    assert renewed(scheduler().receive(WRITER, renew(1.0, ("unknown", 0)), 1.0)).over == (key("unknown"),)
