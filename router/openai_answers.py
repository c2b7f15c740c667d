"""The answers of the OpenAI API as JSON bytes: chunks of a stream, whole answers, usage.

Owns the shapes, one class for each endpoint. Does not know HTTP, tokens or the fleet.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

OpenAIFinish: TypeAlias = Literal["stop", "length"]
TokenIds: TypeAlias = tuple[int, ...] | msgspec.UnsetType
"""`token_ids` of a choice, which the OpenAI API does not have; left out unless `return_token_ids` asks for them, as in vLLM."""
_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class WholeChoice(msgspec.Struct, frozen=True):
    """One finished choice. token_ids: UNSET unless the client asked for them."""

    index: int
    text: str
    finish_reason: OpenAIFinish
    token_ids: TokenIds = msgspec.UNSET


class AnswerShape(Protocol):
    """How one endpoint writes its answer. Every method returns one JSON object."""

    id: str

    def opening(self, index: int) -> bytes | None:
        """The chunk that precedes a choice's text, if the endpoint has one."""

    def text(self, index: int, text: str, token_ids: TokenIds) -> bytes: ...

    def closing(self, index: int, reason: OpenAIFinish) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes: ...


class _Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class _ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: _Delta
    finish_reason: OpenAIFinish | None = None
    logprobs: None = None
    token_ids: TokenIds = msgspec.UNSET


class _TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: OpenAIFinish | None = None
    logprobs: None = None
    token_ids: TokenIds = msgspec.UNSET


class _ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class _ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: _ChatMessage
    finish_reason: OpenAIFinish
    logprobs: None = None
    token_ids: TokenIds = msgspec.UNSET


_Choice: TypeAlias = _ChunkChoice | _TextChoice | _ChatChoice


class _Body(msgspec.Struct, frozen=True):
    """usage: left out where the client did not ask for it, null in the chunks before the one that has it."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[_Choice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class _Shape:
    """What the endpoints share: the envelope."""

    def __init__(self, id: str, created: int, model: str, chunk_object: str, whole_object: str, include_usage: bool) -> None:
        self.id = id
        self._created = created
        self._model = model
        self._chunk_object = chunk_object
        self._whole_object = whole_object
        self._chunk_usage: msgspec.UnsetType | None = None if include_usage else msgspec.UNSET

    def usage(self, usage: Usage) -> bytes:
        return _encode(_Body(self.id, self._chunk_object, self._created, self._model, (), usage))

    def _chunk(self, choice: _Choice) -> bytes:
        return _encode(_Body(self.id, self._chunk_object, self._created, self._model, (choice,), self._chunk_usage))

    def _whole(self, choices: tuple[_Choice, ...], usage: Usage) -> bytes:
        return _encode(_Body(self.id, self._whole_object, self._created, self._model, choices, usage))


class ChatShape(_Shape):
    """/v1/chat/completions"""

    def __init__(self, id: str, created: int, model: str, include_usage: bool) -> None:
        super().__init__(id, created, model, "chat.completion.chunk", "chat.completion", include_usage)

    def opening(self, index: int) -> bytes | None:
        return self._chunk(_ChunkChoice(index, _Delta(role="assistant", content="")))

    def text(self, index: int, text: str, token_ids: TokenIds) -> bytes:
        return self._chunk(_ChunkChoice(index, _Delta(content=text), token_ids=token_ids))

    def closing(self, index: int, reason: OpenAIFinish) -> bytes:
        return self._chunk(_ChunkChoice(index, _Delta(), reason))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        made = (_ChatChoice(c.index, _ChatMessage(c.text), c.finish_reason, token_ids=c.token_ids) for c in choices)
        return self._whole(tuple(made), usage)


class CompletionShape(_Shape):
    """/v1/completions"""

    def __init__(self, id: str, created: int, model: str, include_usage: bool) -> None:
        super().__init__(id, created, model, "text_completion", "text_completion", include_usage)

    def opening(self, index: int) -> bytes | None:
        return None

    def text(self, index: int, text: str, token_ids: TokenIds) -> bytes:
        return self._chunk(_TextChoice(index, text, token_ids=token_ids))

    def closing(self, index: int, reason: OpenAIFinish) -> bytes:
        return self._chunk(_TextChoice(index, "", reason))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        made = (_TextChoice(c.index, c.text, c.finish_reason, token_ids=c.token_ids) for c in choices)
        return self._whole(tuple(made), usage)
