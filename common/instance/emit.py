"""What an instance emits into the text pipeline.

Owns the shape of it. Knows token ids and endings; text is the detokenizer's.
"""

from collections.abc import Iterable

from common.ids import DETOKENIZER, Key
from common.instance.ports import Send
from common.messages import Ending, TokenBatch, TokenDelta


def emit_tokens(deltas: Iterable[TokenDelta]) -> list[Send]:
    """What one step brought, as one message; none when it brought nothing."""
    batch = tuple(deltas)
    return [Send(DETOKENIZER, TokenBatch(deltas=batch))] if batch else []


def emit_ending(key: Key, first: int, ending: Ending) -> Send:
    """An ending without a token. first: number of the token that would have come next."""
    return Send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(key, first, (), ending),)))
