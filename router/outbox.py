"""A client's request for the model, from its arrival to the end of its response.

Owns the ids by which its client knows it, the places that it holds before its choices are dispatched, and what its client has not
read of them, counted against a limit. Does not know HTTP, sockets or loops: the reader gives a callable that wakes it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from common.ids import RequestId
from common.messages import Ending, TokenLogprobs

DELTA_CHARS = 32
"""What a delta counts besides its text: what its token holds in memory once it is joined with others."""
JOIN_DELTAS = 256
"""So many new deltas are joined, one for each choice: apart, each holds several times what it counts."""
UNREAD_LIMIT_CHARS = 1_000_000
LOGPROB_CHARS = 16
"""What a pair of a token and its log probability counts. It holds about eight times that; but then 3,000 tokens with 20
alternatives may be unread, which a client gets at once when its router was stopped for a while."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request that was dispatched asks for, as logs and traces tell it: nothing of its prompt."""

    operation: str
    """As OpenTelemetry names it."""
    model: str
    prompt_tokens: int
    """The tokens of all its prompts."""
    samples: int
    """Choices of each prompt."""
    streams: bool
    parameters: Mapping[str, int | float]


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
    versions: tuple[tuple[int, str], ...] = ()
    """The numbers of tokens of the answer from which on other weights computed, with what people call these."""


def nobody_reads() -> None:
    """Nobody waits for what is unread."""


@dataclass(slots=True, eq=False)
class ClientRequest:
    """What the router holds for one HTTP request. First it is read: its body arrives and its prompts are tokenized. Then its
    choices are dispatched, and their deltas are put here, in order, until the client reads them."""

    id: str = ""
    """The id of its answer, as the client sees it."""
    owner: str = ""
    """The name of its API key; empty without one."""
    unique: str = ""
    """A part of the ids of its choices that no other request has, whatever ids clients choose."""
    session: str = ""
    """See `Demand`."""
    is_from_batch: bool = False
    """It is a line of a batch, and comes after everything else that waits."""
    names: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Each id by which the client may know it, with the numbers of the choices for which it stands."""
    choices: int = 0
    """How many choices it has. Before its body is read it counts as one."""
    limit_chars: int = UNREAD_LIMIT_CHARS
    """A request with more unread characters is ended, because its client reads too slowly. Endings are still taken in, and log
    probabilities of the prompt do not count: they come once, all together, and `SamplingParams.check_prompt` bounds them."""
    received_s: float = 0.0
    asked: Asked | None = None
    """None until it is dispatched."""
    wake: Callable[[], object] = nobody_reads
    """Called when there is one more delta."""
    places: int = 0
    """The places that it holds for choices that are not dispatched yet."""
    aborted: set[int] = field(default_factory=set)
    """The numbers of the choices that were aborted while it was read."""
    request_ids: tuple[RequestId, ...] = ()
    """Its choices, by number, from their dispatch on."""
    unended: int = 0
    """Choices that were dispatched and whose ending has not been taken."""
    unread_chars: int = 0
    unread: list[ChoiceDelta] = field(default_factory=list)
    _join_at: int = JOIN_DELTAS

    def expect(self, choices: int, names: Mapping[str, Collection[int]]) -> None:
        """The body is read, so its choices are known. What was aborted before is all of them."""
        self.choices, self.names = choices, names
        if self.aborted:
            self.aborted.update(range(choices))

    def choice_id(self, number: int) -> RequestId:
        return RequestId(f"{self.id}.{self.unique}-{number}")

    def numbers(self, name: str | None) -> Collection[int]:
        """The choices for which this id stands; None: all of them."""
        return range(self.choices) if name is None else self.names.get(name, ())

    def read_by(self, wake: Callable[[], object]) -> None:
        """Call this from now on whenever there is something to take."""
        self.wake = wake
        if self.unread:
            wake()

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
        for delta in unread:
            if delta.ending is not None:
                self.unended -= 1
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
            tuple(chain.from_iterable(piece.versions for piece in of)),
        )
        for index, of in pieces.items()
    ]
