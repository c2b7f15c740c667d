"""Telling again at the router's core: what a detokenizer lost is opened again and sent again, and no attempt is used up.

Probes: an attempt of which nothing is heard is asked about, and what seems lost is told again.
"""

from collections.abc import Iterable

import pytest

from common.config import RouterConfig
from common.ids import AttemptId, Incarnation, RequestId, pack_ids
from common.instance.ports import Send
from common.messages import DetokenizerHeartbeat, Finished, InstanceInfo, Probed, Standing
from router import retelling
from router.requests import RequestSpec
from router.retelling import ANSWER_TOKENS, PROBE_S, TOKENS_PER_S, TURN_TOKENS
from router.timelines import ResumeReason
from tests.builders import key
from tests.router.bench import D0, D1, P0, PROMPT, Bench, announced, cancels, close, generates, probes, retold, route, spec

NEW = "tcp://detokenizer:2"


def opened(sends: Iterable[Send]) -> list[str]:
    return [message.key.request_id for message in announced(sends)]


# --- a detokenizer that was started again --------------------------------------------------------------------------------


def test_every_open_answer_is_opened_anew_where_its_client_is_and_its_tokens_are_told_from_there() -> None:
    bench = Bench(P0, D0)
    bench.submit(RequestSpec(RequestId("a"), 0, PROMPT, spec().sampling, stop=("end",)), spec("b", 1), spec("c", 2))
    bench.text(0, "xy", name="a")
    bench.text(0, "z", Finished("length"), name="c")
    bench.core.detokenizer_moved(0, NEW, 2.0)
    sent = bench.tick(2.0)
    assert retold(sent) == {"d0": ((key("b"), 0), (key("a"), 2)), "p0": ((key("b"), 0),)}
    for_b, for_a = announced(sent)
    assert (for_a.first, for_a.text, for_a.stop, for_a.life_s) == (2, "xy", ("end",), 1858.0)
    assert for_a.context == pack_ids([*range(112, 120), *map(ord, "xy")])
    assert (for_b.first, for_b.text) == (0, "")
    assert generates(sent) == [] and bench.observer.resumes == []
    assert bench.text(2, "", Finished("length"), now=2.1, name="a") == [close("a")]
    assert bench.client.take()[-1].ending == Finished("length"), "of the same attempt"


def test_the_answers_are_opened_a_few_in_each_turn_and_those_that_wait_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retelling, "TURN_TOKENS", 5 * ANSWER_TOKENS)
    names = [str(number) for number in range(12)]
    bench = Bench(D0).serving(*(spec(name, max_new_tokens=230) for name in names))
    for place, name in enumerate(reversed(names[:-1])):
        bench.text(0, "a" if place else "a" * 220, now=1.0 + 0.001 * place, name=name)
    bench.core.detokenizer_moved(0, NEW, 1.5)
    turns = [opened(bench.tick(1.5 + 0.01 * turn)) for turn in range(4)]
    assert [name for turn in turns for name in turn] == [names[-1], *reversed(names[:-1])]
    assert [len(turn) for turn in turns] == [2, 5, 5, 0], "the second is long"


def test_the_next_turn_comes_when_the_detokenizer_may_have_followed() -> None:
    bench = Bench(D0).serving(*(spec(str(number)) for number in range(300)))
    bench.core.detokenizer_moved(0, NEW, 1.0)
    assert bench.core.next_deadline() is not None and len(opened(bench.tick(1.0))) == TURN_TOKENS // ANSWER_TOKENS
    assert opened(bench.tick(1.01)) == []
    assert bench.core.requests.next_deadline() == 1.0 + TURN_TOKENS / TOKENS_PER_S


def test_an_answer_that_ends_or_is_resumed_in_line_is_not_opened() -> None:
    bench = Bench(P0, D0, D1).serving(spec("a", 0), spec("b", 1), spec("c", 2))
    bench.core.detokenizer_moved(0, NEW, 1.0)
    bench.text(0, "x", Finished("length"), name="a")  # the former detokenizer has sent it
    bench.core.requests.cancel([RequestId("b")], 1.0)
    assert opened(bench.tick(1.0)) == ["c"]
    bench.core.requests.cancel([RequestId("c")], 1.0)
    assert bench.core.requests.next_deadline() is None


