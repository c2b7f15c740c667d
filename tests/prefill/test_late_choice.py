"""Late choice at the prefill scheduler: which decode instance is asked for a reservation, and who is asked next."""

import pytest
from msgspec.structs import replace

from common.errors import BadRequest, NoRoom, Overloaded, Preempted, TandemError, Unavailable
from common.ids import ROUTER, Incarnation, InstanceId, Life
from common.instance.ports import Action, Send
from common.messages import Decline, Failed, Handoff, Placed, Reserve, Withdraw
from common.messages.transfers import Push
from prefill.scheduler import PrefillScheduler
from tests.builders import instance, key, result
from tests.prefill.rig import LIFE, ME, finish_pushes, grant_for, scheduler
from tests.schedulers import failures, generate, is_home, kinds, link_changed, meet, planned

D, E, F = (InstanceId(name) for name in "def")
FULL, NO_ROOM, LEAVES = Overloaded("its line is full"), NoRoom("no room now"), Unavailable("it is leaving the fleet")


def asked(actions: list[Action]) -> list[tuple[str, bool]]:
    """Who is asked for a reservation, and whether the request waits there."""
    return [(each.to, each.message.waits) for each in actions if isinstance(each, Send) and isinstance(each.message, Reserve)]


class Writer:
    """A prefill scheduler that knows d, e and f, with one request that all three could decode."""

    def __init__(self, *decodes: InstanceId, peers: str = "def", tokens: int = 10) -> None:
        self.made: PrefillScheduler = scheduler()
        self.meet(peers)
        self.said = self.made.receive(ROUTER, generate("a", tokens, decodes=decodes or (D, E, F)), 0.0)

    def meet(self, peers: str, incarnation: str = "1") -> list[Action]:
        there = tuple(instance(name, "decode", incarnation) for name in peers)
        return meet(self.made, there, 0.0)

    def admitted(self) -> "Writer":
        """Its first chunk is planned, and the best candidate is asked."""
        self.decision = self.made.decide(0.0)
        self.said = self.decision.actions
        return self

    def declined(self, by: InstanceId, error: TandemError) -> list[Action]:
        self.said = self.made.receive(by, Decline(key=key("a"), failed=Failed.of(error)), 0.1)
        return self.said

    def granted(self, by: InstanceId) -> list[Action]:
        return self.made.receive(by, grant_for(self.said), 0.2)


# --- the order -------------------------------------------------------------------------------------------------------------


def test_each_candidate_is_asked_in_turn_and_then_the_best_lets_the_request_wait() -> None:
    writer = Writer().admitted()
    order = asked(writer.said)
    for name in (D, E, F):
        order += asked(writer.declined(name, FULL))
    assert order == [("d", False), ("e", False), ("f", False), ("d", True)]
    assert writer.made.report().counters.reservations_moved == 3


def test_a_request_that_has_waited_in_vain_goes_round_the_others_again_and_waits_again_without_limit() -> None:
    writer = Writer(D, E).admitted()
    order = [asked(writer.declined(name, NO_ROOM)) for name in (D, E, D, E, D, E)]
    assert order == [[("e", False)], [("d", True)]] * 3
    (reserve,) = (each.message for each in writer.said if isinstance(each, Send) and isinstance(each.message, Reserve))
    assert reserve.waited_s == pytest.approx(0.1), "all rounds together"
    writer = Writer(E).admitted()
    assert [asked(writer.declined(E, NO_ROOM)) for _ in range(3)] == [[("e", True)]] * 3


def test_an_only_candidate_lets_the_request_wait_at_once() -> None:
    assert asked(Writer(E).admitted().said) == [("e", True)]


def test_when_the_one_that_lets_it_wait_has_no_place_in_its_line_the_next_best_is_asked_to_until_nobody_is_left() -> None:
    writer = Writer(D, E).admitted()
    order = [asked(writer.declined(name, FULL)) for name in (D, E, D)]
    assert order == [[("e", False)], [("d", True)], [("e", True)]]
    told = failures(writer.declined(E, FULL))["a"]
    assert told == Failed.of(FULL) and told.retryable


