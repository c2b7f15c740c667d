"""The outbox: what one client has not read yet.

Owns the unread deltas of one HTTP request, and counts them against a limit. Does not know HTTP, sockets or loops: the reader
gives a callable that wakes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from common.messages import Ending, TokenLogprobs

DELTA_CHARS = 32
"""What a delta counts besides its text: what its token holds in memory once it is joined with others."""
JOIN_DELTAS = 256
"""So many new deltas are joined, one for each choice: apart, each holds several times what it counts."""
UNREAD_LIMIT_CHARS = 1_000_000
LOGPROB_CHARS = 16
"""What a pair of a token and its log probability counts. It holds about eight times that; but then 3,000 tokens with 20
alternatives may be unread, which a client gets at once when its router was stopped for a while."""


class ChoiceDelta(msgspec.Struct, frozen=True):
    """News of one choice: text (maybe empty), the tokens behind it, and the ending if this is the last. logprobs,
    prompt_logprobs, cached_tokens: see `TextDelta`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    ending: Ending | None = None
    logprobs: TokenLogprobs = ()
    prompt_logprobs: TokenLogprobs = ()
    cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class Outbox:
    """Unread deltas of every choice of one HTTP request, in order. wake: called when there is one more.

    limit_chars: a request whose unread_chars exceed it is ended, because its client reads too slowly. Endings are still taken in.
    Log probabilities of the prompt do not count: they come once, all together, and `SamplingParams.check_prompt` bounds them.
    """

    wake: Callable[[], object]
    limit_chars: int = UNREAD_LIMIT_CHARS
    unread_chars: int = 0
    unread: list[ChoiceDelta] = field(default_factory=list)
    _join_at: int = JOIN_DELTAS

    def put(self, delta: ChoiceDelta) -> None:
        self.unread.append(delta)
        self.unread_chars += len(delta.text) + DELTA_CHARS
        if delta.logprobs:
            self.unread_chars += LOGPROB_CHARS * sum(1 + len(logprob.top) for logprob in delta.logprobs)
        if len(self.unread) >= self._join_at:
            self.unread = joined(self.unread)
            self._join_at = 2 * len(self.unread) + JOIN_DELTAS
        self.wake()

    def take(self) -> list[ChoiceDelta]:
        """Everything that is unread."""
        unread, self.unread, self.unread_chars, self._join_at = self.unread, [], 0, JOIN_DELTAS
        return unread


def joined(deltas: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
    """One delta for each choice that has news."""
    pieces: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        pieces.setdefault(delta.index, []).append(delta)
    return [
        ChoiceDelta(
            index,
            "".join(piece.text for piece in of),
            tuple(chain.from_iterable(piece.token_ids for piece in of)),
            of[-1].ending,
            tuple(chain.from_iterable(piece.logprobs for piece in of)),
            tuple(chain.from_iterable(piece.prompt_logprobs for piece in of)),
            sum(piece.cached_tokens for piece in of),
        )
        for index, of in pieces.items()
    ]