def test_only_the_answers_of_the_detokenizer_that_moved_are_opened() -> None:
    bench = Bench(P0, D0, detokenizers=2)
    names = [str(number) for number in range(20)]
    sent = bench.submit(*(spec(name, index) for index, name in enumerate(names)))
    by_shard = {name: send.to for name, send in zip(names, [one for one in sent if announced([one])], strict=True)}
    bench.core.detokenizer_moved(1, NEW, 1.0)
    own = [name for name in names if by_shard[name] == bench.core.detokenizer_names[1]]
    assert 0 < len(own) < 20 and opened(bench.tick(1.0)) == own


def test_an_answer_that_waits_to_be_opened_is_not_asked_about_and_is_asked_about_two_seconds_later() -> None:
    bench = Bench(D0).serving()
    bench.core.detokenizer_moved(0, NEW, 1.9)
    assert retold(bench.tick(2.5)) == {"d0": ((key(), 0),)}
    assert bench.core.requests.next_deadline() == 4.5


# --- a gap in the text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "ending"), [("d", None), ("", Finished(reason="stop"))], ids=["tokens", "the ending"])
def test_after_a_gap_in_the_text_what_is_missing_is_told_again(text: str, ending: Finished | None) -> None:
    bench = Bench(P0, D0, D1).serving()
    bench.text(0, "ab")
    assert bench.text(3, text, ending) == bench.text(4, text, ending) == []
    assert retold(bench.tick(1.0)) == {"d0": ((key(), 2),)}
    assert bench.text(5, "f", now=1.5) == [] and opened(bench.tick(1.5)) == [], "it is on its way"
    bench.text(2, "cde", now=1.6)
    bench.text(6, "g", now=1.7)
    assert retold(bench.tick(1.7)) == {"d0": ((key(), 5),)}, "another gap"
    assert "".join(delta.text for delta in bench.client.take()) == "abcde"
    assert bench.observer.resumes == []


def test_text_of_which_only_the_end_is_new_is_told_again_from_where_the_client_is() -> None:
    """It came of a new detokenizer, while the former one's last words were still on their way."""
    bench = Bench(D0).serving()
    bench.text(0, "abcd")
    bench.text(2, "cd")
    assert opened(bench.tick(1.0)) == [], "nothing in it is new"
    bench.text(2, "cdef", Finished("length"))
    sent = bench.tick(1.0)
    assert retold(sent) == {"d0": ((key(), 4),)} and announced(sent)[0].again
    bench.text(4, "ef", Finished("length"))
    assert "".join(delta.text for delta in bench.client.take()) == "abcdef"


def test_when_telling_again_does_not_help_the_request_is_resumed() -> None:
    bench = Bench(P0, D0, D1).serving()
    bench.text(0, "ab", now=1.0)
    bench.text(3, "d", now=1.0)
    bench.tick(1.5)
    bench.tick(3.5)
    sent = bench.probed(D0, None, 3.6)
    assert sent[:3] == [*cancels(P0, D0), close()]
    assert [message.first for _, message in generates(sent)] == [2]
    assert bench.observer.resumes == [ResumeReason.LOST_MESSAGES]


def test_answers_of_one_round_of_which_one_came_before_the_handoff_and_one_after_it_prove_no_loss() -> None:
    bench = Bench(P0, D0).serving()
    bench.text(0, "a")
    bench.core.detokenizer_moved(0, NEW, 1.5)
    assert retold(bench.tick(1.5)) == {"p0": ((key(), 1),), "d0": ((key(), 1),)}
    for now in (2.5, 3.5):
        bench.hear_detokenizer(now)
        bench.beat(now)
    assert set(probes(bench.tick(3.5))) == {"p0", "d0"}
    bench.probed(D0, 0, 3.6)
    assert bench.probed(P0, None, 3.9) == [], "it handed off between the two answers"
    assert retold(bench.tick(3.9)) == {"p0": ((key(), 1),), "d0": ((key(), 1),)}
    for now in (4.9, 5.9):
        bench.hear_detokenizer(now)
        bench.beat(now)
    bench.tick(5.9)
    bench.probed(D0, 0, 6.0)
    bench.probed(P0, None, 6.0)
    assert bench.observer.resumes == [ResumeReason.LOST_MESSAGES], "the handoff was lost indeed"