def test_a_candidate_that_is_not_there_or_out_of_reach_when_the_request_is_admitted_is_passed_over() -> None:
    writer = Writer(peers="ef")
    writer.made.handle(link_changed("e", "lost"), 0.0)
    assert asked(writer.admitted().said) == [("f", True)], "it is the only one"


@pytest.mark.parametrize("error", [LEAVES, Preempted("an older request needs the memory")])
def test_a_candidate_that_declines_for_another_reason_than_room_is_not_asked_again(error: TandemError) -> None:
    writer = Writer(D, E).admitted()
    assert asked(writer.declined(D, error)) == [("e", True)]


def test_a_decline_that_no_other_candidate_could_help_ends_the_request() -> None:
    writer = Writer().admitted()
    actions = writer.declined(D, BadRequest("too long"))
    assert (asked(actions), failures(actions)["a"].status) == ([], 400)


def test_a_request_that_waits_here_goes_on_waiting_until_its_last_candidate_leaves() -> None:
    writer = Writer(D, E)
    assert failures(writer.meet("ef")) == {}
    told = failures(writer.meet("f"))["a"]
    assert told.retryable and "d, e" in told.message and is_home(writer.made)


def test_a_request_whose_candidates_are_all_out_of_reach_when_it_is_admitted_fails_and_gives_its_pages_back() -> None:
    writer = Writer(D)
    writer.made.handle(link_changed("d", "lost"), 0.0)
    actions = writer.admitted().said
    assert failures(actions)["a"].retryable and kinds(actions) == ["TokenBatch"]
    assert writer.decision.plan is None and is_home(writer.made)


# --- before the grant ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["leaves", "comes back as another", "link lost"])
def test_a_candidate_that_is_lost_before_its_grant_is_told_so_and_the_next_one_is_asked(how: str) -> None:
    writer = Writer(D, E).admitted()
    match how:
        case "leaves":
            actions = writer.meet("e")
        case "comes back as another":
            actions = meet(writer.made, [instance("d", "decode", "2"), instance("e", "decode")], 0.1)
        case _:
            actions = writer.made.handle(link_changed("d", "lost"), 0.1)
    said = [(each.to, type(each.message)) for each in actions if isinstance(each, Send)]
    assert said == [("d", Withdraw), ("e", Reserve)] and failures(actions) == {}


def test_what_was_computed_while_nobody_had_room_is_handed_off_to_whoever_grants() -> None:
    writer = Writer(D, E, tokens=4).admitted()
    assert kinds(writer.made.step_done(result(planned(writer.decision), [55]), 0.1)) == ["TokenBatch"]
    writer.declined(D, FULL)
    actions = writer.granted(E)
    (push,) = (action for action in actions if isinstance(action, Push))
    assert push.peer == E
    handed = [each for each in finish_pushes(writer.made, actions) if isinstance(each, Send)]
    assert [(each.to, type(each.message)) for each in handed] == [("e", Handoff)]
    assert is_home(writer.made)


# --- the grant -------------------------------------------------------------------------------------------------------------


def test_the_router_hears_once_which_life_has_granted() -> None:
    writer = Writer(D, E).admitted()
    writer.declined(D, FULL)
    placed = Placed(id=ME, incarnation=LIFE, key=key("a"), decode=Life(E, Incarnation("1")))
    assert Send(ROUTER, placed) in writer.granted(E)
    assert writer.granted(E) == [], "it came twice"


@pytest.mark.parametrize("how", ["declines", "leaves", "link lost"])
def test_after_the_grant_nothing_moves(how: str) -> None:
    writer = Writer(D, E).admitted()
    writer.granted(D)
    match how:
        case "declines":
            actions = writer.declined(D, FULL)
        case "leaves":
            actions = writer.meet("e")
        case _:
            actions = writer.made.handle(link_changed("d", "lost"), 0.3)
    assert asked(actions) == [] and failures(actions)["a"].retryable


def test_a_grant_of_a_former_candidate_is_given_back() -> None:
    writer = Writer(D, E).admitted()
    late = grant_for(writer.said)
    writer.declined(D, FULL)
    (withdraw,) = writer.made.receive(D, replace(late, sent_s=0.1), 0.2)
    assert withdraw == Send(D, Withdraw(key=key("a"), incarnation=LIFE, generation=late.generation))
    assert "Placed" in kinds(writer.granted(E))
