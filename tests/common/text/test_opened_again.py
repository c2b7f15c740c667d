"""Answers that are opened again, in a new detokenizer or in the one that has them: the text goes on exactly."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import pytest

from common.ids import pack_ids
from common.messages import Ending, ExpectAnswer, Failed, Finished, TextDelta, TokenBatch, TokenDelta
from common.text.detokenizer import Detokenizer, DetokenizerLimits
from tests.builders import key
from tests.common.text.tiny import tiny_tokenizer

CONTEXT = tiny_tokenizer().encode("日本 is").ids
TEXT = "one 日本 🙂🙂 STOP two 🤖"
LENGTH = Finished("length")
STOPS = ((), ("STOP two",), ("STOX", "🙂 STOP!"), ("two 🤖🤖",))


def ids_of(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer().encode(text).ids
    return ids


IDS = ids_of(TEXT)


def expect(stop: tuple[str, ...], so_far: Sequence[int] = (), text: str = "") -> ExpectAnswer:
    return ExpectAnswer(key=key(), stop=stop, first=len(so_far), context=pack_ids([*CONTEXT, *so_far]), text=text)


def told(first: int, token_ids: Sequence[int], ending: Ending | None = None) -> TokenBatch:
    return TokenBatch(deltas=(TokenDelta(key(), first, tuple(token_ids), ending),))


def one_by_one(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[TextDelta]:
    return [delta for number, id in enumerate(token_ids) for delta in detokenizer.receive(told(number, [id]), 0.0)]


def undisturbed(stop: tuple[str, ...]) -> tuple[str, Ending | None, int]:
    """The whole text, its ending, and how many tokens it has."""
    detokenizer = Detokenizer(tiny_tokenizer())
    detokenizer.receive(expect(stop), 0.0)
    deltas = [*one_by_one(detokenizer, IDS), *detokenizer.receive(told(len(IDS), (), LENGTH), 0.0)]
    return "".join(delta.text for delta in deltas), deltas[-1].ending, sum(len(delta.token_ids) for delta in deltas)


@pytest.mark.parametrize("stop", STOPS)
def test_an_answer_that_a_new_detokenizer_is_told_goes_on_as_if_nothing_had_happened(stop: tuple[str, ...]) -> None:
    text, ending, used = undisturbed(stop)
    former = Detokenizer(tiny_tokenizer())
    former.receive(expect(stop), 0.0)
    delivered = ["", *accumulate(delta.text for delta in one_by_one(former, IDS))]
    assert any(part != tiny_tokenizer().decode(IDS[:cut]) for cut, part in enumerate(delivered[:used])), (
        "some of it was held back"
    )
    for cut, part in enumerate(delivered[:used]):
        detokenizer = Detokenizer(tiny_tokenizer())
        early = min(cut + 3, len(IDS))
        detokenizer.receive(told(early, IDS[early:], LENGTH), 0.0)  # tokens go on before the answer is opened
        detokenizer.receive(expect(stop, IDS[:cut], part), 0.0)
        (delta,) = detokenizer.receive(told(cut, IDS[cut:], LENGTH), 0.0)
        assert (delta.first, part + delta.text, delta.ending) == (cut, text, ending)
        assert len(delta.token_ids) == used - cut and detokenizer.open_answers == 0


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("has_gap", [False, True])
def test_text_that_was_lost_on_its_way_is_made_again(stop: tuple[str, ...], has_gap: bool) -> None:
    """The detokenizer has gone on by up to five tokens while the router did not hear of it."""
    text, ending, used = undisturbed(stop)
    for cut in range(used - 6):
        detokenizer = Detokenizer(tiny_tokenizer())
        detokenizer.receive(expect(stop), 0.0)
        part = "".join(delta.text for delta in one_by_one(detokenizer, IDS[:cut]))
        ahead = cut + cut % 6
        detokenizer.receive(told(cut, IDS[cut:ahead]), 0.0)
        if has_gap:
            assert detokenizer.receive(told(ahead + 1, IDS[ahead + 1 :], LENGTH), 0.0) == []
        again = detokenizer.receive(expect(stop, IDS[:cut], part), 0.0)
        assert [(delta.first, len(delta.token_ids)) for delta in again] == ([(cut, ahead - cut)] if ahead > cut else [])
        rest = told(ahead, IDS[ahead : ahead + 1]) if has_gap else told(ahead, IDS[ahead:], LENGTH)
        deltas = [*again, *detokenizer.receive(rest, 0.0)]
        assert (part + "".join(delta.text for delta in deltas), deltas[-1].ending) == (text, ending)
        assert (detokenizer.open_answers, detokenizer.next_deadline()) == (0, None)


def test_opening_an_answer_again_needs_no_further_place_and_changes_nothing_where_nothing_is_lost() -> None:
    detokenizer = Detokenizer(tiny_tokenizer(), DetokenizerLimits(open_answers=1))
    detokenizer.receive(expect(()), 0.0)
    one_by_one(detokenizer, IDS[:4])
    text = tiny_tokenizer().decode(IDS[:3])
    assert len(detokenizer.receive(expect((), IDS[:3], text), 0.0)) == 1
    assert detokenizer.receive(expect((), IDS[:4], tiny_tokenizer().decode(IDS[:4])), 0.0) == []
    assert detokenizer.dropped == {"opened again": 1}


def test_an_answer_whose_ending_was_lost_is_told_once_more() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    detokenizer.receive(expect(()), 0.0)
    detokenizer.receive(told(0, IDS, LENGTH), 0.0)
    again = msgspec.structs.replace(expect((), IDS[:4], tiny_tokenizer().decode(IDS[:4])), again=True)
    assert detokenizer.receive(again, 0.0) == []
    (delta,) = detokenizer.receive(told(4, IDS[4:], LENGTH), 0.0)
    assert (delta.first, delta.ending, detokenizer.open_answers) == (4, LENGTH, 0)
    assert again.text + delta.text == TEXT


def test_an_answer_that_is_over_stays_over_when_its_first_word_comes_again() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    detokenizer.receive(expect(()), 0.0)
    detokenizer.receive(told(1, IDS[1:3]), 0.0)
    (broken_off,) = detokenizer.tick(10.0)
    assert isinstance(broken_off.ending, Failed) and broken_off.ending.retryable
    assert detokenizer.receive(expect(()), 10.0) == detokenizer.receive(told(0, IDS), 10.0) == []
