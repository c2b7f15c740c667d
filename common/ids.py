"""The names of things that cross process borders, as distinct types.

Owns no behaviour. Knows nothing of messages, pages or sockets.
"""

import zlib
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, NewType, get_args

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from common.addresses import ROUTER_NAME
from common.ranges import Count

RequestId = NewType("RequestId", Annotated[str, Meta(max_length=512)])
InstanceId = NewType("InstanceId", Annotated[str, Meta(max_length=255)])
Incarnation = NewType("Incarnation", Annotated[str, Meta(max_length=255)])
"""One life of an instance's process: a restarted instance keeps its id and gets a new incarnation."""

Generation = NewType("Generation", Count)
"""The number of a reservation on its decode instance. It is never used again, not even by another incarnation."""

Ticket = NewType("Ticket", Count)
"""The number of a push within the process that posts it."""

Role = Literal["prefill", "decode"]
"""What an instance does for a pair: compute prompts, or answers."""
ROLES: tuple[Role, ...] = get_args(Role)
ServingRole = Literal["prefill", "decode", "both"]
"""What people give an instance to do. "both": it is a decode instance that gets whole requests too, where that costs less than a
pair of instances."""
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

ROUTER = InstanceId(ROUTER_NAME)
"""To a scheduler: every router that has welcomed the instance. Where there is only one, it may have this name."""


def text_name(router: InstanceId, shard: int) -> InstanceId:
    """The name of a router's detokenizer of that number."""
    return InstanceId(f"{router}.text-{shard}")


class Life(NamedTuple):
    """One life of an instance. Messages to or from it do not concern its successor, which has the same id."""

    id: InstanceId
    incarnation: Incarnation


Digest = NewType("Digest", Annotated[str, Meta(max_length=64)])
"""What stands for the bytes of weights or of an adapter: 32 hexadecimal digits. "": none, or not said."""


class Variant(NamedTuple):
    """Whose KV it is: what computed it. KV of one variant never meets another, in a cache, a transfer or an answer."""

    weights: Digest = Digest("")
    """"": comes from versions that did not say; it fits any."""
    adapter: Digest = Digest("")
    """"": the model alone."""

    def meets(self, other: "Variant") -> bool:
        """Whether KV of the one may meet KV of the other."""
        return self == other or not (self.weights and other.weights)


class AttemptId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The name of one try at a request. Every message about it carries this, so a late one of an old attempt is dropped."""

    request_id: RequestId
    attempt: Count
    router: InstanceId
    """The life of the router that asked, by its name: answers and tokens go there."""

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


def shard_of(key: AttemptId, shards: int) -> int:
    """Which of its router's detokenizers gets the tokens of a request: the same in every process, and for every attempt."""
    return zlib.crc32(key.request_id.encode()) % shards if shards > 1 else 0


DETOKENIZER = text_name(ROUTER, 0)


ID_BYTES = 4
"""The size of a token or page id as it travels."""


def pack_ids(ids: Int32Array | Sequence[int]) -> bytes:
    """Token or page ids as they travel: little-endian int32, four bytes each."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Int32Array:
    """The inverse of `pack_ids`. [ids] int32. Raises ValueError when `data` is not a whole number of ids."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


def check_ids(*packed: bytes | None, least: int = 0) -> None:
    """Raise ValueError unless each is a whole number of ids, and none is below the least."""
    for data in packed:
        if data and np.frombuffer(data, dtype="<i4").min() < least:
            raise ValueError(f"a packed id is below {least}")
