"""The answers of POST /v1/completions as JSON.

Owns their shape, and the prompt that `echo` puts in front of them.

POST /v1/embeddings: its body, and its answer.

Owns their fields, and how embeddings are scaled and written. Fields: https://platform.openai.com/docs/api-reference/embeddings.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from common.errors import BadRequest
from common.ids import unpack_ids
from common.messages import Ending, Failed, Finished, TokenLogprob
from common.text.embedding import EmbeddingMode
from router.api.answers import AnswerShape, OpenAIFinish, OpenAIShape, TokenIds, WholeChoice, encoded, finish_of
from router.api.completions import CompletionRequest, prompts_in, require_few_ids
from router.api.fields import CacheSalt, Label, Priority, SamplingFields, Timeout, convert, drop_neutral, object_in
from router.api.logprobs import CompletionLogprobs, PromptLogprobs, TextPlace
from router.api.routes import Model
from router.outbox import ChoiceDelta


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

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        if self.asked.hides_answer:
            ending = delta.ending if isinstance(delta.ending, Failed | None) else Finished(reason="length")
            delta = replace(delta, text="", token_ids=(), logprobs=(), ending=ending)
        return super(CompletionShape, self).events(delta, opens=opens)

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        if self.asked.hides_answer:
            ending = Finished(reason="length")
            choices = [
                WholeChoice(prompt_logprobs=choice.prompt_logprobs, cached_tokens=choice.cached_tokens, ending=ending)
                for choice in choices
            ]
        return super(CompletionShape, self).whole(choices)

    def _chunk_choices(self, delta: ChoiceDelta, *, opens: bool) -> Iterable[msgspec.Struct]:
        index, parts = delta.index, list[msgspec.Struct]()
        if opens and self.asked.echo:
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

    def _whole_choice(self, index: int, choice: WholeChoice) -> msgspec.Struct:
        asked = self.asked
        prompt: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
        if asked.fields.prompt_logprobs is not None:
            prompt = self.logprob_writer(asked.fields.prompt_logprobs).prompt(choice.prompt_logprobs)
        echo = self.accepted.echoes[index] if asked.echo else ""
        logprobs = self._logprobs(index, choice.logprobs, choice.prompt_logprobs if asked.echo else None)
        return TextChoice(index, echo + choice.text, choice.finish, logprobs, self._ids(choice.token_ids), prompt)

    def _logprobs(
        self, index: int, tokens: Sequence[TokenLogprob], prompt: Sequence[TokenLogprob] | None = None
    ) -> CompletionLogprobs | None:
        """The next tokens of a choice. prompt: its tokens from the second on, if they come first."""
        if self.asked.logprobs is None:
            return None
        echoed: tuple[int, Sequence[TokenLogprob], str] | None = None
        if prompt is not None:
            echoed = int(unpack_ids(self.accepted.specs[index].prompt[:4])[0]), prompt, self.accepted.echoes[index]
        place = self._places.setdefault(index, TextPlace(self.token_texts))
        skips = self.asked.fields.skip_special_tokens
        return self.logprob_writer(self.asked.logprobs).completion(tokens, place, skips_special=skips, prompt=echoed)


MAX_INPUTS = 256
"""Each is a request of its own for the fleet, and counts against --max-requests."""
NEUTRAL_EMBEDDING_VALUES = {"truncate_prompt_tokens": (), "add_special_tokens": (True,)}
"""Of vLLM's further fields, the values with which they ask for nothing."""


class EmbeddingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings."""

    model: Model = None
    input: Annotated[
        str | list[str | int | list[int]], Meta(description="One prompt or several, up to 256, each a text or its token ids.")
    ]
    encoding_format: Annotated[
        Literal["float", "base64"], Meta(description="base64: the bytes of float32 numbers, little-endian.")
    ] = "float"
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Only the model's own number: embeddings are not shortened.")
    ] = None
    timeout: Timeout = None
    priority: Priority = 0
    cache_salt: CacheSalt = None
    user: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(CompletionRequest):
    """as_base64: the numbers of an embedding are sent as their bytes. normalize: they are scaled to length 1."""

    as_base64: bool
    normalize: bool


class OneEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "embedding"
    index: Annotated[int, Meta(description="The number of the prompt.")]
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /v1/embeddings."""

    object: str = "list"
    data: list[OneEmbedding]
    model: str
    usage: EmbeddingUsage


def read_embeddings(model: str, served: EmbeddingMode | None, body: bytes, context_tokens: int | None = None) -> EmbeddingRequest:
    """The body of POST /v1/embeddings. model: what is served. served: how it makes embeddings; None: it makes none. Raises
    BadRequest."""
    if served is None:
        raise BadRequest(
            f"{model} is not served for embeddings: start the router with --pooling last, mean or cls, as the model was trained",
            field="model",
            code="unsupported_model",
        )
    if context_tokens is not None and len(body) > context_tokens:
        require_few_ids(body, context_tokens, "input")
    known = EmbeddingFields.__struct_encode_fields__
    fields = convert(drop_neutral(object_in(body, context_tokens), NEUTRAL_EMBEDDING_VALUES, known), EmbeddingFields)
    if fields.dimensions not in (None, served.size):
        own = "" if served.size is None else f" or send {served.size}"
        raise BadRequest(f"dimensions: embeddings are not shortened: leave it out{own}", field="dimensions")
    common = SamplingFields(
        model=fields.model or model,
        timeout=fields.timeout,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        temperature=0.0,
    )
    return EmbeddingRequest(
        fields=common,
        stop=(),
        max_tokens=1,
        pooling=served.pooling,
        prompts=prompts_in(fields.input, "input", MAX_INPUTS),
        prompt_field="input",
        as_base64=fields.encoding_format == "base64",
        normalize=served.normalize,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class EmbeddingShape(AnswerShape[EmbeddingRequest]):
    """/v1/embeddings"""

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        raise AssertionError("embeddings are not streamed")

    def last_events(self) -> bytes:
        raise AssertionError("embeddings are not streamed")

    def failure(self, ending: Ending | None) -> Failed | None:
        if isinstance(ending, Finished) and not ending.embedding:
            return Failed(message="the request was aborted before it had its embedding", kind="aborted", status=409)
        return super(EmbeddingShape, self).failure(ending)

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        data = [encoded(OneEmbedding(index=index, embedding=self._written(choice))) for index, choice in enumerate(choices)]
        tokens = self.accepted.prompt_tokens
        return msgspec.json.encode(EmbeddingBody(data=data, model=self.model, usage=EmbeddingUsage(tokens, tokens)))

    def _written(self, choice: WholeChoice) -> list[float] | str:
        numbers = np.frombuffer(choice.ending.embedding, dtype="<f4")
        length = float(np.linalg.norm(numbers.astype(np.float64)))
        if self.asked.normalize and length > 0:
            numbers = (numbers / length).astype("<f4")
        if self.asked.as_base64:
            return base64.b64encode(numbers.tobytes()).decode()
        written: list[float] = numbers.tolist()
        return written
