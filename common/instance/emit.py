"""What an instance sends into the text pipeline.

Owns the shape of these messages. Knows token ids and endings; text belongs to the detokenizer.
"""

from collections.abc import Iterable

from common.ids import DETOKENIZER, Key
from common.instance.ports import Send
from common.messages import Ending, TokenBatch, TokenDelta


def emit_tokens(deltas: Iterable[TokenDelta]) -> list[Send]:
    """The tokens of one step as one message; no message when there are none."""
    batch = tuple(deltas)
    return [Send(DETOKENIZER, TokenBatch(deltas=batch))] if batch else []


def emit_ending(key: Key, first: int, ending: Ending) -> Send:
    """An ending without a token. first: the number of the token that would have come next."""
    return Send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(key, first, (), ending),)))
