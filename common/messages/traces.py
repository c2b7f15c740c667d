"""What takes time: traces, which a router has the processes of its fleet record, and timelines of attempts.

Owns the shape of a span, and its packed form: a router keeps it packed, because nobody reads it before the trace is over. Owns
the times of an attempt on one instance, which schedulers keep and messages carry once the attempt has left. People and histograms
read them; nothing decides by them. Does not know who records what.

On an instance the times are of its own clock. What leaves its process is UNIX time. So times of two hosts compare as
well as NTP aligns their clocks. The differences between times of one instance are exact.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from common.ids import AttemptId, Incarnation, InstanceId
from common.messages.base import UNNAMED, Message
from common.ranges import Count, Integer, Moment, Number, Seconds


class Times(msgspec.Struct, omit_defaults=True):
    """A time that is None: it has not happened, or not here."""

    prompt_tokens: Annotated[Count, Meta(description="Of the prompt that this attempt began with, the answer so far included.")]
    accepted_s: Annotated[Moment, Meta(description="The request arrived. All times are seconds since 1970.")]
    admitted_s: Annotated[Moment | None, Meta(description="It got its pages.")] = None
    first_chunk_s: Annotated[Moment | None, Meta(description="The first chunk of its prompt was launched.")] = None
    last_chunk_s: Annotated[Moment | None, Meta(description="The step of its last chunk returned, with the first token.")] = None
    asked_s: Annotated[Moment | None, Meta(description="Reserve was sent, for the first time.")] = None
    granted_s: Annotated[Moment | None, Meta(description="Grant arrived; on the decode instance: was sent.")] = None
    first_push_s: Annotated[Moment | None, Meta(description="The first push was posted.")] = None
    pushed_s: Annotated[Moment | None, Meta(description="The last push ended.")] = None
    handed_off_s: Annotated[Moment | None, Meta(description="Handoff was sent; on the decode instance: arrived.")] = None
    first_decode_s: Annotated[Moment | None, Meta(description="The first decode step returned, with the second token.")] = None
    ended_s: Annotated[Moment | None, Meta(description="The request was served no longer.")] = None
    cached_tokens: Annotated[Count, Meta(description="Of its prompt, found in the prefix cache of who computes the rest.")] = 0
    chunks: Annotated[Count, Meta(description="In which the rest was computed here. An older version says 0.")] = 0
    pages_had: Annotated[Count | None, Meta(description="Pages that the decode instance had already.")] = None
    pages_pushed: Annotated[Count | None, Meta(description="Pages that were pushed.")] = None

    def chunk_launched(self, now: float) -> None:
        """A chunk goes to the executor."""
        self.chunks += 1
        if self.first_chunk_s is None:
            self.first_chunk_s = now

    def later(self, seconds: float) -> "Times":
        """The same on a clock that is ahead by so much."""
        moments = {name: getattr(self, name) for name in _MOMENTS}
        return msgspec.structs.replace(self, **{name: at + seconds for name, at in moments.items() if at is not None})


_MOMENTS = tuple(name for name in Times.__struct_fields__ if name.endswith("_s"))


class Timeline(msgspec.Struct, frozen=True, array_like=True):
    """The times of an attempt on the instance that tells them."""

    key: AttemptId
    times: Times


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
    """The number of the trace; Spans repeat it. The same number again changes nothing but the end."""


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
