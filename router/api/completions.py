"""POST /v1/completions: its fields and its answer.

Owns the prompts, given as texts or token ids, and the prompt that `echo` puts in front of the answer. Fields:
https://platform.openai.com/docs/api-reference/completions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from common.ids import unpack_ids
from common.messages import TokenLogprob
from router.api.answers import OpenAIFinish, OpenAIShape, TokenIds, finish_of
from router.api.bodies import MAX_PROMPTS, object_in
from router.api.errors import ContextExceeded, no_room
from router.api.fields import ONLY_OPENAI, STREAM_OPTIONS, ReadRequest, SamplingFields, TopLogprobs, Unsupported, read_fields
from router.api.logprobs import CompletionLogprobs, PromptLogprobs, TextPlace
from router.api.structured import grammar_of
from router.requests import ChoiceDelta

COMPLETION_MAX_TOKENS = 16
"""Length of an answer to /v1/completions when the request gives none, as at OpenAI."""


COMPLETION = Unsupported(
    {**ONLY_OPENAI, "suffix": ("",)},
    inside={"stream_options": STREAM_OPTIONS},
)


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """A query and a document, of which a reranker's chat template makes a prompt. arguments: what else the template gets."""

    query: str
    document: str
    arguments: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.query) + len(self.document) + sum(map(len, self.arguments.values()))

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]:
        return {"role": "query", "content": self.query}, {"role": "document", "content": self.document}


PromptField: TypeAlias = str | tuple[int, ...] | PairPrompt