# --- a detokenizer that may be gone --------------------------------------------------------------------------------------


def test_what_members_said_before_the_detokenizer_was_started_again_decides_nothing() -> None:
    bench = Bench(D0).serving()
    bench.hear_detokenizer(1.5)
    bench.tick(2.0)
    bench.probed(D0, 3, 2.0)
    bench.tick(2.0)
    bench.hear_detokenizer(3.0)
    bench.beat(3.0)
    assert probes(bench.tick(4.0)) == {"d0": (key(),)}
    before = bench.probe_round
    bench.core.detokenizer_moved(0, "tcp://127.0.0.1:2", 4.5)
    assert bench.probed(D0, 3, 4.5) == [], "it stands in line: what was told again may have died with the former detokenizer"
    assert retold(bench.tick(4.5)) == {"d0": ((key(), 0),)}
    assert bench.probed(D0, 3, 4.6, probe_round=before) == [] == bench.tick(4.6), "it was under way"
    for now in (5.0, 6.0):
        bench.hear_detokenizer(now)
        bench.beat(now)
    assert probes(bench.tick(6.5)) == {"d0": (key(),)}
    assert [message.key for _, message in generates(bench.probed(D0, 3, 6.6))] == [key(attempt=1)]


def test_nobody_is_asked_while_the_detokenizer_may_be_gone() -> None:
    bench = Bench(D0).serving()
    bench.hear_detokenizer(1.5)
    bench.tick(2.0)
    bench.probed(D0, 3, 2.0)
    assert retold(bench.tick(2.0)) == {"d0": ((key(), 0),)}
    bench.beat(3.0)
    for now in (4.0, 4.2):
        assert bench.tick(now) == [], "it has not been heard since"
    bench.hear_detokenizer(5.2)
    bench.tick(5.6)
    assert [message.key for _, message in generates(bench.probed(D0, 3, 5.6))] == [key(attempt=1)]


# --- probes ---------------------------------------------------------------------------------------------------------------------


BEAT = DetokenizerHeartbeat(open_answers=0, early_answers=0, dropped=0)


class ProbeBench(Bench):
    """Members and the detokenizer beat always: nobody is lost while the clock turns."""

    def __init__(self, *members: InstanceInfo) -> None:
        super().__init__(*members, config=RouterConfig(heartbeat_s=100.0, dead_after_s=1000.0))

    def ask(self, now: float) -> dict[str, tuple[AttemptId, ...]]:
        """Time passes, and the detokenizer is heard. Returns who is asked about what."""
        self.hear_detokenizer(now)
        return probes(self.tick(now))

    def round(self, now: float, *standings: tuple[InstanceInfo, int | None]) -> list[Send]:
        """A round of probes, and what the members' answers bring: each is the next token that a member emits."""
        self.ask(now)
        sends = [send for member, next_token in standings for send in self.probed(member, next_token, now)]
        return [*sends, *self.tick(now)]


@pytest.fixture
def bench() -> ProbeBench:
    """A request is on its way through p0 and d0."""
    return ProbeBench(P0, D0).serving()


def test_a_silent_attempt_is_probed_at_its_members_again_and_again(bench: ProbeBench) -> None:
    assert bench.core.next_deadline() == PROBE_S
    assert bench.ask(1.9) == {}
    for round_s in (2.0, 4.0, 6.0):
        assert bench.ask(round_s) == {"p0": (key(),), "d0": (key(),)}
        assert bench.ask(round_s + 1.9) == {}


def test_each_member_is_asked_about_all_its_attempts_at_once() -> None:
    bench = ProbeBench(P0, D0, D1).serving(spec("a", 0), spec("b", 1), spec("c", 2))
    asked = bench.ask(2.0)
    assert asked["p0"] == (key("a"), key("b"), key("c"))
    assert sorted((*asked["d0"], *asked["d1"])) == [key("a"), key("b"), key("c")]


def test_a_token_postpones_the_probe(bench: ProbeBench) -> None:
    bench.text(0, "a", now=1.5)
    assert bench.ask(2.0) == {}
    assert bench.core.next_deadline() == 3.5
    assert bench.ask(3.5) == {"p0": (key(),), "d0": (key(),)}


def test_after_the_handoff_the_prefill_instance_is_not_asked(bench: ProbeBench) -> None:
    bench.text(0, "ab", now=0.0)
    assert bench.ask(2.0) == {"d0": (key(),)}


