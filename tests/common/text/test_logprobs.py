"""What goes beside tokens through the detokenizer: each token's log probability travels with it, and what is told of the prompt
comes once, with token 0."""

import msgspec
import pytest

from common.ids import pack_ids
from common.messages import (
    AnswerMessage,
    ExpectAnswer,
    Failed,
    Finished,
    TextDelta,
    TokenBatch,
    TokenDelta,
    TokenLogprob,
    TokenLogprobs,
)
from common.text.detokenizer import Detokenizer, DetokenizerLimits
from tests.builders import key
from tests.common.text.tiny import tiny_tokenizer

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
    of_prompt = (PROMPT, CACHED_TOKENS) if first == 0 else ((), 0)
    return TokenBatch(deltas=(TokenDelta(key(), first, tuple(IDS[first:end]), ending, ALL[first:end], *of_prompt),))


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
