"""What an instance sends into the text pipelines, one for each detokenizer of each of its routers, and what it remembers of that.

Owns the shape of these messages, and the answers of requests that are over, packed and within a bound of bytes, the oldest out
first. Open requests keep their own (`Request.token_ids`). Knows token ids and endings: text belongs to the detokenizers. Does not
know time: the request table says when a key is forgotten.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from sys import getsizeof

from common.ids import AttemptId, InstanceId
from common.instance.ports import Send
from common.messages import Ending, Finished, TokenBatch, TokenDelta, unpack_logprobs

LIMIT_BYTES = 16 * 2**20
ENTRY_BYTES = 400
"""What an answer takes besides its tokens, about."""
PIECE_TOKENS = 8_192
"""Most that are sent again in one message: with all that may be asked for beside them they take less than 3 MiB."""


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


@dataclass(frozen=True, slots=True)
class Emitted:
    """What was emitted of one request."""

    first: int
    """Number of the first token."""
    token_ids: Sequence[int]
    """While the request is open they are a list, because that is the fastest to append to."""
    ending: Ending | None
    """The ending that was emitted, if there was one."""
    logprobs: Sequence[bytes] = ()
    """Those of each token, packed, if the client asks for them."""
    prompt_logprobs: Sequence[bytes] = ()
    """Those of the prompt, packed in pieces, if the client asks for them; they go with token 0."""
    cached_tokens: int = 0
    """See `TokenDelta`."""

    def since(self, key: AttemptId, number: int) -> Iterator[TokenDelta]:
        """The tokens from this number on, a piece at a time, and the ending with the last of them."""
        end = len(self.token_ids)
        at = min(max(0, number - self.first), end)
        while at < end or self.ending is not None:
            upto = min(at + PIECE_TOKENS, end)
            first, ending = self.first + at, self.ending if upto == end else None
            has_first = first == 0 and end > 0
            prompt_logprobs = unpack_logprobs(self.prompt_logprobs) if has_first else ()
            logprobs = unpack_logprobs(self.logprobs[at:upto])
            cached_tokens = self.cached_tokens if has_first else 0
            yield TokenDelta(key, first, tuple(self.token_ids[at:upto]), ending, logprobs, prompt_logprobs, cached_tokens)
            at = upto
            if at == end:
                return


class TokenMemory:
    """limit_bytes: most that all answers take together."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._answers: dict[AttemptId, tuple[Emitted, int]] = {}
        """Each with its size in bytes."""
        self.used_bytes = 0

    def keep(self, key: AttemptId, emitted: Emitted) -> None:
        """Remember an answer, if there is anything to tell of it. It was not kept before, or was forgotten since."""
        if not emitted.token_ids and emitted.ending is None:
            return
        token_ids, logprobs = array("i", emitted.token_ids), (*emitted.logprobs, *emitted.prompt_logprobs)
        embedding = len(emitted.ending.embedding) if isinstance(emitted.ending, Finished) else 0
        size_bytes = ENTRY_BYTES + embedding + getsizeof(token_ids) + getsizeof(logprobs) + sum(map(getsizeof, logprobs))
        self._answers[key] = replace(emitted, token_ids=token_ids), size_bytes
        self.used_bytes += size_bytes
        while self.used_bytes > self._limit_bytes:
            self.forget(next(iter(self._answers)))

    def get(self, key: AttemptId) -> Emitted | None:
        known = self._answers.get(key)
        return None if known is None else known[0]

    def forget(self, key: AttemptId) -> None:
        """Idempotent."""
        _, size_bytes = self._answers.pop(key, (None, 0))
        self.used_bytes -= size_bytes
