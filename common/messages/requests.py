"""Requests: the router has them served, asks about them and cancels them, and each attempt ends as it should or with an error.

Owns what a router and an instance say about a request. Does not know KV or text, or what becomes of the next attempt.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.addresses import OWNER_CHARS
from common.errors import BadRequest, TandemError, Unavailable
from common.ids import AttemptId, Incarnation, InstanceId, Life, Variant, check_ids
from common.messages.base import UNNAMED, Message
from common.ranges import Count, Integer, Seconds, TokenId
from common.sampling_params import SamplingParams

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
        message = str(error).encode(errors="replace").decode()  # a name from a file may have half a character, which has no UTF-8
        return cls(message=message, kind=error.kind, status=error.status, retryable=error.retryable, field=field)

    def to_error(self, message: str) -> TandemError:
        """What it was made of, with another message: BadRequest, or else Unavailable."""
        return BadRequest(message, field=self.field) if self.status == BadRequest.status else Unavailable(message)


Ending: TypeAlias = Finished | Failed


SALT_CHARS = 128

Salt: TypeAlias = Annotated[str, msgspec.Meta(max_length=SALT_CHARS)]
"""Requests with different salts share no cached KV."""


Owner: TypeAlias = Annotated[str, msgspec.Meta(max_length=OWNER_CHARS)]
"""The name of an API key, the same at all routers. It is no secret."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """When a request is to be served. Durations and not times, because clocks differ between hosts."""

    priority: Integer = 0
    """The lower, the earlier (as in vLLM)."""
    age_s: Seconds = 0.0
    """Time since the client's request arrived, at the moment of sending. Among equal priorities the older is earlier."""
    timeout_s: Seconds | None = None
    """What is left of its time; None: only the receiver's own limit holds."""
    owner: Owner = ""
    """Whose it is: where requests wait, owners take turns. "": it came without a key."""


class Generate(Message, frozen=True):
    """router → instance: serve this request."""

    key: AttemptId
    prompt: bytes
    """Packed token ids; of a resumed answer the last `first` of them are the answer's tokens so far."""
    sampling: SamplingParams
    """`max_new_tokens` counts from token `first`."""
    decodes: tuple[InstanceId, ...] = ()
    """Where it may be handed off, best first: the receiver asks them for a reservation when it admits the request. None: the
    receiver serves it alone (local prefill, or one token)."""
    first: Count = 0
    """Number of the first token to emit; above 0 when an answer is resumed."""
    terms: Terms = Terms()
    """When to serve it."""
    salt: Salt = ""
    """Its KV is found in prefix caches only by requests with the same salt, and it finds only theirs."""
    variant: Variant = Variant()
    """What is to compute it. An instance with other weights refuses it."""
    incarnation: Incarnation = UNNAMED
    """The life that is meant."""

    def __post_init__(self) -> None:
        check_ids(self.prompt)


class Placed(Message, frozen=True):
    """prefill → router: this decode instance has granted the reservation. It stays the attempt's decode instance."""

    id: InstanceId
    incarnation: Incarnation
    key: AttemptId
    decode: Life
    """The life that granted."""


class Probe(Message, frozen=True):
    """router → instance: I have heard nothing of these requests for a while. What do you know of them?"""

    keys: tuple[AttemptId, ...]
    """The requests."""
    round: Count
    """Counts the times that this router asked, from 1 on; the answers repeat it."""


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """Where a request stands on an instance."""

    key: AttemptId
    next_token: Count | None
    """Number of the token that it emits next; None: the instance does not serve the key, or does so no longer."""
    decode: Life | None = None
    """From a prefill instance: as in Placed, in case that was lost. None: no reservation was granted, or it is forgotten."""
    waits: bool = False
    """Set by the detokenizer: tokens wait there for their ExpectAnswer."""


class Probed(Message, frozen=True):
    """instance → detokenizer → router: the answer to a Probe, one for each detokenizer that its requests have. It follows the
    tokens on their way. So when it is there, what the instance sent before is there too, or was lost."""

    id: InstanceId
    incarnation: Incarnation
    standings: tuple[Standing, ...]
    """One for each key of the Probe."""
    round: Count
    """As in the Probe."""


class Repeat(Message, frozen=True):
    """router → instance: send the tokens of these requests again, and the ending if there was one. What the instance does not
    know, or has forgotten, is answered by nothing."""

    tokens: tuple[tuple[AttemptId, Count], ...]
    """Each request, and the number of the first token to send."""


class Cancel(Message, frozen=True):
    """router → instance: the client needs no more of this request; stop, and free its pages. Idempotent.

    A key that the instance does not know yet is remembered for a while, since messages may overtake each other.
    """

    key: AttemptId
    complete: bool = False
    """The answer is as long as it would have been anyway: a stop string has ended it. Else nobody waits for it."""
