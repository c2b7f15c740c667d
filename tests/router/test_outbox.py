"""What a client has not read is bounded in memory, and nothing of it is lost."""

import gc
import tracemalloc

from common.messages import Finished, TokenLogprob
from common.sampling_params import MAX_PROMPT_LOGPROBS
from router.outbox import UNREAD_LIMIT_CHARS, ChoiceDelta, ClientRequest


def test_an_outbox_at_its_limit_holds_no_more_than_twice_the_bytes_that_it_counts() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        outbox, number = ClientRequest(limit_chars=300_000), 1000
        while outbox.unread_chars <= outbox.limit_chars:
            number += 1
            outbox.put(ChoiceDelta(number % 2, f"w{number}", (number,)))
        assert tracemalloc.get_traced_memory()[0] <= 2 * outbox.limit_chars
    finally:
        tracemalloc.stop()


def test_thousands_of_tokens_with_logprobs_may_be_unread_and_the_memory_that_they_hold_is_bounded() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        outbox, number = ClientRequest(limit_chars=300_000), 1000
        while outbox.unread_chars <= outbox.limit_chars:
            number += 1
            top = tuple((number + place, -0.5 * place - number) for place in range(20))
            outbox.put(ChoiceDelta(0, "w", (number,), None, (TokenLogprob(number, -0.5 * number, 1, top),)))
        assert (number - 1000) * (UNREAD_LIMIT_CHARS / outbox.limit_chars) > 2_500
        assert tracemalloc.get_traced_memory()[0] <= 10 * outbox.limit_chars
    finally:
        tracemalloc.stop()


def test_logprobs_of_the_prompt_come_at_once_and_are_not_too_much() -> None:
    outbox = ClientRequest()
    outbox.put(ChoiceDelta(0, "w", (1,), None, (), (TokenLogprob(1, -1.0, 1),) * MAX_PROMPT_LOGPROBS))
    assert outbox.unread_chars < outbox.limit_chars


def test_each_choice_has_the_same_text_tokens_and_ending_however_many_deltas_were_unread() -> None:
    outbox, choices, each = ClientRequest(), 300, 5
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
