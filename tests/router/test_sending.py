"""What waited for a slow reader is sent as one piece for each choice, and large answers are written on a thread."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from common.messages import Ending, Finished, TokenLogprob, TokenLogprobs
from common.text.embedding import EmbeddingMode
from router import outbox
from router.api import sending
from router.api.answers import AnswerShape, WholeChoice
from router.api.chat import ChatShape
from router.api.embeddings import EmbeddingShape
from router.api.responses import ResponseShape
from router.outbox import ChoiceDelta, joined
from tests.router.calls import chat, post
from tests.router.fakes import MODEL, Site


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

    def build(
        index: int,
        text: str,
        token_ids: tuple[int, ...],
        ending: Ending | None,
        logprobs: TokenLogprobs,
        prompt_logprobs: TokenLogprobs,
        cached_tokens: int,
    ) -> ChoiceDelta:
        built.append(ChoiceDelta(index, text, token_ids, ending, logprobs, prompt_logprobs, cached_tokens))
        return built[-1]

    pieces = [ChoiceDelta(number % 2, " word", (number,)) for number in range(1_000)]
    monkeypatch.setattr(outbox, "ChoiceDelta", build)
    assert joined(pieces) == built and len(built) == 2
    assert built[1].token_ids == tuple(range(1, 1_000, 2)) and built[1].text == " word" * 500


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "shape", "body", "size"),
    [
        ("chat/completions", ChatShape, chat(n=2), 10),
        ("chat/completions", ChatShape, chat(n=2, logprobs=True, top_logprobs=2), 10 + 300),
        ("responses", ResponseShape, {"model": MODEL, "input": "hello", "max_output_tokens": 5}, 5),
        ("embeddings", EmbeddingShape, {"input": ["hello", "you"]}, 4),
    ],
)
async def test_an_answer_with_much_to_write_is_written_on_a_thread(
    path: str, shape: type[AnswerShape[Any]], body: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    write = shape.whole

    def watched(self: AnswerShape[Any], choices: Sequence[WholeChoice]) -> bytes:
        threads.append(threading.current_thread())
        return write(self, choices)

    monkeypatch.setattr(shape, "whole", watched)
    async with Site(embedding=EmbeddingMode("last", normalize=False, size=2)) as site:
        for most in (size, size - 1):
            monkeypatch.setattr(sending, "LOOP_SIZE", most)
            assert (await post(site, f"/v1/{path}", body)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
