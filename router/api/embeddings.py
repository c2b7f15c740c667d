"""POST /v1/embeddings, and vLLM's and SGLang's own ways to ask for embeddings: POST /pooling and POST /encode.

Owns how embeddings are shortened, scaled and written. Fields: https://platform.openai.com/docs/api-reference/embeddings,
PoolingRequest of vLLM, and EmbeddingReqInput of SGLang.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from common.errors import BadRequest
from common.ids import ID_BYTES
from common.messages import Ending, Failed, Finished
from common.text.embedding import EmbeddingMode
from router.api.answers import AnswerShape, R, embedding_in, encoded
from router.api.bodies import object_in
from router.api.completions import CompletionRequest, PromptField, one_of_prompts, prompts_in, require_few_ids
from router.api.fields import CacheSalt, Label, ModelField, Priority, SamplingFields, Timeout, Unsupported, read_fields
from router.requests import ChoiceDelta

MAX_INPUTS = 256
"""Each is a request of its own for the fleet, and counts against --max-requests."""
EMBEDDING = Unsupported({"truncate_prompt_tokens": (), "add_special_tokens": (True,)})
"""vLLM's further fields."""
POOLING = Unsupported({**EMBEDDING.values, "task": ("embed",)})
Dimensions: TypeAlias = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    Meta(description="How many numbers: the model's own, or fewer if its config says is_matryoshka or matryoshka_dimensions."),
]


class PromptFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all requests have whose answers are numbers."""

    model: ModelField = None
    timeout: Timeout = None
    priority: Priority = 0
    cache_salt: CacheSalt = None
    user: Label = ""

    def sampling(self, served: str) -> SamplingFields:
        """served: the name of the model."""
        named: dict[str, Any] = {"timeout": self.timeout, "priority": self.priority, "cache_salt": self.cache_salt}
        return SamplingFields(model=self.model or served, temperature=0.0, ignore_eos=True, **named)


class EmbeddingFields(PromptFields, frozen=True, kw_only=True):
    """The body of POST /v1/embeddings and of POST /pooling."""

    input: str | list[str | int | list[int]]
    """One prompt or several, up to 256, each a text or its token ids."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64: the bytes of float32 numbers, little-endian."""
    dimensions: Dimensions = None


class EncodeFields(PromptFields, frozen=True, kw_only=True):
    """The body of POST /encode. Exactly one of text and input_ids must be there."""

    text: str | list[str] | None = None
    """One prompt, or a batch of prompts."""
    input_ids: list[int | list[int]] | None = None
    """Token ids of one prompt, or of each of a batch."""
    dimensions: Dimensions = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(CompletionRequest):
    """Prompts whose embeddings are wanted."""

    as_base64: bool = False
    """Whether the numbers of an embedding are sent as their bytes."""
    dimensions: int | None
    """How many of the numbers are sent; None: all."""
    is_batch: bool = True
    """Whether SGLang's answer is a list."""
    normalize: bool
    """Whether they are scaled to length 1."""


class OneEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding", "pooling"]
    index: int
    """The number of the prompt."""
    embedding: list[float] | str | msgspec.UnsetType = msgspec.UNSET
    data: list[float] | str | msgspec.UnsetType = msgspec.UNSET
    """What POST /pooling calls it."""


class PromptUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /v1/embeddings and of POST /pooling."""

    object: str = "list"
    data: list[OneEmbedding]
    model: str
    usage: PromptUsage


class EncodedMeta(msgspec.Struct, frozen=True):
    id: str
    prompt_tokens: int


class Encoded(msgspec.Struct, frozen=True):
    """The answer of POST /encode; a list of these for a batch."""

    embedding: list[float]
    meta_info: EncodedMeta


def read_embeddings(
    model: str, served: EmbeddingMode | None, body: bytes, context_tokens: int | None = None, unsupported: Unsupported = EMBEDDING
) -> EmbeddingRequest:
    """The body of POST /v1/embeddings. model: what is served. served: how it makes embeddings; None: it makes none. Raises
    BadRequest."""
    require_few_ids(body, context_tokens, "input")
    return embedding_request(model, served, read_fields(object_in(body, context_tokens), EmbeddingFields, unsupported))


def embedding_request(model: str, served: EmbeddingMode | None, fields: EmbeddingFields) -> EmbeddingRequest:
    """What these fields ask for. model, served: see `read_embeddings`. Raises BadRequest."""
    prompts = prompts_in(fields.input, "input", MAX_INPUTS)
    return _request(model, served, fields, prompts, "input", as_base64=fields.encoding_format == "base64")


def read_encode(model: str, served: EmbeddingMode | None, body: bytes, context_tokens: int | None = None) -> EmbeddingRequest:
    """The same for POST /encode."""
    require_few_ids(body, context_tokens, "input_ids")
    fields = read_fields(object_in(body, context_tokens), EncodeFields)
    prompts, field, is_batch = one_of_prompts(fields.text, fields.input_ids, MAX_INPUTS)
    return _request(model, served, fields, prompts, field, is_batch=is_batch)


def _request(
    model: str,
    served: EmbeddingMode | None,
    fields: EmbeddingFields | EncodeFields,
    prompts: tuple[PromptField, ...],
    prompt_field: str,
    *,
    as_base64: bool = False,
    is_batch: bool = True,
) -> EmbeddingRequest:
    if served is None:
        raise BadRequest(
            f"{model} is not served for embeddings: start the router with --pooling last, mean or cls, as the model was trained",
            field="model",
            code="unsupported_model",
        )
    if fields.dimensions is not None and not served.can_have(fields.dimensions):
        sizes = " or ".join(map(str, [*served.shorter_sizes, served.size or "its own"]))
        fewer = "at most " if served.is_matryoshka and not served.shorter_sizes else ""
        raise BadRequest(f"dimensions: send {fewer}{sizes}, or leave it out: the model gives no others", field="dimensions")
    return EmbeddingRequest(
        fields=fields.sampling(model),
        max_tokens=1,
        pooling=served.pooling,
        prompts=prompts,
        prompt_field=prompt_field,
        dimensions=fields.dimensions,
        normalize=served.normalize,
        as_base64=as_base64,
        is_batch=is_batch,
    )


def lacking(ending: Ending | None) -> Failed | None:
    """Why there are no numbers when their choice ends as if there were some."""
    if isinstance(ending, Finished) and not ending.embedding:
        return Failed(message="the request was aborted before it was answered", kind="aborted", status=409)
    return None


def embedding_of(choice: ChoiceDelta, request: EmbeddingRequest) -> NDArray[np.float32]:
    """The numbers, shortened and scaled as the request says."""
    numbers = np.frombuffer(embedding_in(choice), dtype="<f4")[: request.dimensions]
    length = float(np.linalg.norm(numbers.astype(np.float64)))
    return (numbers / length).astype("<f4") if request.normalize and length > 0 else numbers


class NumbersShape(AnswerShape[R]):
    """An answer of numbers, which is never a stream."""

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        raise AssertionError("numbers are not streamed")

    def last_events(self) -> bytes:
        raise AssertionError("numbers are not streamed")

    def failure(self, ending: Ending | None) -> Failed | None:
        is_cut = isinstance(ending, Finished) and ending.reason == "cancelled"
        return (lacking(ending) if is_cut or self.request.pooling else None) or super().failure(ending)

    @property
    def prompt_usage(self) -> PromptUsage:
        return PromptUsage(self.accepted.prompt_tokens, self.accepted.prompt_tokens)


@dataclass(slots=True, kw_only=True, eq=False)
class EmbeddingShape(NumbersShape[EmbeddingRequest]):
    """/v1/embeddings"""

    def whole(self, choices: Sequence[ChoiceDelta]) -> bytes:
        data = [encoded(self._one(index, self._written(choice))) for index, choice in enumerate(choices)]
        return msgspec.json.encode(EmbeddingBody(data=data, model=self.model, usage=self.prompt_usage))

    def _one(self, index: int, numbers: list[float] | str) -> OneEmbedding:
        return OneEmbedding(object="embedding", index=index, embedding=numbers)

    def _written(self, choice: ChoiceDelta) -> list[float] | str:
        numbers = embedding_of(choice, self.request)
        if self.request.as_base64:
            return base64.b64encode(numbers.tobytes()).decode()
        written: list[float] = numbers.tolist()
        return written


class PoolingShape(EmbeddingShape):
    """/pooling"""

    def _one(self, index: int, numbers: list[float] | str) -> OneEmbedding:
        return OneEmbedding(object="pooling", index=index, data=numbers)


class EncodeShape(EmbeddingShape):
    """/encode"""

    def whole(self, choices: Sequence[ChoiceDelta]) -> bytes:
        made: list[Any] = []
        for choice, spec in zip(choices, self.accepted.specs, strict=True):
            meta = EncodedMeta(self.id, len(spec.prompt) // ID_BYTES)
            made.append(encoded({"embedding": self._written(choice), "meta_info": meta}))
        return msgspec.json.encode(made if self.request.is_batch else made[0])