def test_a_request_that_nobody_serves_is_not_probed(bench: ProbeBench) -> None:
    bench.leave(D0, 1.0)
    assert bench.ask(2.0) == {}
    bench.join(D1, 2.5)
    assert bench.ask(4.5) == {"d1": (key(attempt=1),)}


def test_a_request_that_ended_is_not_probed_and_leaves_no_deadline(bench: ProbeBench) -> None:
    bench.text(0, "a", Finished(reason="length"))
    assert bench.core.requests.next_deadline() is None
    assert bench.ask(2.0) == {}


def test_a_silent_request_whose_time_is_over_is_not_probed() -> None:
    bench = Bench(D0, config=RouterConfig(request_timeout_s=2.5)).serving()
    bench.report(D0, 2.0)
    assert bench.tick(2.9) == [*cancels(D0), close()]
    assert bench.core.requests.next_deadline() is None


# --- verdicts ------------------------------------------------------------------------------------------------------------


def test_an_attempt_that_no_member_knows_in_two_rounds_is_resumed(bench: ProbeBench) -> None:
    assert retold(bench.round(2.0, (P0, None), (D0, None))) == {"p0": ((key(), 0),), "d0": ((key(), 0),)}
    assert bench.round(4.0, (P0, None)) == []
    sent = bench.probed(D0, None, 4.1)
    assert sent[:3] == [*cancels(P0, D0), close()]
    assert [message.key for _, message in generates(sent)] == [key(attempt=1)]
    assert bench.observer.resumes == [ResumeReason.LOST_MESSAGES]


@pytest.mark.parametrize(
    ("so_far", "standings"),
    [("", [(D0, None), (P0, 0)]), ("", [(P0, None)]), ("abc", [(D0, 3)])],
    ids=["a member knows it", "a member does not answer, which proves nothing", "all that was sent has come"],
)
def test_an_attempt_goes_on_while_nothing_of_it_is_lost(
    bench: ProbeBench, so_far: str, standings: list[tuple[InstanceInfo, int | None]]
) -> None:
    if so_far:
        bench.text(0, so_far, now=0.0)
    assert [bench.round(round_s, *standings) for round_s in (2.0, 4.0, 6.0)] == [[]] * 3
    assert bench.observer.resumes == []


def test_an_attempt_known_only_to_a_decode_instance_that_waits_for_its_handoff_is_resumed(bench: ProbeBench) -> None:
    bench.text(0, "a", now=0.0)
    bench.round(2.0, (P0, None), (D0, 0))
    assert [message.first for _, message in generates(bench.round(4.0, (P0, None), (D0, 0)))] == [1]


def test_two_suspect_rounds_with_a_good_one_between_them_prove_nothing() -> None:
    bench = ProbeBench(D0).serving()
    for round_s, next_token in ((2.0, None), (4.0, 0), (6.0, None), (8.0, 0), (10.0, None)):
        assert list(retold(bench.round(round_s, (D0, next_token)))) == ([] if next_token == 0 else ["d0"])
    bench.ask(12.0)
    assert generates(bench.round(14.0, (D0, None))) != [], "nobody answered in the round before, so this one is the second"


def test_an_answer_of_a_round_before_the_tokens_were_asked_for_again_decides_nothing(bench: ProbeBench) -> None:
    bench.text(0, "abc", now=0.0)
    assert retold(bench.round(2.0, (D0, 5))) == {"d0": ((key(), 3),)}
    bench.ask(4.0)
    assert bench.probed(D0, 5, 4.1, probe_round=1) == [] == bench.tick(4.1)
    assert generates(bench.probed(D0, 5, 4.2)) != []


def test_an_answer_that_was_never_opened_is_opened_until_its_text_comes_and_is_not_resumed(bench: ProbeBench) -> None:
    bench.text(0, "ab", now=0.0)
    for now in (2.0, 4.0, 6.0):
        bench.ask(now)
        assert bench.probed(D0, 5, now, waits=True) == []
        assert retold(bench.tick(now)) == {"d0": ((key(), 2),)}
    bench.text(2, "cde", now=6.1)
    assert bench.round(8.1, (D0, 5)) == [] and bench.observer.resumes == []


