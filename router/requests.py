"""A request at the router: what was asked, what its client has not read of the answer, and the places that open requests share.

Owns the rule by which the keys of the API share places. Owns also the ids by which a client knows its request, the places that
this holds before its choices are dispatched, and what is unread of it, counted against a limit. Does not know HTTP, sockets or
loops: the reader gives a callable that wakes it.

The rule is that of dynamic thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches",
1998): a key gets another place while it has fewer than four times as many as are free. So one key alone takes 4/5 of all places,
two that both want more get 4/9 each, and some places stay free for a key that comes later. As a key with many places gives some
back, those with fewer get them. Nothing depends on how many keys there are, or on which of them are in use.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import msgspec
from msgspec.structs import replace

from common.errors import Overloaded
from common.ids import ID_BYTES, RequestId
from common.instance.waiting_line import has_place
from common.messages import AnswerParts, Ending, Failed, Finished, TokenLogprobs
from common.pages.radix_cache import BlockNames
from common.sampling_params import SamplingParams
from router.timelines import RequestTimes


class Places:
    """limit: how many there are. what: is open there, for messages. An owner is a key's name; "" is everybody without a key, who
    may take all places."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._taken.total()

    def of_keys(self) -> Iterable[tuple[str, int]]:
        """How many each key has that ever had one."""
        return ((owner, count) for owner, count in self._taken.items() if owner)

    def take(self, owner: str, count: int = 1) -> None:
        """Whoever takes places must `leave` them. Raises Overloaded, and takes none, when so many are not free for this owner."""
        self.require(owner, count)
        self._taken[owner] += count

    def require(self, owner: str, count: int = 1) -> None:
        """Raises Overloaded when so many are not free for this owner."""
        taken, mine = self._taken.total(), self._taken[owner]
        free = self._limit - taken
        if count > free:
            raise Overloaded(f"the router has {taken} of at most {self._limit} {self._what} open: try again shortly")
        if owner and not has_place(free, mine, count):
            own = f"your key has {mine} {self._what} open"
            raise Overloaded(f"{own}, and {free} of {self._limit} places are left for all: try again when some have ended")

    def could_have(self, owner: str, count: int) -> bool:
        """Whether this owner gets so many when nothing is open."""
        return count <= self._limit and (not owner or has_place(self._limit, 0, count))

    @contextmanager
    def held(self, owner: str, count: int) -> Iterator[None]:
        """Have places meanwhile. Raises Overloaded."""
        self.take(owner, count)
        try:
            yield
        finally:
            self.leave(owner, count)

    def leave(self, owner: str, count: int = 1) -> None:
        self._taken[owner] -= count
        assert self._taken[owner] >= 0


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One choice of a client's request."""

    request_id: RequestId
    index: int
    """Its number in the answer."""
    prompt: bytes
    """Packed token ids."""
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    priority: int = 0
    """Lower is earlier."""
    timeout_s: float | None = None
    """Seconds from its arrival; None: the router's own limit."""
    skip_special_tokens: bool = True
    """See `ExpectAnswer`, also for `include_stop` and `shown`."""
    include_stop: bool = False
    owner: str = ""
    """Name of the client's API key; "": it has none."""
    shown: tuple[int, ...] = ()
    parts: AnswerParts | None = None
    """See `ExpectAnswer`, also for `stop_token_ids`."""
    stop_token_ids: tuple[int, ...] = ()
    salt: str = ""
    """See `Generate`."""
    session: str = ""
    """See `Demand`."""
    adapter: str = ""
    """The name of the LoRA adapter that computes it beside the model; "": none."""
    blocks: BlockNames | None = None
    """Names of the prompt's blocks; None: they were not named."""
    grammar_field: str = ""
    """The client's field that asks for the grammar, which instances know by its kind alone."""

    def in_client_words(self, ending: Ending) -> Ending:
        """Put the client's field into an instance's error about the grammar, in place of its kind."""
        grammar = self.sampling.grammar
        if grammar is None or not isinstance(ending, Failed):
            return ending
        if not ending.message.startswith(f"{grammar.kind}:"):
            return ending
        message = self.grammar_field + ending.message.removeprefix(grammar.kind)
        return replace(ending, message=message, field=ending.field and self.grammar_field)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // ID_BYTES

    @property
    def can_share(self) -> bool:
        """Whether a cached prompt helps: not where something is needed of each of its tokens."""
        return self.sampling.prompt_logprobs is None and self.sampling.pooling is None


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
    prompt_logprobs, cached_tokens, drafts, thought_tokens: see `TextDelta`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    ending: Ending | None = None
    logprobs: TokenLogprobs = ()
    prompt_logprobs: TokenLogprobs = ()
    cached_tokens: int = 0
    versions: tuple[tuple[int, str], ...] = ()
    """The numbers of tokens of the answer from which on other weights computed, with what people call these."""
    drafts: tuple[int, int] = (0, 0)
    thought_tokens: int = 0


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
    hides_answer: bool = False
    """Its client wants the prompt only: it gets nothing of an answer but its ending, as that of an answer without a token."""
    wake: Callable[[], object] = nobody_reads
    """Called when there is one more delta."""
    places: int = 0
    """The places that it holds for choices that are not dispatched yet."""
    aborted: set[int] = field(default_factory=set)
    """The numbers of the choices that were aborted while it was read."""
    request_ids: tuple[RequestId, ...] = ()
    """Its choices, by number, from their dispatch on."""
    times: tuple[RequestTimes, ...] = ()
    """Theirs. Timelines forget a choice that ended long before its request."""
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
        if self.hides_answer:
            ending = delta.ending if isinstance(delta.ending, Failed | None) else Finished(reason="length")
            delta = replace(delta, text="", token_ids=(), logprobs=(), versions=(), ending=ending)
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
            (sum(piece.drafts[0] for piece in of), sum(piece.drafts[1] for piece in of)),
            max(piece.thought_tokens for piece in of),
        )
        for index, of in pieces.items()
    ]
