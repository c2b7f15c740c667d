"""The recording of spans, and the routers that get them.

Owns the spans that were not sent yet, the traces that run, and the shape in which a trace is read. Knows the two messages of a
trace. Opens no socket and reads no clock. Does not know what is worth a span.

While nothing is recorded, `SpanRecorder.on` is False, and whoever has a span looks no further: that is all it costs then. Spans
are recorded with the times of the process, and sent in UNIX time.
"""

from typing import Literal

import msgspec

from common.ids import Incarnation, InstanceId
from common.messages import Span, SpanArgs, Spans, Trace, pack_spans
from common.messages.base import UNNAMED

MOST_SPANS = 65_536
"""So many spans may wait to be sent."""
MESSAGE_SPANS = 512
MESSAGES_A_TURN = 4
"""Few, because tokens wait behind them."""
SEND_S = 0.25
"""How often spans are sent that do not fill a message."""
LONGEST_S = 600.0
"""No trace runs longer, whoever has forgotten it."""


TracedRole = Literal["router", "detokenizer", "prefill", "decode"]


class TracedProcess(msgspec.Struct, kw_only=True):
    """A process of the fleet, and what it has recorded."""

    id: InstanceId
    incarnation: Incarnation = UNNAMED
    role: TracedRole
    host: str = ""
    pid: int = 0
    device: str = ""
    spans: int = 0
    dropped: int = 0
    """Spans for which it had no room."""
    over: bool = False
    """It has sent everything."""


class TraceStatus(msgspec.Struct, kw_only=True):
    """How a trace stands."""

    number: int
    state: Literal["running", "over"]
    began_s: float
    """UNIX time."""
    seconds: float
    processes: list[TracedProcess]
    """Spans name a process by its place here."""
    bytes: int
    """Memory that the spans take."""
    spans_refused: int
    """Spans for which this router had no room."""


class TraceLine(msgspec.Struct, frozen=True):
    """A span. process: the place of its process in the first line's `processes`. Times are UNIX seconds."""

    process: int
    track: str
    name: str
    begin_s: float
    end_s: float
    request: str
    args: SpanArgs


class SpanRecorder:
    """The spans of one process that were not sent yet. unix_s: what to add to a time of this process to have UNIX time."""

    __slots__ = ("_limit", "_spans", "_unix_s", "dropped", "on")

    def __init__(self, unix_s: float = 0.0, limit: int = MOST_SPANS) -> None:
        self._unix_s, self._limit = unix_s, limit
        self._spans: list[Span] = []
        self.on = False
        """Whether spans are recorded."""
        self.dropped = 0
        """Spans for which there was no room."""

    def __len__(self) -> int:
        return len(self._spans)

    def begin(self) -> None:
        """Record from now on, and forget what there was."""
        self._spans.clear()
        self.on, self.dropped = True, 0

    def end(self) -> None:
        """Record no more. What there is can still be taken."""
        self.on = False

    def add(self, track: str, name: str, begin_s: float, end_s: float, request: str = "", **args: int | float | str) -> None:
        """begin_s, end_s: times of this process."""
        if len(self._spans) >= self._limit:
            self.dropped += 1
            return
        self._spans.append(Span(track, name, begin_s + self._unix_s, end_s + self._unix_s, request, args))

    def take(self, most: int) -> list[Span]:
        """The oldest, so many at most."""
        taken, self._spans = self._spans[:most], self._spans[most:]
        return taken


class _RequestedTrace(msgspec.Struct):
    """A trace that a router has begun."""

    number: int
    until_s: float
    """Its end, on this process' clock."""


class Tracer:
    """What a process records for routers. Each of them gets all that is recorded while its trace runs, so two traces cost the
    recording once."""

    def __init__(self, id: InstanceId, incarnation: Incarnation = UNNAMED, unix_s: float = 0.0) -> None:
        self.recorder = SpanRecorder(unix_s)
        self._id, self._incarnation = id, incarnation
        self._traces: dict[InstanceId, _RequestedTrace] = {}
        self._sends_s = 0.0

    @property
    def runs(self) -> bool:
        """Whether a router is still to get anything."""
        return bool(self._traces)

    def ask(self, router: InstanceId, message: Trace, now: float) -> None:
        """The router begins a trace, or ends it."""
        known = self._traces.get(router)
        if message.seconds <= 0.0 and (known is None or known.number != message.number):
            return
        until_s = now + min(LONGEST_S, message.seconds)
        self._traces[router] = _RequestedTrace(message.number, until_s)
        is_another = known is not None and known.number != message.number and len(self._traces) == 1
        if is_another or not self.recorder.on:
            self.recorder.begin()
        self._sends_s = min(now + SEND_S, until_s)

    def forget(self, router: InstanceId) -> None:
        """It is gone."""
        self._traces.pop(router, None)
        if not self._traces:
            self.recorder.end()

    def due(self, now: float) -> list[tuple[InstanceId, Spans]]:
        """What to send now, and to whom. Call it at the end of each turn while it `runs`."""
        if now < self._sends_s and len(self.recorder) < MESSAGE_SPANS:
            return []
        if all(trace.until_s <= now for trace in self._traces.values()):
            self.recorder.end()
        sends: list[tuple[InstanceId, Spans]] = []
        for _ in range(MESSAGES_A_TURN):
            if not len(self.recorder):
                break
            spans = self.recorder.take(MESSAGE_SPANS)
            packed = pack_spans(spans)
            sends += [(router, self._message(trace, len(spans), packed)) for router, trace in self._traces.items()]
        if not len(self.recorder):
            for router in [router for router, trace in self._traces.items() if trace.until_s <= now]:
                sends.append((router, self._message(self._traces.pop(router), 0, pack_spans(()), last=True)))
        ends_s = min((trace.until_s for trace in self._traces.values()), default=now)
        self._sends_s = now if len(self.recorder) else min(now + SEND_S, max(now, ends_s))
        return sends

    def finish(self, now: float) -> list[tuple[InstanceId, Spans]]:
        """All that was not sent yet, and that nothing follows: this life is over."""
        sends: list[tuple[InstanceId, Spans]] = []
        for trace in self._traces.values():
            trace.until_s = now
        while self._traces:
            self._sends_s = now
            sends += self.due(now)
        return sends

    def next_deadline(self) -> float | None:
        """When `due` has something; None while nothing runs."""
        return self._sends_s if self._traces else None

    def _message(self, trace: _RequestedTrace, count: int, packed: bytes, *, last: bool = False) -> Spans:
        return Spans(
            id=self._id,
            incarnation=self._incarnation,
            number=trace.number,
            count=count,
            packed=packed,
            dropped=self.recorder.dropped,
            last=last,
        )
