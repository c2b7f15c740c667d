"""POST /v1/embeddings: its fields and its answer.

Owns how embeddings are scaled and written. Fields: https://platform.openai.com/docs/api-reference/embeddings.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from common.errors import BadRequest
from common.messages import Ending, Failed, Finished
from common.text.embedding import EmbeddingMode
from router.api.answers import AnswerShape, embedding_in, encoded
from router.api.bodies import object_in
from router.api.completions import CompletionRequest, prompts_in, require_few_ids
from router.api.fields import (
    CacheSalt,
    Label,
    Model,
    Priority,
    SamplingFields,
    Timeout,
    Unsupported,
    read_fields,
)
from router.outbox import ChoiceDelta

MAX_INPUTS = 256
"""Each is a request of its own for the fleet, and counts against --max-requests."""
EMBEDDING = Unsupported({"truncate_prompt_tokens": (), "add_special_tokens": (True,)})
"""vLLM's further fields."""


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
    """Prompts whose embeddings are wanted."""

    as_base64: bool
    """Whether the numbers of an embedding are sent as their bytes."""
    normalize: bool
    """Whether they are scaled to length 1."""


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
    """The body of POST /v1/embeddings. Raises BadRequest."""
    require_few_ids(body, context_tokens, "input")
    return embedding_request(model, served, read_fields(object_in(body, context_tokens), EmbeddingFields, EMBEDDING))


def embedding_request(model: str, served: EmbeddingMode | None, fields: EmbeddingFields) -> EmbeddingRequest:
    """What these fields ask for. model: what is served. served: how it makes embeddings; None: it makes none. Raises
    BadRequest."""
    if served is None:
        raise BadRequest(
            f"{model} is not served for embeddings: start the router with --pooling last, mean or cls, as the model was trained",
            field="model",
            code="unsupported_model",
        )
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
        max_tokens=1,
        pooling=served.pooling,
        prompts=prompts_in(fields.input, "input", MAX_INPUTS),
        prompt_field="input",
        as_base64=fields.encoding_format == "base64",
        normalize=served.normalize,
    )


def lacking(ending: Ending | None) -> Failed | None:
    """Why there is no embedding when its choice ends as if there was one."""
    if isinstance(ending, Finished) and not ending.embedding:
        return Failed(message="the request was aborted before it had its embedding", kind="aborted", status=409)
    return None


def embedding_of(choice: ChoiceDelta, request: EmbeddingRequest) -> NDArray[np.float32]:
    """The numbers, scaled as the request says."""
    numbers = np.frombuffer(embedding_in(choice), dtype="<f4")
    length = float(np.linalg.norm(numbers.astype(np.float64)))
    return (numbers / length).astype("<f4") if request.normalize and length > 0 else numbers


@dataclass(slots=True, kw_only=True, eq=False)
class EmbeddingShape(AnswerShape[EmbeddingRequest]):
    """/v1/embeddings"""

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        raise AssertionError("embeddings are not streamed")

    def last_events(self) -> bytes:
        raise AssertionError("embeddings are not streamed")

    def failure(self, ending: Ending | None) -> Failed | None:
        return lacking(ending) or super(EmbeddingShape, self).failure(ending)

    def whole(self, choices: Sequence[ChoiceDelta]) -> bytes:
        data = [encoded(OneEmbedding(index=index, embedding=self._written(choice))) for index, choice in enumerate(choices)]
        tokens = self.accepted.prompt_tokens
        return msgspec.json.encode(EmbeddingBody(data=data, model=self.model, usage=EmbeddingUsage(tokens, tokens)))

    def _written(self, choice: ChoiceDelta) -> list[float] | str:
        numbers = embedding_of(choice, self.request)
        if self.request.as_base64:
            return base64.b64encode(numbers.tobytes()).decode()
        written: list[float] = numbers.tolist()
        return written