def test_answers_that_are_later_than_the_next_round_decide_too(bench: ProbeBench) -> None:
    bench.round(2.0, (P0, None), (D0, None))
    bench.ask(4.0)
    late = bench.probe_round
    bench.ask(6.0)
    assert bench.probed(P0, None, 6.1, probe_round=late) == []
    assert generates(bench.probed(D0, None, 6.2, probe_round=late)) != []


def test_a_member_that_is_always_slower_than_the_next_round_is_judged_with_the_others(bench: ProbeBench) -> None:
    bench.round(2.0, (P0, None), (D0, None))
    for now in (4.0, 6.0):
        bench.ask(now)
        assert bench.probed(P0, None, now) == []
    assert generates(bench.probed(D0, None, 6.1, probe_round=bench.probe_round - 1)) != []


def test_answers_of_two_rounds_are_not_put_together(bench: ProbeBench) -> None:
    bench.round(2.0, (P0, None), (D0, None))
    bench.ask(4.0)
    bench.probed(D0, None, 4.1)
    bench.ask(6.0)
    assert bench.probed(P0, None, 6.1) == [], "it may have handed the request off since d0 answered"
    assert generates(bench.probed(D0, None, 6.2)) != []


def test_what_one_member_says_does_not_decide_while_the_first_token_of_the_other_is_on_its_way(bench: ProbeBench) -> None:
    assert retold(bench.round(2.0, (D0, 5))) == {"p0": ((key(), 0),), "d0": ((key(), 0),)}
    assert bench.round(4.0, (D0, 5)) == []
    bench.text(0, "abcde", now=4.1)
    assert bench.round(6.1, (D0, 5)) == [] and bench.observer.resumes == []


def test_tokens_that_were_sent_and_do_not_come_between_two_rounds_were_lost(bench: ProbeBench) -> None:
    bench.text(0, "abc", now=0.0)
    sent = bench.round(2.0, (D0, 5))
    assert retold(sent) == {"d0": ((key(), 3),)} and [message.text for message in announced(sent)] == ["abc"]
    assert [(message.first, message.key) for _, message in generates(bench.round(4.0, (D0, 8)))] == [(3, key(attempt=1))]
    assert bench.observer.resumes == [ResumeReason.LOST_MESSAGES]


def test_tokens_that_come_between_two_rounds_were_only_on_their_way(bench: ProbeBench) -> None:
    bench.text(0, "abc", now=0.0)
    bench.round(2.0, (D0, 5))
    bench.text(3, "d", now=2.2)
    assert retold(bench.round(4.2, (D0, 8))) == {"d0": ((key(), 4),)}
    assert generates(bench.round(6.2, (D0, 8))) != []


def test_an_answer_to_a_probe_does_not_end_an_attempt_whose_token_came_after_the_probe(bench: ProbeBench) -> None:
    bench.text(0, "abc", now=0.0)
    bench.round(2.0, (D0, 5))
    bench.ask(4.0)
    bench.text(3, "d", now=4.05)
    assert bench.probed(D0, 8, 4.1) == []


def test_a_lost_first_token_comes_to_light_while_the_decode_instance_knows_nothing_yet(bench: ProbeBench) -> None:
    bench.round(2.0, (D0, None), (P0, 1))
    assert route(bench.round(4.0, (D0, None), (P0, 1))) == ("d0", None), "not through p0 again"


@pytest.mark.parametrize(
    "standing",
    [
        Probed(round=1, id=D0.id, incarnation=Incarnation("2"), standings=(Standing(key(), None),)),
        Probed(round=1, id=D1.id, incarnation=D1.incarnation, standings=(Standing(key(), None),)),
        Probed(round=1, id=D0.id, incarnation=D0.incarnation, standings=(Standing(key(attempt=1), None),)),
        Probed(round=1, id=D0.id, incarnation=D0.incarnation, standings=(Standing(key("other"), None),)),
    ],
    ids=["another incarnation", "another instance", "another attempt", "another request"],
)
def test_answers_from_or_about_others_are_dropped_and_counted(standing: Probed) -> None:
    bench = ProbeBench(D0).serving()
    for round_s in (2.0, 4.0, 6.0):
        bench.ask(round_s)
        assert bench.core.receive(standing, round_s) == []
    assert bench.core.requests.retelling.stale_standings == 3


