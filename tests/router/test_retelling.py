"""Telling again at the router's core: what a detokenizer lost is opened again and sent again, and no attempt is used up."""

from collections.abc import Iterable

import pytest

from common.ids import RequestId, pack_ids
from common.instance.ports import Send
from common.messages import Finished
from router import retelling
from router.requests import RequestSpec
from router.retelling import ANSWER_TOKENS, TOKENS_PER_S, TURN_TOKENS
from router.timelines import ResumeReason
from tests.builders import key
from tests.router.bench import D0, D1, P0, PROMPT, Bench, announced, cancels, close, generates, probes, retold, spec

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
