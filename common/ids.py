"""The names of things that cross process borders, as distinct types, and the ranges of the numbers that do.

Owns no behaviour. Knows nothing of messages, pages or sockets.

A type says what its field may hold, and whoever decodes a message refuses what is not that. Every bound is written so that only a
number within it passes: NaN is within none.
"""

import zlib
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, NewType, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from common.names import ROUTER_NAME

_FINITE = 1e15
"""Seconds and bytes are far below it."""
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""How many, which one, or which version."""
Integer: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Size: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
"""Of something that is there: pages, tokens of a page, heads."""
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
"""What `pack_ids` can pack."""
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=_FINITE)]
Number: TypeAlias = Annotated[float, Meta(ge=-_FINITE, le=_FINITE)]
Seconds: TypeAlias = Amount
"""How long something takes, or how old it is."""
Moment: TypeAlias = Number
"""What somebody's clock shows, in seconds."""
Interval: TypeAlias = Annotated[float, Meta(ge=1e-3, le=_FINITE)]
"""Seconds between two that follow each other."""

RequestId = NewType("RequestId", Annotated[str, Meta(max_length=512)])
InstanceId = NewType("InstanceId", Annotated[str, Meta(max_length=255)])
Incarnation = NewType("Incarnation", Annotated[str, Meta(max_length=255)])
"""One life of an instance's process: a restarted instance keeps its id and gets a new incarnation."""

Generation = NewType("Generation", Count)
"""The number of a reservation on its decode instance. It is never used again, not even by another incarnation."""

Ticket = NewType("Ticket", Count)
"""The number of a push within the process that posts it."""

Role = Literal["prefill", "decode"]
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


class Key(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The key of every message about a request. By it a late message of an old attempt is told apart and dropped."""

    request_id: RequestId
    attempt: Count
    router: InstanceId
    """The life of the router that asked, by its name: answers and tokens go there."""

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


def shard_of(key: Key, shards: int) -> int:
    """Which of its router's detokenizers gets the tokens of a request: the same in every process, and for every attempt."""
    return zlib.crc32(key.request_id.encode()) % shards if shards > 1 else 0


DETOKENIZER = text_name(ROUTER, 0)


ID_BYTES = 4
"""Of a token or page id as it travels."""


def pack_ids(ids: Int32Array | Sequence[int]) -> bytes:
    """Token or page ids as they travel: little-endian int32, four bytes each."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Int32Array:
    """The inverse of `pack_ids`. [ids] int32. Raises ValueError when `data` is not a whole number of ids."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


def check_ids(*packed: bytes | None) -> None:
    """Raise ValueError unless each is a whole number of ids, and none is negative."""
    for data in packed:
        if data and unpack_ids(data).min() < 0:
            raise ValueError("a packed id is negative")