def test_one_answer_about_many_attempts_resumes_those_that_were_lost() -> None:
    bench = ProbeBench(D0).serving(spec("a", 0), spec("b", 1), spec("c", 2))
    for round_s in (2.0, 4.0):
        bench.ask(round_s)
        standings = (Standing(key("a"), 0), Standing(key("b"), None), Standing(key("c"), 7))
        answer = Probed(id=D0.id, incarnation=D0.incarnation, standings=standings, round=bench.probe_round)
        sent = bench.core.receive(answer, round_s)
        if round_s == 2.0:
            assert retold(bench.tick(2.0)) == {"d0": ((key("b"), 0), (key("c"), 0))}
    assert [message.key for _, message in generates(sent)] == [key("b", 1), key("c", 1)]


# --- while the detokenizer is silent ---------------------------------------------------------------------------------------


def test_while_the_detokenizer_is_silent_missing_tokens_are_not_probed() -> None:
    bench = Bench(D0, config=RouterConfig(heartbeat_s=1.0, dead_after_s=3.0)).serving()
    bench.hear_detokenizer(1.0)
    assert probes(bench.tick(2.0)) == {"d0": (key(),)}
    assert bench.probed(D0, 4, 2.0) == [], "four tokens were sent"
    bench.beat(2.0)
    assert bench.core.unhealthy() == []
    assert probes(bench.tick(4.0)) == {}
    assert bench.core.unhealthy() != []
    for now in (5.0, 7.0, 9.0):
        bench.beat(now)
        assert probes(bench.tick(now)) == {}


def test_when_the_detokenizer_is_heard_again_every_open_attempt_is_probed_at_once_and_judged_anew() -> None:
    bench = Bench(D0, config=RouterConfig(heartbeat_s=1.0, dead_after_s=3.0)).serving(spec("a", 0), spec("b", 1))
    bench.hear_detokenizer(1.0)
    bench.tick(2.0)
    bench.probed(D0, 4, 2.0, name="a")
    assert retold(bench.tick(2.0)) == {"d0": ((key("a"), 0),)}
    bench.beat(2.0)
    bench.tick(4.0)
    bench.beat(4.0)
    assert probes(bench.hear_detokenizer(4.5)) == {"d0": (key("a"), key("b"))}
    assert bench.core.unhealthy() == []
    assert generates(bench.probed(D0, 8, 4.5, name="a")) == [], "what was sent is on its way only now"
    assert retold(bench.tick(4.5)) == {"d0": ((key("a"), 0),)}, "or was lost meanwhile"
    assert probes(bench.hear_detokenizer(5.5)) == {}
    assert probes(bench.tick(6.5)) == {"d0": (key("b"), key("a"))}
    assert [message.key for _, message in generates(bench.probed(D0, 8, 6.5, name="a"))] == [key("a", 1)]
    bench.core.requests.cancel([RequestId("a"), RequestId("b")], 7.0)
    assert bench.core.requests.next_deadline() is None


def test_a_detokenizer_has_three_seconds_from_when_it_is_heard_however_soon_instances_are_taken_for_dead() -> None:
    bench = Bench(D0, config=RouterConfig(heartbeat_s=0.1, dead_after_s=0.5))
    bench.tick(100.0)
    assert bench.core.unhealthy() == [], "it was never heard"
    bench.hear_detokenizer(100.0)
    bench.tick(102.9)
    assert bench.core.unhealthy() == []
    bench.tick(103.0)
    assert bench.core.unhealthy() != []
    bench.core.detokenizer_moved(0, "tcp://detokenizer:2", 105.0)
    assert bench.core.unhealthy() == [], "a new one"


# --- a router that was held up itself ----------------------------------------------------------------------------------------


def test_a_router_that_was_held_up_does_not_count_its_own_absence_as_the_silence_of_others() -> None:
    bench = Bench(P0, D0).serving()
    bench.hear_detokenizer(0.0)
    assert generates(bench.tick(13.0)) == []
    assert [member.info.id for member in bench.core.fleet.members()] == ["p0", "d0"] and bench.core.unhealthy() == []
    bench.report(D0, 13.5)
    bench.tick(14.0)
    assert [member.info.id for member in bench.core.fleet.members()] == ["d0"], "who is not heard then is dead"
    bench.tick(16.0)
    assert bench.core.unhealthy() != []
