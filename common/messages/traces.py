"""Traces: a router has the processes of its fleet record what takes time, and gathers it.

Owns the shape of a span, and its packed form: a router keeps it packed, because nobody reads it before the trace is over. Does
not know who records what.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import msgspec

from common.ids import Incarnation, InstanceId
from common.messages.base import UNNAMED, Message
from common.ranges import Count, Integer, Moment, Number, Seconds

SpanArgs: TypeAlias = Mapping[str, Integer | Number | str]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that took from one moment to another on one process."""

    track: str
    """What kind of thing it is: "steps", "chunks", "pushes", "requests" …"""
    name: str
    """For people; spans of one kind share it."""
    begin_s: Moment
    """UNIX time."""
    end_s: Moment
    """UNIX time."""
    request: str = ""
    """The id of the request that it is about; "": it is about none, or several."""
    args: SpanArgs = {}
    """What else to know of it."""


class Trace(Message, frozen=True):
    """router → instance, detokenizer: record spans, and send them here."""

    seconds: Seconds
    """For so long; 0: no longer."""
    number: Count
    """Of the trace; Spans repeat it. The same number again changes nothing but the end."""


class Spans(Message, frozen=True):
    """instance, detokenizer → router: what was recorded. It may be lost: only people read it."""

    id: InstanceId
    number: Count
    """As in Trace."""
    count: Count
    """How many spans there are."""
    packed: bytes
    """They, as `pack_spans` makes it."""
    incarnation: Incarnation = UNNAMED
    """A detokenizer has none."""
    dropped: Count = 0
    """Spans for which there was no room, since recording began."""
    last: bool = False
    """The trace is over here."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Span, ...]).decode


def pack_spans(spans: Iterable[Span]) -> bytes:
    return _encode(tuple(spans))


def unpack_spans(packed: bytes) -> tuple[Span, ...]:
    """Raises msgspec.DecodeError when it is no list of spans."""
    return _decode(packed)
