"""The load generator: a process that keeps many streams open over sockets of its own, and costs as little as it can.

Owns its connections. A library that understands HTTP would cost more than the router does, so it reads of an answer only what it
counts: tokens are words of the timed executor, each of which begins with a space, and no other spaces are in an answer but one in
each event. An answer with another number of tokens than was asked for is a failure.
"""

import asyncio
import json
import time
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import uvloop

from bench.processes import cpu_s, resident_mb
from bench.router.lines import Load, Loaded
from common.addresses import LOOPBACK
from common.processes.open_files import allow_many_files
from common.processes.parent import Parent

CONNECTING = 128
"""So many connections are made at once."""
PATIENCE_S = 120.0
KEPT_REASONS, REASON_BYTES = 3, 300
_GOOD, _EVENT, _HEAD_END, _LAST = b"HTTP/1.1 200", b"data: ", b"\r\n\r\n", b"0\r\n\r\n"


class _Mark(NamedTuple):
    """What was counted so far."""

    s: float
    tokens: int
    events: int
    cpu_s: float

    def since(self, then: "_Mark") -> "_Mark":
        return _Mark(self.s - then.s, self.tokens - then.tokens, self.events - then.events, self.cpu_s - then.cpu_s)


class Run:
    """One order under way."""

    def __init__(self, order: Load, loop: asyncio.AbstractEventLoop) -> None:
        self.order = order
        asked = {"model": order.model, "prompt": "Tell me more.", "stream": True, "ignore_eos": True, "max_tokens": order.tokens}
        body = json.dumps(asked).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.question = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self.over: asyncio.Future[None] = loop.create_future()
        self.asked = self.tokens = self.events = 0
        self._ended = self._failed = self._open = self._most_open = 0
        self._ttft_s: list[float] = []
        self._reasons: list[str] = []
        self._began, self._own_s = self._mark(), time.process_time()
        self._before_mb, self._open_mb = self._memory_mb(), 0.0
        self._opening_s = 0.0
        self._all_open: _Mark | None = None
        self._window = _Mark(0.0, 0, 0, 0.0)

    def began(self, ttft_s: float) -> None:
        """A stream has got its first token."""
        self._ttft_s.append(ttft_s)
        self._open += 1
        self._most_open = max(self._most_open, self._open)
        if len(self._ttft_s) == self.order.parallel and not self._ended:
            self._open_mb = self._memory_mb()
            self._all_open = self._mark()
            self._opening_s = self._all_open.s - self._began.s

    def ended(self, begun: bool, failure: str) -> None:
        """A stream is over. failure: empty for a whole answer."""
        if self._all_open is not None:
            self._window, self._all_open = self._mark().since(self._all_open), None
        self._open -= begun
        self._ended += 1
        if failure:
            self._failed += 1
            self._reasons = [*self._reasons, failure][:KEPT_REASONS]
        if self._ended == self.order.requests and not self.over.done():
            self.over.set_result(None)

    def result(self) -> Loaded:
        total = self._mark().since(self._began)
        missing = self.order.requests - self._ended
        reasons = [*self._reasons, f"{missing} answers were not over after {PATIENCE_S:g} s"] if missing else self._reasons
        return Loaded(
            ttft_s=tuple(self._ttft_s),
            opening_s=self._opening_s,
            failed=self._failed + missing,
            reasons=tuple(reasons),
            elapsed_s=total.s,
            tokens=total.tokens,
            events=total.events,
            router_cpu_s=total.cpu_s,
            own_cpu_s=time.process_time() - self._own_s,
            window_s=self._window.s,
            window_tokens=self._window.tokens,
            window_events=self._window.events,
            window_cpu_s=self._window.cpu_s,
            most_open=self._most_open,
            before_mb=self._before_mb,
            open_mb=self._open_mb,
        )

    def _mark(self) -> _Mark:
        return _Mark(time.perf_counter(), self.tokens, self.events, sum(map(cpu_s, self.order.pids)))

    def _memory_mb(self) -> float:
        return sum(map(resident_mb, self.order.pids))


class Stream(asyncio.Protocol):
    """One connection, and one request after another on it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._asked_s = 0.0
        self._tokens = 0
        self._asking = self._accepted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        if not self._asking:
            return
        if not self._accepted:
            head, _, body = data.partition(_HEAD_END)
            if not head.startswith(_GOOD):
                self._finish(data[:REASON_BYTES].decode(errors="replace"))
                return
            self._accepted = True
        else:
            body = data
        run = self._run
        events = body.count(_EVENT)
        tokens = body.count(b" ") - events
        if tokens and not self._tokens:
            run.began(time.perf_counter() - self._asked_s)
        self._tokens += tokens
        run.tokens += tokens
        run.events += events
        if data.endswith(_LAST):
            missing = run.order.tokens - self._tokens
            self._finish(f"{missing} tokens are missing" if missing else "")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._asking:
            self._finish(f"the connection was lost: {exc!r}")

    def _ask(self) -> None:
        run = self._run
        assert self._transport is not None
        if run.asked == run.order.requests or self._transport.is_closing():
            self._transport.close()
            return
        run.asked += 1
        self._asking, self._accepted, self._tokens = True, False, 0
        self._asked_s = time.perf_counter()
        self._transport.write(run.question)

    def _finish(self, failure: str) -> None:
        assert self._transport is not None
        self._asking = False
        self._run.ended(self._tokens > 0, failure)
        if failure:
            self._transport.close()
        else:
            self._ask()


async def carry_out(order: Load) -> Loaded:
    loop = asyncio.get_running_loop()
    url = urlsplit(order.url)
    run = Run(order, loop)
    for first in range(0, order.parallel, CONNECTING):
        many = min(CONNECTING, order.parallel - first)
        connecting = (loop.create_connection(lambda: Stream(run), url.hostname or LOOPBACK, url.port or 80) for _ in range(many))
        for outcome in await asyncio.gather(*connecting, return_exceptions=True):
            if isinstance(outcome, BaseException):
                run.asked += 1
                run.ended(False, f"no connection: {outcome!r}")
    await asyncio.wait((run.over,), timeout=PATIENCE_S)
    return run.result()


def main() -> None:
    allow_many_files()
    parent: Parent[Load, Loaded] = Parent(msgspec.json.Decoder[Load](Load))
    parent.obey(lambda order: uvloop.run(carry_out(order)))


if __name__ == "__main__":
    main()
