"""The shapes of answers: how deltas of text become the bytes of a stream, or of one whole answer.

Owns what the shapes have in common, what the endpoints of the OpenAI API have in common, and where a block begins and ends in
answers of blocks: thoughts, texts and calls, in the order in which the model wrote them. Each endpoint has a shape of its own in
its own file. Does not know HTTP or the fleet. The same steps make the events of a stream and the blocks of a whole answer:

    opening ─► for each block: begun ─► grown, with each piece of text ─► ended ─► last events

Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import secrets
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from common.messages import Ending, Failed, Finished
from common.messages.variants import FIRST_VERSION
from router.api.errors import detail_of_failure, error_json
from router.api.fields import ReadRequest
from router.api.logprobs import LogprobWriter, PromptLogprobs, TokenTexts
from router.api.parsing.parser import PLAIN_TEXT, AnswerParser, AnswerPart, AnswerReading
from router.requests import ChoiceDelta, RequestSpec

OpenAIFinish: TypeAlias = Literal["stop", "length", "tool_calls", "abort"]
"""abort: as in vLLM and SGLang, the request was ended by another one (POST /abort_request)."""
TokenIds: TypeAlias = tuple[int, ...] | msgspec.UnsetType
"""`token_ids` of a choice. The OpenAI API does not have it; as in vLLM it is left out unless `return_token_ids` asks for it."""
LOOP_SIZE = 20_000
"""A whole answer of this size is written on the loop: that takes some 20 ms at most. Larger ones are written on a thread. A
character, or a number of an embedding, counts 1."""
PAIR_SIZE = 10
"""What a token with its log probability counts."""
_NUMBER_BYTES = 4
BEGIN, END = b"data: ", b"\n\n"
"""What stands around the data of a server-sent event."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it (https://html.spec.whatwg.org/multipage/server-sent-events.html#authoring-notes)."""
DONE = b"data: [DONE]\n\n"
_MARK = "\ue000"
_encode = msgspec.json.Encoder().encode

R = TypeVar("R", bound=ReadRequest)
C = TypeVar("C", bound=msgspec.Struct)


def encoded(value: object) -> Any:
    """The value's JSON, to stand in its place. What is large becomes bytes by itself: nobody else runs while one call encodes."""
    return msgspec.Raw(_encode(value))


def finish_of(ending: Ending | None) -> OpenAIFinish | None:
    """How a choice ends; None when it does not, or not as it should."""
    if ending is None or isinstance(ending, Failed):
        return None
    return "abort" if ending.reason == "cancelled" else ending.reason


def embedding_in(choice: ChoiceDelta) -> bytes:
    """See `Finished`."""
    return choice.ending.embedding if isinstance(choice.ending, Finished) else b""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A client's request, ready to dispatch. specs: one for each choice, prompt by prompt, n each. echoes: the text of each
    choice's prompt, if the answer repeats it. reading: how the texts of the answer become its parts."""

    specs: tuple[RequestSpec, ...]
    prompt_tokens: int
    echoes: tuple[str, ...] = ()
    reading: AnswerReading = PLAIN_TEXT


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Tokens of the prompts whose KV was there already."""


class CompletionDetails(msgspec.Struct, frozen=True):
    """What the answer's tokens were."""

    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of the answer that had been proposed (speculative decoding)."""
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Proposed tokens that were wrong, or behind the end. They are not part of completion_tokens."""
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of thoughts and of the marks around them, where thoughts are told apart."""


class VersionSpan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens [start, end) of a choice came from these weights."""

    version: str
    """As POST /update_weights_from_disk and its like named them."""
    start: int
    end: int
    index: int | msgspec.UnsetType = msgspec.UNSET
    """The number of the choice."""


