"""The answers of POST /v1/completions as JSON.

Owns their shape.
"""

from collections.abc import Iterable

import msgspec

from router.api.answers import AnswerShape, OpenAIFinish, TokenIds, WholeChoice


class _TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: OpenAIFinish | None = None
    logprobs: None = None
    token_ids: TokenIds = msgspec.UNSET


class CompletionShape(AnswerShape):
    """/v1/completions"""

    __slots__ = ()
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def _chunk_choices(
        self, index: int, text: str, token_ids: TokenIds, finish: OpenAIFinish | None, *, opens: bool
    ) -> Iterable[msgspec.Struct]:
        parts: list[msgspec.Struct] = [_TextChoice(index, text, token_ids=token_ids)] if text or token_ids else []
        if finish is not None:
            parts.append(_TextChoice(index, "", finish))
        return parts

    def _whole_choice(self, index: int, choice: WholeChoice, token_ids: TokenIds) -> msgspec.Struct:
        return _TextChoice(index, "".join(choice.texts), choice.finish_reason, token_ids=token_ids)
