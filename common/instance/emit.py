"""What an instance sends into the text pipelines, one for each detokenizer of each of its routers.

Owns the shape of these messages. Knows token ids and endings; text belongs to the detokenizers.
"""

from collections.abc import Sequence

from common.ids import InstanceId, Key
from common.instance.ports import Send
from common.messages import Ending, TokenBatch, TokenDelta


def emit_tokens(deltas: Sequence[TokenDelta], pipelines: Sequence[InstanceId]) -> list[Send]:
    """The tokens of one step, as one message for each pipeline. pipelines[i]: the detokenizer that gets deltas[i]."""
    if not deltas:
        return []
    first = pipelines[0]
    if pipelines.count(first) == len(pipelines):
        return [Send(first, TokenBatch(deltas=tuple(deltas)))]
    batches: dict[InstanceId, list[TokenDelta]] = {}
    for pipeline, delta in zip(pipelines, deltas, strict=True):
        batches.setdefault(pipeline, []).append(delta)
    return [Send(pipeline, TokenBatch(deltas=tuple(batch))) for pipeline, batch in batches.items()]


def emit_ending(pipeline: InstanceId, key: Key, first: int, ending: Ending) -> Send:
    """An ending without a token. first: the number of the token that would have come next."""
    return Send(pipeline, TokenBatch(deltas=(TokenDelta(key, first, (), ending),)))
