"""What a client has not read is bounded in memory, and nothing of it is lost.

What waited for a slow reader is sent as one piece for each choice, and large answers are written on a thread.
"""

import gc
import threading
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from common.messages import Finished, TokenLogprob
from common.sampling_params import MAX_PROMPT_LOGPROBS
from common.text.embedding import EmbeddingMode
from router import requests
from router.api import sending
from router.api.answers import AnswerShape
from router.api.chat import ChatShape
from router.api.embeddings import EmbeddingShape
from router.api.messages import MessageShape
from router.api.responses import ResponseShape
from router.requests import UNREAD_LIMIT_CHARS, ChoiceDelta, ClientRequest, joined
from tests.router.calls import chat, message, post
from tests.router.fakes import MODEL, Site


@pytest.mark.parametrize(("alternatives", "times"), [(None, 2), (20, 10)], ids=["words", "tokens with logprobs"])
def test_what_an_outbox_holds_at_its_limit_is_bounded_by_what_it_counts(alternatives: int | None, times: int) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        outbox, number = ClientRequest(limit_chars=100_000), 1000
        while outbox.unread_chars <= outbox.limit_chars:
            number += 1
            if alternatives is None:
                outbox.put(ChoiceDelta(number % 2, f"w{number}", (number,)))
                continue
            top = tuple((number + place, -0.5 * place - number) for place in range(alternatives))
            outbox.put(ChoiceDelta(0, "w", (number,), None, (TokenLogprob(number, -0.5 * number, 1, top),)))
        assert (number - 1000) * (UNREAD_LIMIT_CHARS / outbox.limit_chars) > 2_500, "thousands of tokens may be unread"
        assert tracemalloc.get_traced_memory()[0] <= times * outbox.limit_chars
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


def test_pieces_of_each_choice_become_one_with_the_last_ones_ending() -> None:
    done = Finished(reason="length")
    one, two, three, of_prompt = (TokenLogprob(number, -1.0, 1) for number in (1, 2, 3, 9))
    pieces = [
        ChoiceDelta(0, "a", (1,), None, (one,), (of_prompt,)),
        ChoiceDelta(1, "x", (7,)),
        ChoiceDelta(0, "", (2, 3), None, (two, three)),
        ChoiceDelta(0, "c", (), done),
    ]
    first = ChoiceDelta(0, "ac", (1, 2, 3), done, (one, two, three), (of_prompt,))
    assert joined(pieces) == [first, ChoiceDelta(1, "x", (7,))]


def test_joining_builds_no_text_on_the_way_however_many_pieces_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that is joined to what came before copies all of it: 27,000 pieces would stop the loop for seconds."""
    built: list[ChoiceDelta] = []

    def build(*parts: Any) -> ChoiceDelta:
        built.append(ChoiceDelta(*parts))
        return built[-1]

    pieces = [ChoiceDelta(number % 2, " word", (number,)) for number in range(1_000)]
    monkeypatch.setattr(requests, "ChoiceDelta", build)
    assert joined(pieces) == built and len(built) == 2
    assert built[1].token_ids == tuple(range(1, 1_000, 2)) and built[1].text == " word" * 500


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "shape", "body", "size"),
    [
        ("chat/completions", ChatShape, chat(n=2), 10),
        ("chat/completions", ChatShape, chat(n=2, logprobs=True, top_logprobs=2), 10 + 300),
        ("responses", ResponseShape, {"model": MODEL, "input": "hello", "max_output_tokens": 5}, 5),
        ("messages", MessageShape, message(), 5),
        ("embeddings", EmbeddingShape, {"input": ["hello", "you"]}, 4),
    ],
)
async def test_an_answer_with_much_to_write_is_written_on_a_thread(
    path: str, shape: type[AnswerShape[Any]], body: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    write = shape.whole

    def watched(self: AnswerShape[Any], choices: Sequence[ChoiceDelta]) -> bytes:
        threads.append(threading.current_thread())
        return write(self, choices)

    monkeypatch.setattr(shape, "whole", watched)
    async with Site(embedding=EmbeddingMode("last", normalize=False, size=2)) as site:
        for most in (size, size - 1):
            monkeypatch.setattr(sending, "LOOP_SIZE", most)
            assert (await post(site, f"/v1/{path}", body)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