class CompletionFields(SamplingFields, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    """One prompt or several, each a text or its token ids."""
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """Longest answer, in tokens; without it: 16. With `echo`, 0: only the prompt."""
    echo: bool = False
    """Send the prompt in front of the answer; its logprobs too, with `logprobs`."""
    logprobs: TopLogprobs | None = None
    """Send how likely each token was, and so many of the likeliest tokens in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ReadRequest):
    """Prompts to be continued, whatever their API."""

    prompts: tuple[PromptField, ...]
    """Texts or token ids. Each gets `n` choices."""
    default_max_tokens: int = COMPLETION_MAX_TOKENS

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.fields.n


def read_completion(body: bytes, context_tokens: int | None = None) -> CompletionRequest:
    """The body of POST /v1/completions. Raises BadRequest, for far more token ids than the context holds before they are read."""
    require_few_ids(body, context_tokens)
    fields = read_fields(object_in(body, context_tokens), CompletionFields, COMPLETION)
    if fields.max_tokens == 0 and not fields.echo:
        raise BadRequest("max_tokens must be at least 1, or 0 with echo=true", field="max_tokens")
    prompt_logprobs = fields.prompt_logprobs
    if fields.echo and fields.logprobs is not None:
        prompt_logprobs = max(fields.logprobs, prompt_logprobs or 0)
    grammar, grammar_field = grammar_of(fields)
    return CompletionRequest(
        fields=fields,
        max_tokens=fields.max_tokens if fields.max_tokens != 0 else 1,
        logprobs=fields.logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        grammar_field=grammar_field,
        prompts=prompts_in(fields.prompt, "prompt"),
        echo=fields.echo,
        hides_answer=fields.max_tokens == 0,
    )


def prompts_in(prompt: str | list[str | int | list[int]], field: str, most: int = MAX_PROMPTS) -> tuple[PromptField, ...]:
    """The prompts of a field that holds one or several, but at most so many. Raises BadRequest."""
    if isinstance(prompt, str):
        return (prompt,)
    ids = [part for part in prompt if isinstance(part, int)]
    prompts: list[PromptField] = [part if isinstance(part, str) else tuple(part) for part in prompt if not isinstance(part, int)]
    if not prompt or (ids and prompts):
        fix = "send one prompt or a list of prompts, each a string or a list of token ids"
        raise BadRequest(f"{field} is {'a mixture of prompts and token ids' if prompt else 'empty'}: {fix}", field=field)
    if ids:
        return (tuple(ids),)
    if len(prompts) > most:
        raise BadRequest(f"{field} holds {len(prompts)} prompts: send at most {most}", field=field)
    return tuple(prompts)


def one_of_prompts(
    text: str | list[str] | None, input_ids: list[int | list[int]] | None, most: int = MAX_PROMPTS
) -> tuple[tuple[PromptField, ...], str, bool]:
    """The prompts of SGLang's clients, the field that held them, and whether it was a list of prompts. Raises BadRequest."""
    if (text is None) == (input_ids is None):
        raise BadRequest("text and input_ids: send one of them, and only one", field="text")
    if input_ids is not None:
        return prompts_in([*input_ids], "input_ids", most), "input_ids", not isinstance(input_ids[0], int)
    assert text is not None
    return prompts_in(text if isinstance(text, str) else [*text], "text", most), "text", not isinstance(text, str)


_Fields: TypeAlias = dict[str, msgspec.Raw]


def require_few_ids(body: bytes, context_tokens: int | None, field: str = "prompt") -> None:
    """Refuse one prompt of more token ids than the context holds. Ids are counted by their commas: objects take long to make, and
    nobody else runs meanwhile. What is no such prompt is left to the reader. field: where the prompt is."""
    if context_tokens is None or len(body) <= context_tokens:
        return
    try:
        prompt = bytes(msgspec.json.decode(body, type=_Fields).get(field, b""))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if prompt[:1] != b"[" or prompt[1:64].lstrip()[:1] in (b"[", b'"', b"{"):
        return
    ids = prompt.count(b",") + 1
    if ids > context_tokens:
        raise ContextExceeded(context_tokens, no_room(field, ids), field)


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: OpenAIFinish | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


@dataclass(slots=True, kw_only=True, eq=False)
class CompletionShape(OpenAIShape[CompletionRequest]):
    """/v1/completions"""

    chunk_object: ClassVar[str] = "text_completion"
    whole_object: ClassVar[str] = "text_completion"

    _places: dict[int, TextPlace] = field(default_factory=dict, init=False)
    """For each choice: behind the text of the tokens that were written with their logprobs."""

    def _chunk_choices(self, delta: ChoiceDelta, *, opens: bool) -> Iterable[msgspec.Struct]:
        index, parts = delta.index, list[msgspec.Struct]()
        if opens and self.request.echo:
            logprobs = self._logprobs(index, (), delta.prompt_logprobs)
            parts.append(TextChoice(index, self.accepted.echoes[index], None, logprobs))
        logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        ids = self._ids(delta.token_ids)
        if delta.text or logprobs is not None or ids:
            parts.append(TextChoice(index, delta.text, None, logprobs, ids))
        finish = finish_of(delta.ending)
        if finish is not None:
            parts.append(TextChoice(index, "", finish))
        return parts

    def _whole_choice(self, index: int, choice: ChoiceDelta) -> msgspec.Struct:
        request = self.request
        prompt: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
        if request.fields.prompt_logprobs is not None:
            prompt = self.logprob_writer(request.fields.prompt_logprobs).prompt(choice.prompt_logprobs)
        echo = self.accepted.echoes[index] if request.echo else ""
        logprobs = self._logprobs(index, choice.logprobs, choice.prompt_logprobs if request.echo else None)
        return TextChoice(index, echo + choice.text, finish_of(choice.ending), logprobs, self._ids(choice.token_ids), prompt)

    def _logprobs(
        self, index: int, tokens: Sequence[TokenLogprob], prompt: Sequence[TokenLogprob] | None = None
    ) -> CompletionLogprobs | None:
        """The next tokens of a choice. prompt: its tokens from the second on, if they come first."""
        if self.request.logprobs is None:
            return None
        echoed: tuple[int, Sequence[TokenLogprob], str] | None = None
        if prompt is not None:
            echoed = int(unpack_ids(self.accepted.specs[index].prompt[:4])[0]), prompt, self.accepted.echoes[index]
        skips = self.request.fields.skip_special_tokens
        if index not in self._places:
            ids = unpack_ids(self.accepted.specs[index].prompt)
            begins = prompt is not None or (
                skips and all(self.token_texts.is_special(int(token_id)) for token_id in reversed(ids))
            )
            self._places[index] = TextPlace(self.token_texts, begins=begins)
        place = self._places[index]
        return self.logprob_writer(self.request.logprobs).completion(tokens, place, skips_special=skips, prompt=echoed)
