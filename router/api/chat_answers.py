"""The answers of POST /v1/chat/completions as JSON.

Owns their shape.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from common.messages import TokenLogprob
from router.api.answers import OpenAIFinish, OpenAIShape, TokenIds, WholeChoice, finish_of
from router.api.chat import ChatRequest
from router.api.logprobs import ChatLogprobs, PromptLogprobs
from router.outbox import ChoiceDelta


class _Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class _ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: _Delta
    finish_reason: OpenAIFinish | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET


class _ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class _ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: _ChatMessage
    finish_reason: OpenAIFinish
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET


@dataclass(slots=True, kw_only=True, eq=False)
class ChatShape(OpenAIShape[ChatRequest]):
    """/v1/chat/completions. A choice's first chunk says the role."""

    chunk_object: ClassVar[str] = "chat.completion.chunk"
    whole_object: ClassVar[str] = "chat.completion"

    def _chunk_choices(self, delta: ChoiceDelta, *, opens: bool) -> Iterable[msgspec.Struct]:
        index, ids = delta.index, self._ids(delta.token_ids)
        parts: list[msgspec.Struct] = [_ChunkChoice(index, _Delta(role="assistant", content=""))] if opens else []
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        if delta.text or logprobs is not None or ids:
            parts.append(_ChunkChoice(index, _Delta(content=delta.text), logprobs=logprobs, token_ids=ids))
        finish = finish_of(delta.ending)
        if finish is not None:
            parts.append(_ChunkChoice(index, _Delta(), finish))
        return parts

    def _whole_choice(self, index: int, choice: WholeChoice) -> msgspec.Struct:
        logprobs = self._logprobs(choice.logprobs) if self.asked.logprobs is not None else None
        return _ChatChoice(index, _ChatMessage(choice.text), choice.finish, logprobs, self._ids(choice.token_ids))

    def _prompt_logprobs(self, choices: Sequence[WholeChoice]) -> PromptLogprobs | msgspec.UnsetType:
        if self.asked.prompt_logprobs is None:
            return msgspec.UNSET
        return self.logprob_writer(self.asked.prompt_logprobs).prompt(choices[0].prompt_logprobs)

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
        return self.logprob_writer(self.asked.logprobs).chat(tokens)
