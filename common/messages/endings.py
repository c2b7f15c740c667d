"""How a request ends: as it should, or with an error.

Owns the two endings. Does not know who ends a request or what becomes of the next attempt.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from common.errors import BadRequest, TandemError
from common.messages.base import Message
from common.ranges import TokenId

FinishReason = Literal["stop", "length", "cancelled"]


class Finished(Message, frozen=True):
    """The request ended as it should."""

    reason: FinishReason
    """"stop": a stop string or stop token. "length": enough tokens. "cancelled": the client went away."""
    matched: str | TokenId | None = None
    """The stop string or the stop token id that ended it; None when neither did."""
    embedding: bytes = b""
    """The answer, if the request asks for the prompt's embedding (`SamplingParams.pooling`): float32, little-endian."""


class Failed(Message, frozen=True):
    """The request could not be finished. `kind`, `status` and `retryable` are those of the error tree (`common.errors`).

    From an instance it ends one attempt: if it is retryable, the router resumes the request as the next attempt.
    """

    message: str
    """For the client: what went wrong."""
    kind: str = "instance_error"
    """Type of the error, as in the API's error object."""
    status: Annotated[int, Meta(ge=400, le=599)] = 500
    """HTTP status."""
    retryable: bool = False
    """The same request may succeed when it is tried again."""
    field: str | None = None
    """What the client must change, if the request is at fault."""

    @classmethod
    def of(cls, error: TandemError) -> "Failed":
        field = error.field if isinstance(error, BadRequest) else None
        return cls(message=str(error), kind=error.kind, status=error.status, retryable=error.retryable, field=field)


Ending: TypeAlias = Finished | Failed
