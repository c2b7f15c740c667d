"""The order of an answer's tokens."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.messages import Ending, Failed, Finished, TokenLogprob
from common.text.detokenizer import TokenOrder

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
        ready = order.take()
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
            taken += order.take()
            reported += order.take_logprobs()
    assert reported == list(logprobs_of(taken))
    begins = data.draw(st.integers(0, order.next))
    other = TokenOrder(begins, has_logprobs=True)
    order.pour_into(other)
    for first, token_ids, ending in pieces:
        other.put(first, token_ids, ending, logprobs_of(token_ids))
    assert (other.take(), other.take_logprobs()) == (list(TOKENS[begins:]), list(logprobs_of(TOKENS[begins:])))


@given(arrivals())
def test_every_token_that_arrives_is_taken_or_dropped(pieces: list[Piece]) -> None:
    order = TokenOrder()
    dropped = sum(order.put(*piece) for piece in pieces)
    assert dropped + len(order.take()) == sum(len(token_ids) for _, token_ids, _ in pieces)
    assert order.waiting_tokens == 0


def test_tokens_after_a_gap_wait_for_it_to_close() -> None:
    order = TokenOrder()
    order.put(2, (12, 13), END)
    assert (order.take(), order.has_gap, order.waiting_tokens) == ([], True, 2)
    order.put(0, (10,), None)
    assert (order.take(), order.has_gap, order.ending) == ([10], True, None)
    order.put(1, (11,), None)
    assert (order.take(), order.has_gap, order.ending) == ([11, 12, 13], False, END)


def test_an_ending_without_tokens_waits_for_those_before_it() -> None:
    order = TokenOrder()
    order.put(1, (), END)
    assert (order.ending, order.announced_ending, order.has_gap) == (None, END, True)
    order.put(0, (10,), None)
    assert order.ending == END


def test_the_first_ending_that_comes_counts() -> None:
    order = TokenOrder()
    order.put(0, (10,), END)
    order.put(0, (10,), Failed("late"))
    assert order.ending == END


def test_tokens_after_the_ending_are_dropped() -> None:
    order = TokenOrder()
    order.put(1, (), END)
    assert order.put(0, (10, 11, 12), None) == 2
    assert order.take() == [10]


def test_an_ending_before_tokens_that_were_taken_ends_the_answer_at_once() -> None:
    order = TokenOrder()
    order.put(0, (10, 11), None)
    order.put(1, (), Failed("gone"))
    assert order.ending == Failed("gone")


def test_the_order_begins_at_the_given_number() -> None:
    order = TokenOrder(first=5)
    assert order.put(3, (13, 14, 15), None) == 2
    assert order.take() == [15]
