"""The answers of GET /v1/models.

Owns their shape, which is OpenAI's with vLLM's `max_model_len`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: Annotated[str, Meta(description="The name that requests use.")]
    object: Literal["model"] = "model"
    created: Annotated[int, Meta(description="When the router started, in seconds since 1970.")]
    owned_by: str = "tandem"
    max_model_len: Annotated[int, Meta(description="Longest prompt and answer together, in tokens.")]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
