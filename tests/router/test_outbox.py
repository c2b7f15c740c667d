"""What a client has not read is bounded in memory, and nothing of it is lost."""

import gc
import tracemalloc

import pytest

from common.messages import Finished, TokenLogprob
from router.outbox import UNREAD_LIMIT_LOGPROBS, ChoiceDelta, Outbox


def test_an_outbox_at_its_limit_holds_no_more_than_twice_the_bytes_that_it_counts() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        outbox, number = Outbox(lambda: None, limit_chars=300_000), 1000
        while outbox.unread_chars <= outbox.limit_chars:
            number += 1
            outbox.put(ChoiceDelta(number % 2, f"w{number}", (number,)))
        assert tracemalloc.get_traced_memory()[0] <= 2 * outbox.limit_chars
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("alternatives", [0, 20])
def test_unread_logprobs_are_bounded_in_memory_and_by_their_number(alternatives: int) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        outbox, number = Outbox(lambda: None), 1000
        while not outbox.is_over_limit:
            number += 1
            top = tuple((number + place, -0.5 * place - number) for place in range(alternatives))
            outbox.put(ChoiceDelta(0, "w", (number,), None, (TokenLogprob(number, -0.5 * number, 1, top),)))
        if alternatives:
            assert UNREAD_LIMIT_LOGPROBS < (number - 1000) * (1 + alternatives) <= UNREAD_LIMIT_LOGPROBS + 1 + alternatives
        assert tracemalloc.get_traced_memory()[0] <= 160 * UNREAD_LIMIT_LOGPROBS
    finally:
        tracemalloc.stop()
    outbox.take()
    assert not outbox.is_over_limit


def test_logprobs_of_the_prompt_come_at_once_and_are_not_too_much() -> None:
    outbox = Outbox(lambda: None)
    outbox.put(ChoiceDelta(0, "w", (1,), None, (), (TokenLogprob(1, -1.0, 1),) * (2 * UNREAD_LIMIT_LOGPROBS)))
    assert not outbox.is_over_limit


def test_each_choice_has_the_same_text_tokens_and_ending_however_many_deltas_were_unread() -> None:
    outbox, choices, each = Outbox(lambda: None), 300, 5
    for number in range(each):
        for index in range(choices):
            ending = Finished(reason="length") if number == each - 1 else None
            outbox.put(ChoiceDelta(index, f"{index}.{number} ", (index, number), ending))
    taken = outbox.take()
    for index in range(choices):
        own = [delta for delta in taken if delta.index == index]
        assert "".join(delta.text for delta in own) == "".join(f"{index}.{number} " for number in range(each))
        assert [one for delta in own for one in delta.token_ids] == [one for number in range(each) for one in (index, number)]
        assert [delta.ending for delta in own] == [None] * (len(own) - 1) + [Finished(reason="length")]
    assert outbox.take() == []
    assert outbox.unread_chars == 0
