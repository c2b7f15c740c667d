"""What an instance emits into the text pipeline."""

from common.ids import DETOKENIZER, ROUTER, text_name
from common.instance.ports import Send
from common.instance.token_memory import emit_ending, emit_tokens
from common.messages import Finished, TokenBatch, TokenDelta
from tests.builders import key


def test_the_tokens_of_one_step_are_one_message() -> None:
    deltas = [TokenDelta(key("a"), 3, (5,)), TokenDelta(key("b"), 0, (6,), Finished(reason="length"))]
    assert emit_tokens(deltas, [DETOKENIZER] * 2) == [Send(DETOKENIZER, TokenBatch(deltas=tuple(deltas)))]


def test_tokens_for_several_detokenizers_are_one_message_for_each() -> None:
    deltas = [TokenDelta(key(name), 0, (5,)) for name in "abc"]
    other = text_name(ROUTER, 1)
    assert emit_tokens(deltas, [other, DETOKENIZER, other]) == [
        Send(other, TokenBatch(deltas=(deltas[0], deltas[2]))),
        Send(DETOKENIZER, TokenBatch(deltas=(deltas[1],))),
    ]


def test_a_step_without_tokens_sends_no_message() -> None:
    assert emit_tokens([], []) == []


def test_an_ending_without_a_token_has_the_number_of_the_token_that_would_have_come() -> None:
    ending = Finished(reason="cancelled")
    assert emit_ending(DETOKENIZER, key(), 4, ending) == Send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(key(), 4, (), ending),)))
