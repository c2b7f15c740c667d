"""The answers of POST /v1/chat/completions as JSON.

Owns their shape: content, thoughts and calls, whole or as they come. Does not know the formats in which models write them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, assert_never

import msgspec

from common.messages import TokenLogprob
from router.api.answers import OpenAIFinish, OpenAIShape, TokenIds, WholeChoice, finish_of
from router.api.chat import ChatRequest
from router.api.logprobs import ChatLogprobs, PromptLogprobs
from router.api.parsing.parser import AnswerParser, Arguments, CallBegins, Content, Part, Reasoning
from router.outbox import ChoiceDelta


class _FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    arguments: str | None = None
    name: str | None = None


class _CallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    function: _FunctionDelta
    id: str | None = None
    type: str | None = None


class _Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """reasoning: vLLM's newer name of reasoning_content."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Sequence[_CallDelta] | None = None


class _ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: _Delta
    finish_reason: OpenAIFinish | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, frozen=True):
    id: str
    function: _Function
    type: str = "function"


class _ChatMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: Sequence[_Call] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: _ChatMessage
    finish_reason: OpenAIFinish
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET


@dataclass(slots=True)
class _Parsing:
    """One choice of a stream whose text has parts. calls: how many have begun."""

    parser: AnswerParser
    calls: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class ChatShape(OpenAIShape[ChatRequest]):
    """/v1/chat/completions. A choice's first chunk says the role."""

    chunk_object: ClassVar[str] = "chat.completion.chunk"
    whole_object: ClassVar[str] = "chat.completion"

    _parsing: dict[int, _Parsing] = field(default_factory=dict, init=False)

    def _is_content(self, index: int) -> bool:
        if self.accepted.reading.new_parser is None:
            return True
        return index in self._parsing and self._parsing[index].parser.is_plain

    def _chunk_choices(self, delta: ChoiceDelta, *, opens: bool) -> Iterable[msgspec.Struct]:
        index, ids, finish = delta.index, self._ids(delta.token_ids), finish_of(delta.ending)
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        chunks = [_ChunkChoice(index, _Delta(role="assistant", content=""))] if opens else []
        said = list(self._said(index, delta.text, is_last=finish is not None))
        if not said and (logprobs is not None or ids):
            said.append(_Delta(content=""))
        for piece in said:  # the tokens behind the text go with its first piece
            chunks.append(_ChunkChoice(index, piece, logprobs=logprobs, token_ids=ids))
            logprobs, ids = None, self._ids(())
        if finish is not None:
            called = index in self._parsing and self._parsing[index].calls > 0
            chunks.append(_ChunkChoice(index, _Delta(), "tool_calls" if called and finish == "stop" else finish))
        return chunks

    def _said(self, index: int, text: str, *, is_last: bool) -> Iterator[_Delta]:
        """The text as it is told to the client: content, or the parts of it that are settled."""
        if self._is_content(index):
            if text:
                yield _Delta(content=text)
            return
        parsing = self._parsing.get(index)
        if parsing is None:
            assert self.accepted.reading.new_parser is not None
            parsing = self._parsing[index] = _Parsing(self.accepted.reading.new_parser())
        parts = parsing.parser.push(text)
        for part in [*parts, *parsing.parser.finish()] if is_last else parts:
            yield self._delta(part, parsing)

    def _delta(self, part: Part, parsing: _Parsing) -> _Delta:
        match part:
            case Content(text):
                return _Delta(content=text)
            case Reasoning(text):
                return _Delta(reasoning_content=text, reasoning=text)
            case CallBegins(name):
                parsing.calls += 1
                function = _FunctionDelta(name=name, arguments="")
                return _Delta(tool_calls=(_CallDelta(parsing.calls - 1, function, self.accepted.reading.new_id(), "function"),))
            case Arguments(text):
                return _Delta(tool_calls=(_CallDelta(parsing.calls - 1, _FunctionDelta(arguments=text)),))
            case _:
                assert_never(part)

    def _whole_choice(self, index: int, choice: WholeChoice) -> msgspec.Struct:
        logprobs = self._logprobs(choice.logprobs) if self.asked.logprobs is not None else None
        ids, finish, reading = self._ids(choice.token_ids), choice.finish, self.accepted.reading
        if reading.new_parser is None:
            return ChatChoice(index, _ChatMessage(choice.text), finish, logprobs, ids)
        answer = reading.whole(choice.text)
        calls = [_Call(reading.new_id(), _Function(call.name, call.arguments)) for call in answer.calls]
        message = _ChatMessage(
            content=None if calls and not answer.content else answer.content,
            tool_calls=calls or msgspec.UNSET,
            reasoning_content=answer.reasoning or msgspec.UNSET,
            reasoning=answer.reasoning or msgspec.UNSET,
        )
        return ChatChoice(index, message, "tool_calls" if calls and finish == "stop" else finish, logprobs, ids)

    def _prompt_logprobs(self, choices: Sequence[WholeChoice]) -> PromptLogprobs | msgspec.UnsetType:
        if self.asked.prompt_logprobs is None:
            return msgspec.UNSET
        return self.logprob_writer(self.asked.prompt_logprobs).prompt(choices[0].prompt_logprobs)

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
        return self.logprob_writer(self.asked.logprobs).chat(tokens)
