"""The recording of spans, and who gets them.

Owns the spans that were not sent yet, and the traces that run. Knows the two messages of a trace. Opens no socket and reads no
clock. Does not know what is worth a span.

While nothing is recorded, `Recorder.on` is False, and whoever has a span looks no further: that is all it costs then. Spans are
recorded with the times of the process, and told in UNIX time.
"""

import msgspec

from common.ids import Incarnation, InstanceId
from common.messages import Span, Spans, Trace, pack_spans
from common.messages.base import UNNAMED

MOST_SPANS = 65_536
"""That wait to be sent."""
MESSAGE_SPANS = 512
MESSAGES_A_TURN = 4
"""Tokens wait behind them."""
SEND_S = 0.25
"""How often spans are sent that do not fill a message."""
LONGEST_S = 600.0
"""No trace runs longer, whoever has forgotten it."""


class Recorder:
    """unix_s: what to add to a time of this process to have UNIX time. on: whether spans are recorded. dropped: those for which
    there was no room."""

    __slots__ = ("_limit", "_spans", "_unix_s", "dropped", "on")

    def __init__(self, unix_s: float = 0.0, limit: int = MOST_SPANS) -> None:
        self._unix_s, self._limit = unix_s, limit
        self._spans: list[Span] = []
        self.on = False
        self.dropped = 0

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
    """A router's trace. until_s: on this process' clock."""

    number: int
    until_s: float


class Tracer:
    """What a process records for the routers that ask. Each of them gets all that is recorded while its trace runs, so two traces
    cost the recording once."""

    def __init__(self, id: InstanceId, incarnation: Incarnation = UNNAMED, unix_s: float = 0.0) -> None:
        self.recorder = Recorder(unix_s)
        self._id, self._incarnation = id, incarnation
        self._asked: dict[InstanceId, _RequestedTrace] = {}
        self._sends_s = 0.0

    @property
    def runs(self) -> bool:
        """Whether anybody is still to be told anything."""
        return bool(self._asked)

    def ask(self, router: InstanceId, message: Trace, now: float) -> None:
        """The router begins a trace, or ends it."""
        known = self._asked.get(router)
        if message.seconds <= 0.0 and (known is None or known.number != message.number):
            return
        until_s = now + min(LONGEST_S, message.seconds)
        self._asked[router] = _RequestedTrace(message.number, until_s)
        is_another = known is not None and known.number != message.number and len(self._asked) == 1
        if is_another or not self.recorder.on:
            self.recorder.begin()
        self._sends_s = min(now + SEND_S, until_s)

    def forget(self, router: InstanceId) -> None:
        """It is gone."""
        self._asked.pop(router, None)
        if not self._asked:
            self.recorder.end()

    def due(self, now: float) -> list[tuple[InstanceId, Spans]]:
        """What to send now, and to whom. Call it at the end of each turn while it `runs`."""
        if now < self._sends_s and len(self.recorder) < MESSAGE_SPANS:
            return []
        if all(asked.until_s <= now for asked in self._asked.values()):
            self.recorder.end()
        sends: list[tuple[InstanceId, Spans]] = []
        for _ in range(MESSAGES_A_TURN):
            if not len(self.recorder):
                break
            spans = self.recorder.take(MESSAGE_SPANS)
            packed = pack_spans(spans)
            sends += [(router, self._message(asked, len(spans), packed)) for router, asked in self._asked.items()]
        if not len(self.recorder):
            for router in [router for router, asked in self._asked.items() if asked.until_s <= now]:
                sends.append((router, self._message(self._asked.pop(router), 0, pack_spans(()), last=True)))
        ends_s = min((asked.until_s for asked in self._asked.values()), default=now)
        self._sends_s = now if len(self.recorder) else min(now + SEND_S, max(now, ends_s))
        return sends

    def next_deadline(self) -> float | None:
        """When `due` has something; None while nothing runs."""
        return self._sends_s if self._asked else None

    def _message(self, asked: _RequestedTrace, count: int, packed: bytes, *, last: bool = False) -> Spans:
        return Spans(
            id=self._id,
            incarnation=self._incarnation,
            number=asked.number,
            count=count,
            packed=packed,
            dropped=self.recorder.dropped,
            last=last,
        )
