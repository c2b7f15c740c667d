"""The order of an answer's tokens, the log probability that travels with each of them, and stop strings.

Stop strings are compared with a search in the whole text. What is told of the prompt comes once, with token 0.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import pack_ids
from common.messages import (
    AnswerMessage,
    Ending,
    ExpectAnswer,
    Failed,
    Finished,
    TextDelta,
    TokenBatch,
    TokenDelta,
    TokenLogprob,
    TokenLogprobs,
)
from common.text.detokenizer import Detokenizer, DetokenizerLimits, TokenOrder
from common.text.stops import StopStrings
from tests.builders import key
from tests.common.text.tiny import tiny_tokenizer

Piece = tuple[int, tuple[int, ...], Ending | None]
TOKENS = tuple(range(100, 120))
END = Finished("length")


@st.composite
def arrivals(draw: st.DrawFn) -> list[Piece]:
    """Pieces of TOKENS that cover it, cut anywhere, overlapping, repeated, in any order; the ending with the last token."""
    cuts = sorted({0, len(TOKENS), *draw(st.lists(st.integers(0, len(TOKENS)), max_size=8))})
    ranges = list(pairwise(cuts))
    more = draw(st.lists(st.tuples(st.integers(0, len(TOKENS)), st.integers(0, len(TOKENS))), max_size=6))
    ranges += [(min(pair), max(pair)) for pair in more]
    pieces: list[Piece] = [(first, TOKENS[first:end], END if end == len(TOKENS) else None) for first, end in ranges]
    return draw(st.permutations(pieces + draw(st.lists(st.sampled_from(pieces), max_size=4))))


def logprobs_of(token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id, -0.5 * token_id, 1, ((token_id, -0.5),)) for token_id in token_ids)


def put_all(order: TokenOrder, pieces: Sequence[Piece]) -> list[int]:
    taken: list[int] = []
    for piece in pieces:
        order.put(*piece)
        ready, _ = order.take()
        assert order.next == len(taken) + len(ready)
        taken += ready
        assert (order.ending is None) == (len(taken) < len(TOKENS))
    return taken


@given(arrivals())
def test_each_token_is_taken_once_and_in_order_however_tokens_arrive(pieces: list[Piece]) -> None:
    order = TokenOrder()
    assert put_all(order, pieces) == list(TOKENS)
    assert order.ending == END


@given(arrivals(), st.data())
def test_each_token_takes_its_logprob_with_it_also_into_another_order(pieces: list[Piece], data: st.DataObject) -> None:
    order, taken, reported = TokenOrder(has_logprobs=True), list[int](), list[TokenLogprob]()
    for first, token_ids, ending in pieces[: data.draw(st.integers(0, len(pieces)))]:
        order.put(first, token_ids, ending, logprobs_of(token_ids))
        if data.draw(st.booleans()):
            ready, logprobs = order.take()
            taken += ready
            reported += logprobs
    assert reported == list(logprobs_of(taken))
    begins = data.draw(st.integers(0, order.next))
    other = TokenOrder(begins, has_logprobs=True)
    order.pour_into(other)
    for first, token_ids, ending in pieces:
        other.put(first, token_ids, ending, logprobs_of(token_ids))
    assert other.take() == (list(TOKENS[begins:]), list(logprobs_of(TOKENS[begins:])))


@given(arrivals())
def test_every_token_that_arrives_is_taken_or_dropped(pieces: list[Piece]) -> None:
    order = TokenOrder()
    dropped = sum(order.put(*piece) for piece in pieces)
    assert dropped + len(order.take()[0]) == sum(len(token_ids) for _, token_ids, _ in pieces)
    assert order.waiting_tokens == 0


Seen = tuple[list[int], Ending | None, bool, int]
"""What is taken, the ending, whether there is a gap, and how many tokens wait."""


@pytest.mark.parametrize(
    "course",
    [
        [
            ((2, (12, 13), END), ([], None, True, 2)),
            ((0, (10,), None), ([10], None, True, 2)),
            ((1, (11,), None), ([11, 12, 13], END, False, 0)),
        ],
        [((1, (), END), ([], None, True, 0)), ((0, (10,), None), ([10], END, False, 0))],
        [((0, (10,), END), ([10], END, False, 0)), ((0, (10,), Failed("late")), ([], END, False, 0))],
        [((1, (), END), ([], None, True, 0)), ((0, (10, 11, 12), None), ([10], END, False, 0))],
        [((0, (10, 11), None), ([10, 11], None, False, 0)), ((1, (), Failed("gone")), ([], Failed("gone"), False, 0))],
    ],
    ids=[
        "tokens after a gap wait for it to close",
        "an ending without tokens waits for those before it",
        "the first ending that comes counts",
        "tokens after the ending are dropped",
        "an ending before tokens that were taken ends the answer at once",
    ],
)
def test_tokens_and_endings_take_their_turns(course: list[tuple[Piece, Seen]]) -> None:
    order = TokenOrder()
    for piece, seen in course:
        order.put(*piece)
        assert (order.take()[0], order.ending, order.has_gap, order.waiting_tokens) == seen
        assert order.announced_ending is not None or seen[1] is None


def test_the_order_begins_at_the_given_number() -> None:
    order = TokenOrder(first=5)
    assert order.put(3, (13, 14, 15), None) == 2
    assert order.take()[0] == [15]


IDS: list[int] = tiny_tokenizer().encode("one 日本 🙂🙂 STOP two 🤖").ids
PROMPT = (TokenLogprob(7, -0.25, 2), TokenLogprob(8, -0.5, 1))
CACHED_TOKENS = 32
LENGTH = Finished("length")
EXPECTED = ExpectAnswer(key=key(), logprobs=True)


def of(token_ids: list[int]) -> TokenLogprobs:
    return tuple(TokenLogprob(token_id, -0.5 * place, 1) for place, token_id in enumerate(token_ids))


ALL = of(IDS)


def told(first: int, end: int, ending: Finished | Failed | None = None) -> TokenBatch:
    """As an instance tells these tokens."""
    of_prompt, drafts = (PROMPT, CACHED_TOKENS) if first == 0 else ((), 0), (end - first, end - first - 1)
    delta = TokenDelta(key(), first, tuple(IDS[first:end]), ending, ALL[first:end], *of_prompt)
    return TokenBatch(deltas=(msgspec.structs.replace(delta, drafts=drafts),))


def reported(deltas: list[TextDelta]) -> tuple[TokenLogprobs, list[TokenLogprobs]]:
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert all(delta.cached_tokens == (CACHED_TOKENS if delta.prompt_logprobs else 0) for delta in deltas)
    return tuple(one for delta in deltas for one in delta.logprobs), [delta.prompt_logprobs for delta in deltas]


@pytest.fixture
def detokenizer() -> Detokenizer:
    return Detokenizer(tiny_tokenizer())


def test_tokens_that_come_early_twice_and_out_of_order_have_each_their_own_logprob(detokenizer: Detokenizer) -> None:
    messages: list[AnswerMessage] = [
        told(4, 9),
        EXPECTED,
        told(9, 12),
        told(0, 2),
        told(0, 3),
        told(4, 6),
        told(2, 5),
        told(12, len(IDS), LENGTH),
    ]
    deltas = [delta for message in messages for delta in detokenizer.receive(message, 0.0)]
    assert reported(deltas) == (ALL, [PROMPT, *[()] * (len(deltas) - 1)])
    assert deltas[-1].ending == LENGTH


def test_drafts_of_tokens_that_come_twice_count_once(detokenizer: Detokenizer) -> None:
    messages: list[AnswerMessage] = [EXPECTED, told(3, 7), told(0, 3), told(3, 7), told(7, len(IDS), LENGTH)]
    deltas = [delta for message in messages for delta in detokenizer.receive(message, 0.0)]
    assert [sum(delta.drafts[at] for delta in deltas) for at in (0, 1)] == [len(IDS), len(IDS) - 3]


def test_a_stop_string_cuts_the_logprobs_where_it_cuts_the_tokens(detokenizer: Detokenizer) -> None:
    detokenizer.receive(msgspec.structs.replace(EXPECTED, stop=("STOP",)), 0.0)
    (delta,) = detokenizer.receive(told(0, len(IDS), LENGTH), 0.0)
    assert delta.ending == Finished("stop", "STOP") and 0 < len(delta.token_ids) < len(IDS)
    assert reported([delta]) == (ALL[: len(delta.token_ids)], [PROMPT])


@pytest.mark.parametrize("cut", [0, 1, 5])
@pytest.mark.parametrize("is_known", [False, True], ids=["by another detokenizer", "by the one that has it"])
def test_what_was_lost_comes_again_with_its_logprobs(detokenizer: Detokenizer, cut: int, is_known: bool) -> None:
    text = tiny_tokenizer().decode(IDS[:cut]).rstrip("\ufffd")
    again = msgspec.structs.replace(EXPECTED, first=cut, context=pack_ids(IDS[:cut]), text=text, again=True)
    former: list[AnswerMessage] = [EXPECTED, told(0, 5), told(5, 7), told(8, 10)]
    for message in former if is_known else ():
        detokenizer.receive(message, 0.0)
    messages: list[AnswerMessage] = [again, told(0, 8), told(7, len(IDS), LENGTH)]
    deltas = [delta for message in messages for delta in detokenizer.receive(message, 0.0)]
    prompts = [PROMPT if cut == 0 else (), *[()] * (len(deltas) - 1)]
    assert deltas[0].first == cut and reported(deltas) == (ALL[cut:], prompts)


@pytest.mark.parametrize("count", [0, 2])
def test_a_delta_with_another_number_of_logprobs_is_dropped_and_its_tokens_are_missing(
    detokenizer: Detokenizer, count: int
) -> None:
    detokenizer.receive(EXPECTED, 0.0)
    bad = TokenBatch(deltas=(TokenDelta(key(), 0, tuple(IDS[:3]), None, ALL[:count]),))
    assert detokenizer.receive(bad, 0.0) == []
    assert detokenizer.receive(told(3, 5), 0.0) == []
    assert detokenizer.dropped == {"malformed": 1}
    (broken_off,) = detokenizer.tick(DetokenizerLimits().patience_s)
    assert isinstance(broken_off.ending, Failed) and broken_off.ending.retryable
    assert (broken_off.token_ids, broken_off.logprobs) == ((), ())


def test_an_answer_whose_client_did_not_ask_has_none(detokenizer: Detokenizer) -> None:
    detokenizer.receive(msgspec.structs.replace(EXPECTED, logprobs=False), 0.0)
    (delta,) = detokenizer.receive(TokenBatch(deltas=(TokenDelta(key(), 0, tuple(IDS[:3]), None, ALL[:3]),)), 0.0)
    assert (delta.token_ids, delta.logprobs, delta.prompt_logprobs) == (tuple(IDS[:3]), (), ())


LETTERS = st.text(alphabet="ab\n🙂", max_size=24)


def search_in_whole_text(text: str, stops: Sequence[str], included: bool = False, ignored: int = 0) -> tuple[str, str | None]:
    """Text before the end, and the stop string: the first one that is complete, and of several at once the longest. included:
    with that string. ignored: what is complete within so many characters ends nothing."""
    for end in range(ignored + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if included else end - len(stop)], stop
    return text, None


def pushed(pieces: Sequence[str], stops: Sequence[str], included: bool = False, ignored: int = 0) -> tuple[str, str | None]:
    """ignored: so many pieces do not end the text."""
    finder = StopStrings(stops, included)
    text = ""
    for number, piece in enumerate(pieces):
        text += finder.push(piece, number >= ignored)
        if finder.matched is not None:
            return text, finder.matched
    return text + finder.flush(), None


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=4))
def test_the_text_ends_where_a_search_in_the_whole_text_ends_it(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    expected = search_in_whole_text(whole, stops)
    assert pushed(list(whole), stops) == expected
    # A piece may bring more than the first end: the earliest one must win inside it too.
    assert pushed(pieces, stops) == expected
    assert pushed([whole], stops) == expected


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=4), st.booleans(), st.integers(0, 8))
def test_stop_strings_may_stay_in_the_text_and_may_be_ignored_at_its_beginning(
    pieces: list[str], stops: list[str], included: bool, ignored: int
) -> None:
    whole = "".join(pieces)
    expected = search_in_whole_text(whole, stops, included, len("".join(pieces[:ignored])))
    assert pushed(pieces, stops, included, ignored) == expected


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=4))
def test_nothing_is_held_back_when_the_stop_string_stays(pieces: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops, included=True)
    for piece in pieces:
        shown = finder.push(piece)
        if finder.matched is not None:
            return
        assert shown == piece


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=4))
def test_text_is_held_back_only_while_it_could_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops)
    so_far, shown = "", ""
    for piece in pieces:
        so_far += piece
        shown += finder.push(piece)
        if finder.matched is not None:
            return
        held = so_far.removeprefix(shown)
        assert shown + held == so_far
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
