"""The answers of SGLang's POST /generate as JSON. Each event of a stream repeats the whole answer so far.

Owns their shape. Does not know what was asked beyond the request in its normal form.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.ids import ID_BYTES, unpack_ids
from common.messages import Finished, TokenLogprob
from router.api.answers import DONE, AnswerShape, WholeChoice, encoded, event
from router.api.logprobs import finite
from router.api.sglang import GenerateRequest
from router.outbox import ChoiceDelta

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
    cached_tokens: Annotated[int, Meta(description="Tokens of the prompt whose KV was there already.")]
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


class _Growing:
    """A JSON list that grows. What is in it is not encoded again."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, values: Sequence[object]) -> None:
        if values:
            self._items += (b"," if self._items else b"") + _encode(values)[1:-1]

    @property
    def json(self) -> Any:
        """To stand in the list's place."""
        return msgspec.Raw(b"".join((b"[", self._items, b"]")))


@dataclass(slots=True, eq=False)
class _Written:
    """What is written of one choice, in JSON: each event repeats all of it. text: without its quotation marks."""

    tokens: int = 0
    cached_tokens: int = 0
    text: bytearray = field(default_factory=bytearray)
    ids: _Growing = field(default_factory=_Growing)
    logprobs: _Growing = field(default_factory=_Growing)
    tops: _Growing = field(default_factory=_Growing)
    prompt_logprobs: _Growing = field(default_factory=_Growing)
    prompt_tops: _Growing = field(default_factory=_Growing)


@dataclass(slots=True, kw_only=True, eq=False)
class GenerateShape(AnswerShape[GenerateRequest]):
    """/generate"""

    _so_far: dict[int, _Written] = field(default_factory=dict, init=False)
    _choice_ids: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._choice_ids = self.asked.choice_ids(self.id, len(self.accepted.specs))

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        return event(_encode(self._generated(delta.index, delta, in_stream=True)))

    def last_events(self) -> bytes:
        return DONE

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        all_of_them = [encoded(self._generated(index, choice)) for index, choice in enumerate(choices)]
        return _encode(all_of_them if self.asked.is_batch else all_of_them[0])

    def _generated(self, index: int, news: ChoiceDelta | WholeChoice, *, in_stream: bool = False) -> Generated:
        """The choice so far, with this news of it."""
        prompt = self.accepted.specs[index].prompt
        written = self._so_far.get(index)
        if written is None:
            written = self._so_far[index] = _Written()
            self._begin_prompt(written, prompt)
        self._add(written, news)
        left_out, tops = msgspec.UNSET, self.asked.logprobs
        info = MetaInfo(
            id=self._choice_ids[index],
            finish_reason=self._finish(news.ending, written.tokens) if isinstance(news.ending, Finished) else None,
            prompt_tokens=len(prompt) // ID_BYTES,
            completion_tokens=written.tokens,
            cached_tokens=written.cached_tokens,
            input_token_logprobs=left_out if tops is None else written.prompt_logprobs.json,
            output_token_logprobs=left_out if tops is None else written.logprobs.json,
            input_top_logprobs=written.prompt_tops.json if tops else left_out,
            output_top_logprobs=written.tops.json if tops else left_out,
        )
        numbered = index if in_stream and self.asked.is_batch else msgspec.UNSET
        text: Any = msgspec.Raw(b"".join((b'"', written.text, b'"')))
        return Generated(text=text, output_ids=written.ids.json, meta_info=info, index=numbered)

    def _begin_prompt(self, written: _Written, prompt: bytes) -> None:
        """As in SGLang, the first of a prompt's log probabilities has no number, wherever it stands."""
        start = self.asked.logprob_start
        if 0 <= start * ID_BYTES < len(prompt):
            first = int(unpack_ids(prompt[start * ID_BYTES : (start + 1) * ID_BYTES])[0])
            written.prompt_logprobs.extend([self._entry(None, first)])
            written.prompt_tops.extend([None])

    def _add(self, written: _Written, news: ChoiceDelta | WholeChoice) -> None:
        written.cached_tokens += news.cached_tokens
        if news.prompt_logprobs and self.asked.logprob_start >= 0:
            of_prompt = news.prompt_logprobs[self.asked.logprob_start :]
            written.prompt_logprobs.extend([self._own(token) for token in of_prompt])
            if self.asked.logprobs:
                written.prompt_tops.extend([self._top(token) for token in of_prompt])
        if self.asked.hides_answer:
            return
        written.tokens += len(news.token_ids)
        written.text += _encode(news.text)[1:-1]
        written.ids.extend(news.token_ids)
        written.logprobs.extend([self._own(token) for token in news.logprobs])
        if self.asked.logprobs:
            written.tops.extend([self._top(token) for token in news.logprobs])

    def _finish(self, ending: Finished, tokens: int) -> FinishReason:
        if self.asked.hides_answer:
            return FinishReason(type="length", length=0)
        match ending.reason:
            case "cancelled":
                return FinishReason(type="abort", message="aborted by POST /abort_request")
            case "length":
                return FinishReason(type="length", length=tokens)
            case "stop":
                return FinishReason(type="stop", matched=ending.matched)

    def _own(self, token: TokenLogprob) -> Logprob:
        return self._entry(token.logprob, token.token_id)

    def _top(self, token: TokenLogprob) -> list[Logprob]:
        return [self._entry(logprob, token_id) for token_id, logprob in token.top]

    def _entry(self, logprob: float | None, token_id: int) -> Logprob:
        text = self.token_texts.text(token_id) if self.asked.with_texts else None
        return None if logprob is None else finite(logprob), token_id, text
