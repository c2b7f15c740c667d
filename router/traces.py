"""Traces of the fleet: one at a time, started by whoever runs the fleet, and kept until the next one.

Owns who was told to record, what came of it, and the spans of the router itself. Keeps spans packed, as they came: nobody reads
them on the loop. Opens no socket, reads no clock.

    start ─Trace─► every member, every detokenizer, whoever joins ─Spans─► kept ─► its time is over, and all have said so,
                                                                                   or have had GRACE_S to say it: over
"""

from dataclasses import dataclass, field

import msgspec

from common.errors import BadRequest, Conflict, NotFound
from common.ids import InstanceId, Life
from common.instance.ports import Send
from common.messages import Spans, Trace, pack_spans
from common.messages.base import UNNAMED
from common.tracing import LONGEST_S, MESSAGE_SPANS, SpanRecorder, TracedProcess, TraceStatus
from router.fleet import Members
from router.timelines import RequestTimes

MOST_BYTES = 256 * 2**20
"""Room for packed spans, with FRAME_BYTES for each message: idle instances send one span at a time."""
FRAME_BYTES = 110
GRACE_S = 2.0


class Frame(msgspec.Struct, frozen=True):
    """Packed spans. process: the place of theirs in `TraceStatus.processes`."""

    process: int
    packed: bytes


@dataclass(slots=True, eq=False)
class _Trace:
    """One trace. Its end is a time of the router's clock."""

    status: TraceStatus
    ends_s: float
    places: dict[Life, int] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)

    def add(self, process: TracedProcess) -> None:
        self.places[Life(process.id, process.incarnation)] = len(self.status.processes)
        self.status.processes.append(process)

    def keep(self, place: int, count: int, packed: bytes) -> None:
        status, size = self.status, len(packed) + FRAME_BYTES
        status.processes[place].spans += count
        if status.bytes + size > MOST_BYTES:
            status.spans_refused += count
            return
        status.bytes += size
        self.frames.append(Frame(place, packed))

    def is_over(self, now: float) -> bool:
        return now >= self.ends_s + GRACE_S or (now >= self.ends_s and all(process.over for process in self.status.processes))


@dataclass(slots=True, eq=False)
class Traces:
    """The trace that runs, or the last one."""

    _router: InstanceId
    _detokenizers: tuple[InstanceId, ...]
    _fleet: Members
    _recorder: SpanRecorder
    """The router's own."""
    _unix_s: float = 0.0
    """See `SpanRecorder`."""
    _number: int = 0
    _trace: _Trace | None = None

    # --- what people ask for -----------------------------------------------------------------------------------------------

    def start(self, seconds: float, now: float) -> list[Send]:
        """Forget the last trace, and begin one. Raises BadRequest, Conflict."""
        if not 0.0 < seconds <= LONGEST_S:
            raise BadRequest(f"seconds must be above 0 and at most {LONGEST_S:g}", field="seconds")
        if self._trace is not None and not self._trace.is_over(now):
            raise Conflict("a trace runs already: wait for its end, or end it with DELETE /cluster/trace")
        self._number += 1
        status = TraceStatus(
            number=self._number,
            state="running",
            began_s=now + self._unix_s,
            seconds=seconds,
            processes=[],
            bytes=0,
            spans_refused=0,
        )
        trace = self._trace = _Trace(status, now + seconds)
        trace.add(TracedProcess(id=self._router, role="router"))
        self._recorder.begin()
        sends = [send for shard in range(len(self._detokenizers)) for send in self.detokenizer_moved(shard, now)]
        return sends + [send for member in self._fleet.members() for send in self.joined(member.life, now)]

    def end(self, now: float) -> list[Send]:
        """Forget the trace, and end it if it runs. Raises NotFound."""
        trace, self._trace = self._known(), None
        self._recorder.end()
        self._recorder.take(len(self._recorder))
        if now >= trace.ends_s:
            return []
        told = [*self._detokenizers, *(life.id for life in trace.places if self._fleet.find(life) is not None)]
        return [Send(name, Trace(seconds=0.0, number=trace.status.number)) for name in told]

    def status(self, now: float) -> TraceStatus:
        """Raises NotFound."""
        trace = self._known()
        trace.status.state = "over" if trace.is_over(now) else "running"
        return trace.status

    def frames(self) -> list[Frame]:
        """What there is. Raises NotFound."""
        return list(self._known().frames)

    # --- what happens meanwhile --------------------------------------------------------------------------------------------

    def joined(self, life: Life, now: float) -> list[Send]:
        """This life is a member now, or was one before."""
        member = self._fleet.find(life)
        trace = self._running(now)
        if member is None or trace is None or life in trace.places:
            return []
        info, rank = member.info, member.info.ranks[0]
        process = TracedProcess(id=life.id, incarnation=life.incarnation, role=info.role)
        process.host, process.pid, process.device = rank.host, rank.pid, rank.device
        trace.add(process)
        return [self._ask(life.id, trace, now)]

    def detokenizer_moved(self, shard: int, now: float) -> list[Send]:
        """Another one may have taken the place of a detokenizer."""
        name, trace = self._detokenizers[shard], self._running(now)
        if trace is None:
            return []
        if Life(name, UNNAMED) not in trace.places:
            trace.add(TracedProcess(id=name, role="detokenizer"))
        return [self._ask(name, trace, now)]

    def receive(self, message: Spans) -> None:
        """Spans of another trace, and of strangers, are dropped."""
        trace = self._trace
        place = None if trace is None else trace.places.get(Life(message.id, message.incarnation))
        if trace is None or place is None or message.number != trace.status.number:
            return
        process = trace.status.processes[place]
        process.dropped, process.over = max(process.dropped, message.dropped), process.over or message.last
        if message.count > 0:
            trace.keep(place, message.count, message.packed)

    def tick(self, now: float) -> None:
        """Take in what the router itself has recorded, and end that when the time is over."""
        trace = self._trace
        if trace is None or not self._recorder.on:
            return
        is_over = now >= trace.ends_s
        while len(self._recorder) >= (1 if is_over else MESSAGE_SPANS):
            spans = self._recorder.take(MESSAGE_SPANS)
            trace.keep(0, len(spans), pack_spans(spans))
        trace.status.processes[0].dropped = self._recorder.dropped
        if is_over:
            self._recorder.end()
            trace.status.processes[0].over = True

    def next_deadline(self) -> float | None:
        return self._trace.ends_s if self._trace is not None and self._recorder.on else None

    # --- inside --------------------------------------------------------------------------------------------------------

    def _known(self) -> _Trace:
        if self._trace is None:
            raise NotFound("there is no trace: begin one with POST /cluster/trace?seconds=60")
        return self._trace

    def _running(self, now: float) -> _Trace | None:
        return self._trace if self._trace is not None and now < self._trace.ends_s else None

    def _ask(self, name: InstanceId, trace: _Trace, now: float) -> Send:
        return Send(name, Trace(seconds=trace.ends_s - now, number=trace.status.number))


def record_attempt(recorder: SpanRecorder, request: RequestTimes, now: float) -> None:
    """The latest attempt of a request is over."""
    attempt = request.attempts[-1]
    why = attempt.resume_reason or request.ending or ""
    recorder.add("attempts", "attempt", attempt.dispatched_s, now, request.request_id, **attempt.facts(), ended=why)


def record_request(recorder: SpanRecorder, request: RequestTimes, now: float) -> None:
    """A request has ended."""
    recorder.add("requests", "request", request.received_s, now, request.request_id, **request.facts())