class VersionSpans:
    """The weights that the tokens of a choice came from, in order."""

    def __init__(self) -> None:
        self._begins: list[tuple[int, str]] = []
        self._tokens = 0

    def add(self, news: ChoiceDelta) -> None:
        self._begins += news.versions
        self._tokens += len(news.token_ids)

    @property
    def last(self) -> str:
        """The version of the last token; "" where nobody said."""
        return self._begins[-1][1] if self._begins else ""

    def spans(self, index: int | msgspec.UnsetType = msgspec.UNSET) -> list[VersionSpan]:
        ends = [*(begin for begin, _ in self._begins[1:]), self._tokens]
        return [VersionSpan(version, begin, end, index) for (begin, version), end in zip(self._begins, ends, strict=False)]


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    weight_versions: list[VersionSpan] | msgspec.UnsetType = msgspec.UNSET
    """Which tokens came from which weights, in a fleet whose weights have been given a name."""
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET
    """Left out where nothing was proposed and no thoughts are told apart."""


@dataclass(slots=True, kw_only=True, eq=False)
class AnswerShape(ABC, Generic[R]):
    """How one answer is written."""

    id: str
    created: int
    model: str
    request: R
    accepted: Accepted
    token_texts: TokenTexts
    """The texts of tokens, for log probabilities."""

    keep_alive: ClassVar[bytes] = KEEP_ALIVE
    """What a stream sends after a long silence."""

    tokens: int = field(default=0, init=False)
    """Tokens of all choices so far."""
    cached_tokens: int = field(default=0, init=False)
    """The cached tokens of the prompts so far: each prompt is counted once, with its first choice."""
    drafted_tokens: int = field(default=0, init=False)
    """Tokens that were proposed for the choices so far."""
    accepted_tokens: int = field(default=0, init=False)
    """Those of them that are in an answer."""
    thought_tokens: Counter[int] = field(default_factory=Counter, init=False)
    """How many tokens of each choice were thoughts so far."""
    versions: defaultdict[int, VersionSpans] = field(default_factory=lambda: defaultdict(VersionSpans), init=False)
    """Which weights the tokens of each choice came from."""

    @abstractmethod
    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        """The events for news of one choice. opens: this is its first news."""

    @abstractmethod
    def last_events(self) -> bytes:
        """The events when all choices have ended as they should."""

    @abstractmethod
    def whole(self, choices: Sequence[ChoiceDelta]) -> bytes:
        """The body of an answer that is not streamed. choices: all of each, in their order."""

    def size(self, choices: Sequence[ChoiceDelta]) -> int:
        """How much there is to write: see LOOP_SIZE. Text counts as if a parser read it, though plain text costs less."""
        each, of_prompt = 1 + (self.request.logprobs or 0), 1 + (self.request.prompt_logprobs or 0)
        pairs = sum(len(choice.logprobs) * each + len(choice.prompt_logprobs) * of_prompt for choice in choices)
        chars = sum(len(choice.text) for choice in choices)
        return chars + PAIR_SIZE * pairs + sum(len(embedding_in(choice)) // _NUMBER_BYTES for choice in choices)

    def failure(self, ending: Ending | None) -> Failed | None:
        """Why there is no whole answer when a choice ends like this; None when there is one, or when it goes on."""
        return ending if isinstance(ending, Failed) else None

    def failure_event(self, failed: Failed) -> bytes:
        """The event that ends a stream whose answer failed."""
        return BEGIN + error_json(detail_of_failure(failed)) + END

    def usage(self) -> Usage:
        """As far as the answer has come."""
        prompt_tokens = self.accepted.prompt_tokens
        spans = [span for index, versions in sorted(self.versions.items()) for span in versions.spans(index)]
        named = spans if any(span.version != FIRST_VERSION for span in spans) else msgspec.UNSET
        total = prompt_tokens + self.tokens
        return Usage(prompt_tokens, self.tokens, total, PromptDetails(self.cached_tokens), named, self._completion_details())

    def _completion_details(self) -> CompletionDetails | msgspec.UnsetType:
        details, accepted, drafted = CompletionDetails(), self.accepted_tokens, self.drafted_tokens
        if drafted:
            details = replace(details, accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted)
        if any(spec.parts is not None and spec.parts.thoughts for spec in self.accepted.specs):
            details = replace(details, reasoning_tokens=self.thought_tokens.total())
        return msgspec.UNSET if details == CompletionDetails() else details

    def count(self, index: int, news: ChoiceDelta) -> None:
        """Take the tokens of this news of a choice into the usage."""
        self.tokens += len(news.token_ids)
        self.versions[index].add(news)
        self.drafted_tokens += news.drafts[0]
        self.accepted_tokens += news.drafts[1]
        self.thought_tokens[index] = max(self.thought_tokens[index], news.thought_tokens)
        if index % self.request.fields.n == 0:
            self.cached_tokens += news.cached_tokens

    def logprob_writer(self, top: int | None) -> LogprobWriter:
        return LogprobWriter(self.token_texts, top or 0, as_ids=self.request.fields.return_tokens_as_token_ids)


class OpenAIBody(msgspec.Struct, Generic[C], frozen=True):
    """A whole answer, or a chunk of one. usage: left out when the client did not ask for it; null in the chunks before the one
    that has it."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[C]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


@dataclass(slots=True, kw_only=True, eq=False)
class OpenAIShape(AnswerShape[R]):
    """The chunks and bodies that chats and completions share."""

    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, init=False)
    """For each choice that has got text: what stands before and after the text in an event that holds nothing else."""
    _is_plain: bool = field(init=False)
    """Most events hold nothing but text."""

    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __post_init__(self) -> None:
        fields, options = self.request.fields, self.request.fields.stream_options
        has_more = fields.return_token_ids or self.request.logprobs is not None
        self._is_plain = not has_more and not (options is not None and options.continuous_usage_stats)

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        self.count(delta.index, delta)
        if self._is_plain and delta.text and delta.ending is None and not opens and self._is_content(delta.index):
            frame = self._frames.get(delta.index)
            if frame is None:
                (part,) = self._chunk_choices(ChoiceDelta(delta.index, _MARK, ()), opens=False)
                before, mark, after = self._event(part).rpartition(_encode(_MARK))
                assert mark, "the text is in its event"
                frame = self._frames[delta.index] = before, after
            return frame[0] + _encode(delta.text) + frame[1]
        return b"".join(map(self._event, self._chunk_choices(delta, opens=opens)))

    def last_events(self) -> bytes:
        options = self.request.fields.stream_options
        if options is None or not options.include_usage:
            return DONE
        chunk = OpenAIBody[Any](self.id, self.chunk_object, self.created, self.model, (), self.usage())
        return BEGIN + _encode(chunk) + END + DONE

    def whole(self, choices: Sequence[ChoiceDelta]) -> bytes:
        for index, choice in enumerate(choices):
            self.count(index, choice)
        parts = [encoded(self._whole_choice(index, choice)) for index, choice in enumerate(choices)]
        prompt = self._prompt_logprobs(choices)
        return _encode(OpenAIBody(self.id, self.whole_object, self.created, self.model, parts, self.usage(), prompt))

    def _event(self, part: msgspec.Struct) -> bytes:
        options = self.request.fields.stream_options
        usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
        if options is not None and options.continuous_usage_stats:
            usage = self.usage()
        elif options is not None and options.include_usage:
            usage = None
        chunk = OpenAIBody(self.id, self.chunk_object, self.created, self.model, (part,), usage)
        return BEGIN + _encode(chunk) + END

    def _prompt_logprobs(self, choices: Sequence[ChoiceDelta]) -> PromptLogprobs | msgspec.UnsetType:
        """The log probabilities of the prompt, if the answer has them once for all choices."""
        return msgspec.UNSET

    def _ids(self, token_ids: Iterable[int]) -> TokenIds:
        return tuple(token_ids) if self.request.fields.return_token_ids else msgspec.UNSET

    def _is_content(self, index: int) -> bool:
        """Whether the next text of this choice is told as it is, and not what a parser makes of it."""
        return True

    @abstractmethod
    def _chunk_choices(self, delta: ChoiceDelta, *, opens: bool) -> Iterable[msgspec.Struct]:
        """One choice for each chunk."""

    @abstractmethod
    def _whole_choice(self, index: int, choice: ChoiceDelta) -> msgspec.Struct: ...


BlockKind: TypeAlias = Literal["content", "reasoning", "call"]
NamedEvents: TypeAlias = Iterator[tuple[str, Mapping[str, Any]]]
"""Each is the type of an event and its fields."""


def named_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """A server-sent event that says its type twice: for readers of events, and for readers of JSON."""
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"


@dataclass(slots=True)
class Block:
    """A part of the answer of one kind, as far as it has come."""

    kind: BlockKind
    name: str = ""
    """The name of the function that is called."""
    call_id: str = ""
    unique: str = field(default_factory=lambda: secrets.token_hex(12))
    """What no other block has, for ids."""
    texts: list[str] = field(default_factory=list)
    """The text or the arguments, in pieces."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True, kw_only=True, eq=False)
class BlockShape(AnswerShape[R]):
    """An answer of one choice, written block by block."""

    blocks: list[Block] = field(default_factory=list, init=False)
    ending: Finished = field(default=Finished(reason="stop"), init=False)
    _parser: AnswerParser | None = field(default=None, init=False)
    _is_open: bool = field(default=False, init=False)
    """Whether the last block goes on."""
    _calls: int = field(default=0, init=False)
    """How many of the blocks are calls."""

    def __post_init__(self) -> None:
        new_parser = self.accepted.reading.new_parser
        self._parser = None if new_parser is None else new_parser()

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        self.count(delta.index, delta)
        return b"".join(self.event(kind, fields) for kind, fields in self._delta_events(delta, opens=opens))

    def whole(self, choices: Sequence[ChoiceDelta]) -> bytes:
        (choice,) = choices
        self.count(0, choice)
        for _ in self._delta_events(choice, opens=False):
            pass  # the events of a stream; the blocks are what is wanted
        return _encode(self.body())

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        return named_event(kind, fields)

    @abstractmethod
    def body(self) -> msgspec.Struct:
        """The whole answer, when it has ended."""

    @abstractmethod
    def opening(self) -> NamedEvents:
        """What comes before the first block."""

    @abstractmethod
    def begun(self, block: Block) -> NamedEvents:
        """The block is the last one now."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> NamedEvents:
        """The last block goes on with this text."""

    @abstractmethod
    def ended(self, block: Block, *, is_last: bool) -> NamedEvents: ...

    def _delta_events(self, delta: ChoiceDelta, *, opens: bool) -> NamedEvents:
        if opens:
            yield from self.opening()
        has_ended = isinstance(delta.ending, Finished)
        if self._parser is None:
            parts = [AnswerPart("content", delta.text)] if delta.text else []
        else:
            parts = self._parser.push(delta.text) + (self._parser.finish() if has_ended else [])
        for part in parts:
            yield from self._part_events(part)
        if isinstance(delta.ending, Finished):
            self.ending = delta.ending
            if not self.blocks:  # an answer of nothing is an empty text
                yield from self._begin(Block("content"))
            yield from self._end(is_last=True)

    def _part_events(self, part: AnswerPart) -> NamedEvents:
        """The part goes on with the last block, or begins another."""
        if part.kind == "call":
            yield from self._begin(Block("call", part.text, self.accepted.reading.new_id(part.text, self._calls)))
            self._calls += 1
            return
        kind: BlockKind = "call" if part.kind == "arguments" else part.kind
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self._begin(Block(kind))
        self.blocks[-1].texts.append(part.text)
        yield from self.grown(self.blocks[-1], part.text)

    def _begin(self, block: Block) -> NamedEvents:
        yield from self._end(is_last=False)
        self.blocks.append(block)
        self._is_open = True
        yield from self.begun(block)

    def _end(self, *, is_last: bool) -> NamedEvents:
        """End the last block, if it goes on."""
        if self._is_open:
            self._is_open = False
            yield from self.ended(self.blocks[-1], is_last=is_last)
