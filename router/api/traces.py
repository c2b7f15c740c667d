"""Traces over HTTP: begin one, see how it stands, read it, forget it.

Owns the lines that a trace is read as: the first says how it stands, each other one is a span, in no order. Packed spans become
lines in a thread, a few at a time: a trace may be hundreds of megabytes. Does not know who records what.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.responses import Response, StreamingResponse

from common.errors import BadRequest
from common.messages import SpanArgs, unpack_spans
from router.api.description import Described
from router.gateway import Gateway
from router.traces import Frame, TraceStatus

SECONDS = "60"
LINES = "application/x-ndjson"
PIECE_FRAMES = 8
"""Several thousand spans at most, which take milliseconds."""

_log = logging.getLogger(__name__)
_TAG = "Operations"
START = Described(
    tag=_TAG,
    summary="Begin a trace",
    answer="Every process of the fleet records what takes time, for `seconds` (60; at most 600).",
    answer_type=TraceStatus,
    status=202,
    refusals=(400, 409),
)
READ = Described(
    tag=_TAG,
    summary="Read the trace",
    answer="JSON lines: the first says how the trace stands, and when it is over, each other one is a span.",
    answer_type=TraceStatus,
    media_types=(LINES,),
    refusals=(404,),
)
FORGET = Described(
    tag=_TAG, summary="Forget the trace", answer="It is ended and forgotten.", answer_type=TraceStatus, refusals=(404,)
)


class TraceLine(msgspec.Struct, frozen=True):
    """A span. process: the place of its process in the first line's `processes`. Times are UNIX seconds."""

    process: int
    track: str
    name: str
    begin_s: float
    end_s: float
    request: str
    args: SpanArgs


class TraceApi:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._traces = gateway.core.traces

    async def start(self, seconds: str = SECONDS) -> Response:
        """The router also counts processes that join meanwhile. `GET /cluster/trace` has the spans when the time is over. The
        trace before this one is forgotten."""
        try:
            wanted_s = float(seconds)
        except ValueError:
            raise BadRequest(f"seconds must be a number, not {seconds[:32]!r}", field="seconds") from None
        now = self._gateway.clock()
        self._gateway.deliver(self._traces.start(wanted_s, now))
        return Response(msgspec.json.encode(self._traces.status(now)), 202, media_type="application/json")

    async def read(self) -> Response:
        """Requests that are still open at its end have no span of their own; what was done for them has."""
        status = self._traces.status(self._gateway.clock())
        frames = self._traces.frames() if status.state == "over" else []
        return StreamingResponse(_lines(msgspec.json.encode(status) + b"\n", frames), media_type=LINES)

    async def forget(self) -> Response:
        """It gives its memory back, which the next trace does too."""
        status = self._traces.status(self._gateway.clock())
        self._gateway.deliver(self._traces.end(self._gateway.clock()))
        return Response(msgspec.json.encode(status), media_type="application/json")


async def _lines(first: bytes, frames: Sequence[Frame]) -> AsyncIterator[bytes]:
    yield first
    for begin in range(0, len(frames), PIECE_FRAMES):
        yield await asyncio.to_thread(_piece, frames[begin : begin + PIECE_FRAMES])


def _piece(frames: Sequence[Frame]) -> bytes:
    lines: list[TraceLine] = []
    for frame in frames:
        try:
            spans = unpack_spans(frame.packed)
        except msgspec.DecodeError as error:
            _log.warning("spans of process %d of a trace cannot be read: %s", frame.process, error)
            continue
        lines += [
            TraceLine(frame.process, span.track, span.name, span.begin_s, span.end_s, span.request, span.args) for span in spans
        ]
    return msgspec.json.Encoder().encode_lines(lines)
