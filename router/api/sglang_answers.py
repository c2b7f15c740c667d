"""The answers of SGLang's POST /generate as JSON. Each event of a stream repeats the whole answer so far.

Owns their shape. Does not know what was asked beyond the request in its normal form.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.ids import unpack_ids
from common.messages import Finished, TokenLogprob
from router.api.answers import DONE, AnswerShape, WholeChoice, event
from router.api.logprobs import finite
from router.api.sglang import GenerateRequest
from router.outbox import ChoiceDelta
from router.requests import TOKEN_BYTES

Logprob: TypeAlias = tuple[float | None, int, str | None]
"""Log probability, token id, and the token's text if it is asked for. The first token of those of a prompt has no number."""
_encode = msgspec.json.Encoder().encode


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    type: Literal["stop", "length", "abort"]
    matched: Annotated[str | int | None, Meta(description="The stop string or token id that ended the answer.")] = None
    length: Annotated[int | None, Meta(description="Tokens of an answer that became too long.")] = None
    message: Annotated[str | None, Meta(description="Why the answer was aborted.")] = None


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    input_token_logprobs: list[Logprob] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[Logprob] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[Logprob] | None] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[Logprob] | None] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /generate; a list of these for a batch, or for `n` above 1. index: in the events of such a stream."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET


@dataclass(slots=True, kw_only=True, eq=False)
class GenerateShape(AnswerShape[GenerateRequest]):
    """/generate"""

    _so_far: dict[int, WholeChoice] = field(default_factory=dict, init=False)

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        so_far = self._so_far.setdefault(delta.index, WholeChoice())
        so_far.add(delta)
        so_far.texts[:] = [so_far.text]
        is_over = isinstance(delta.ending, Finished)
        return event(_encode(self._generated(delta.index, so_far, is_over=is_over, in_stream=True)))

    def last_events(self) -> bytes:
        return DONE

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        all_of_them = [self._generated(index, choice, is_over=True) for index, choice in enumerate(choices)]
        return _encode(all_of_them if self.asked.is_batch else all_of_them[0])

    def _generated(self, index: int, choice: WholeChoice, *, is_over: bool, in_stream: bool = False) -> Generated:
        if self.asked.hides_answer:
            choice = WholeChoice(prompt_logprobs=choice.prompt_logprobs, ending=Finished(reason="length"))
        prompt = self.accepted.specs[index].prompt
        top, wants_top = msgspec.UNSET, self.asked.logprobs
        info = MetaInfo(
            id=self.asked.choice_ids(self.id, len(self.accepted.specs))[index],
            finish_reason=self._finish(choice) if is_over else None,
            prompt_tokens=len(prompt) // TOKEN_BYTES,
            completion_tokens=len(choice.token_ids),
            input_token_logprobs=top if wants_top is None else self._of_prompt(prompt, choice),
            output_token_logprobs=top if wants_top is None else [self._own(token) for token in choice.logprobs],
            input_top_logprobs=self._tops_of_prompt(choice) if wants_top else top,
            output_top_logprobs=[self._top(token) for token in choice.logprobs] if wants_top else top,
        )
        numbered = index if in_stream and self.asked.is_batch else msgspec.UNSET
        return Generated(text=choice.text, output_ids=choice.token_ids, meta_info=info, index=numbered)

    def _finish(self, choice: WholeChoice) -> FinishReason:
        match choice.ending.reason:
            case "cancelled":
                return FinishReason(type="abort", message="aborted by POST /abort_request")
            case "length":
                return FinishReason(type="length", length=len(choice.token_ids))
            case "stop":
                return FinishReason(type="stop", matched=choice.ending.matched)

    def _of_prompt(self, prompt: bytes, choice: WholeChoice) -> list[Logprob]:
        """As in SGLang, the first of them has no log probability, wherever it stands."""
        start = self.asked.logprob_start
        if start < 0 or start * TOKEN_BYTES >= len(prompt):
            return []
        first = int(unpack_ids(prompt[start * TOKEN_BYTES : (start + 1) * TOKEN_BYTES])[0])
        return [self._entry(None, first), *(self._own(token) for token in choice.prompt_logprobs[start:])]

    def _tops_of_prompt(self, choice: WholeChoice) -> list[list[Logprob] | None]:
        if self.asked.logprob_start < 0:
            return []
        return [None, *(self._top(token) for token in choice.prompt_logprobs[self.asked.logprob_start :])]

    def _own(self, token: TokenLogprob) -> Logprob:
        return self._entry(token.logprob, token.token_id)

    def _top(self, token: TokenLogprob) -> list[Logprob]:
        return [self._entry(logprob, token_id) for token_id, logprob in token.top]

    def _entry(self, logprob: float | None, token_id: int) -> Logprob:
        text = self.token_texts.text(token_id) if self.asked.with_texts else None
        return None if logprob is None else finite(logprob), token_id, text
