"""The answers of POST /v1/chat/completions as JSON.

Owns their shape.
"""

from collections.abc import Iterable

import msgspec

from router.api.answers import AnswerShape, OpenAIFinish, TokenIds, WholeChoice


class _Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class _ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: _Delta
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


class ChatShape(AnswerShape):
    """/v1/chat/completions. A choice's first chunk says the role."""

    __slots__ = ()
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def _chunk_choices(
        self, index: int, text: str, token_ids: TokenIds, finish: OpenAIFinish | None, *, opens: bool
    ) -> Iterable[msgspec.Struct]:
        parts: list[msgspec.Struct] = [_ChunkChoice(index, _Delta(role="assistant", content=""))] if opens else []
        if text or token_ids:
            parts.append(_ChunkChoice(index, _Delta(content=text), token_ids=token_ids))
        if finish is not None:
            parts.append(_ChunkChoice(index, _Delta(), finish))
        return parts

    def _whole_choice(self, index: int, choice: WholeChoice, token_ids: TokenIds) -> msgspec.Struct:
        return _ChatChoice(index, _ChatMessage("".join(choice.texts)), choice.finish_reason, token_ids=token_ids)
