"""The HTTP client of every load: connections that stay open, and answers whose tokens are timed as their bytes arrive.

Owns sockets, HTTP, the format of events, and what is known of one answer. Does not know when requests are due. It is written for
the cost of a token, because a busy client would measure itself: one call for each read of a socket, httptools for the framing,
typed decoding of each event, and one wake-up of a task for each answer.

    client = HttpClient(url, "/v1/completions", headers={}, timeout_s=60.0)
    answer = TimedAnswer(due_s=now_s, requested_tokens=100)
    answer.begin(now_s)
    await client.ask(answer, b'{"model": "demo", "prompt": "Hello", "max_tokens": 100, "stream": true}')
    client.close()
"""

import asyncio
import ssl
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import httptools
import msgspec

UsageReports: TypeAlias = Literal["continuous", "last", "none"]
"""Where a server counts tokens: in each event (vLLM, Tandem), in a last event (OpenAI), nowhere."""
USAGE_FIELDS: dict[UsageReports, dict[str, Any]] = {
    "continuous": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "last": {"stream_options": {"include_usage": True}},
    "none": {},
}
MESSAGE_BYTES = 300
_DONE = b"[DONE]"
_ABSENT = msgspec.Raw()
_NOTHING = (b"", b"null", b"[]")


@dataclass(slots=True)
class TimedAnswer:
    """One request and its answer. Times are seconds of one clock, which the caller chooses."""

    due_s: float
    """When the request was to be sent."""
    requested_tokens: int
    prompt_tokens: int = 0
    """The length of the prompt as the server reports it, or else as it was made."""
    session: int = 0
    turn: int = 0
    began_s: float = 0.0
    """The moment from which TTFT and E2E count."""
    sent_s: float = 0.0
    first_s: float = 0.0
    token_s: float = 0.0
    """When the last token arrived."""
    last_s: float = 0.0
    """When the last event arrived, with a token or without."""
    ended_s: float = 0.0
    counted: int = 0
    """Tokens that have arrived."""
    output_tokens: int = 0
    """The length of the answer as the server reports it at the end, or else as it was counted."""
    cached_tokens: int = 0
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    """The time between each token and the one before it. Tokens of one event have gaps of 0."""
    pieces: list[str] = field(default_factory=list)
    """The text of the answer, where the client keeps it."""
    error: str = ""
    """The kind of a failure; empty for a whole answer."""
    message: str = ""
    """What is known of the failure."""

    def begin(self, now_s: float, *, counts_from_due: bool = False) -> None:
        """Record that it is sent now. A timer may fire a little early: then the times count from the sending."""
        self.sent_s = now_s
        self.began_s = min(self.due_s, now_s) if counts_from_due else now_s

    def add(self, now_s: float, tokens: int) -> None:
        """Record an event with this many tokens: k tokens are one gap and k - 1 gaps of 0. An event without tokens only shows
        that the answer still went on."""
        if tokens > 0:
            if self.counted:
                self.gaps_s.append(now_s - self.token_s)
            else:
                self.first_s = now_s
            for _ in range(tokens - 1):
                self.gaps_s.append(0.0)
            self.counted += tokens
            self.token_s = now_s
        self.last_s = now_s

    def end(self, now_s: float, error: str = "", message: str = "") -> None:
        """Record that it is over: whole, or with an error."""
        self.ended_s = now_s
        self.output_tokens = self.output_tokens or self.counted
        self.error, self.message = error, message
        if not error and not self.counted:
            self.error, self.message = "empty", "the answer had no token"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.began_s

    @property
    def e2el_s(self) -> float:
        """The time until the last event."""
        return self.last_s - self.began_s

    @property
    def tpot_s(self) -> float | None:
        """The time of each token after the first; None for an answer of one token."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def queue_s(self) -> float:
        """The time from when it was due until it was sent."""
        return max(0.0, self.sent_s - self.due_s)


class _EventDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _EventUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _EventDetails | None = None


class _EventDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = _ABSENT


class _EventChoice(msgspec.Struct):
    text: str | None = None
    delta: _EventDelta | None = None
    finish_reason: str | None = None

    @property
    def added(self) -> str:
        """The text that the event adds to the answer. A call of a tool counts as text, though none is kept of it."""
        if self.text is not None:
            return self.text
        if self.delta is None:
            return ""
        calls = " " if bytes(self.delta.tool_calls) not in _NOTHING else ""
        return self.delta.content or self.delta.reasoning_content or calls


class _Event(msgspec.Struct):
    """An event of a completion or of a chat."""

    choices: list[_EventChoice] = []
    usage: _EventUsage | None = None
    """The tokens so far; in an event without choices, those of the whole answer."""
    error: msgspec.Raw = _ABSENT


_decode = msgspec.json.Decoder(_Event).decode


class HttpClient:
    """Requests to one server, http or https, each with these headers. keeps_text: answers keep their text, which conversations
    need."""

    def __init__(
        self, url: str, path: str, headers: dict[str, str], timeout_s: float, *, verify: bool = True, keeps_text: bool = False
    ) -> None:
        parts = urlsplit(url)
        self._host, is_secure = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if is_secure else 80)
        lines = {"Host": parts.netloc, "Content-Type": "application/json", "Accept": "text/event-stream"} | headers
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._head = f"POST {path} HTTP/1.1\r\n{head}Content-Length: ".encode()
        self._tls = tls_context(verify) if is_secure else None
        self._timeout_s, self._keeps_text = timeout_s, keeps_text
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []

    async def ask(self, answer: TimedAnswer, body: bytes) -> None:
        """Send this request now, and return when its answer is over or has failed, which `answer` records."""
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                if self._idle and await self._idle.pop().exchange(answer, request, self._keeps_text):
                    return
                self._idle.clear()  # the server has closed one of them: so it may have closed the others
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._open, self._idle), self._host, self._port, ssl=self._tls
                )
                await connection.exchange(answer, request, self._keeps_text)
        except OSError as error:
            if not limit.expired():
                answer.end(time.perf_counter(), "refused", str(error))
            elif not answer.ended_s:  # it may end in the very moment of the deadline
                answer.end(time.perf_counter(), "timeout", "the answer was not over in time")

    def close(self) -> None:
        """Close every connection. Answers that are still open end with an error."""
        for connection in list(self._open):
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection, and one request after another on it. It enters itself into `open` and, between requests, into `idle`."""

    def __init__(self, open_connections: "set[_Connection]", idle: "list[_Connection]") -> None:
        self._all, self._idle = open_connections, idle
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._answer: TimedAnswer | None = None
        self._over: asyncio.Future[bool] | None = None
        self._requests = 0
        self._has_read = self._is_whole = self._keeps_text = False
        self._status = 0
        self._now_s = 0.0
        self._rest = self._refusal = b""

    async def exchange(self, answer: TimedAnswer, request: bytes, keeps_text: bool) -> bool:
        """Send one request and wait until its answer is over. False: the server closed the connection before it read the
        request."""
        assert self._transport is not None and self._answer is None
        self._answer, self._keeps_text, self._over = answer, keeps_text, asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._requests += 1
        self._has_read = self._is_whole = False
        self._status, self._rest, self._refusal = 0, b"", b""
        self._transport.write(request)
        try:
            return await self._over
        except asyncio.CancelledError:
            self._answer = None
            self.close()
            raise

    def close(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self._has_read = True
        if self._answer is None:
            self.close()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("broken", f"this is no HTTP: {error}")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Read the lines that are complete. An event is a line that begins with `data:`."""
        if self._status != 200:
            self._refusal += body[: MESSAGE_BYTES - len(self._refusal)]
            return
        lines = (self._rest + body).split(b"\n") if self._rest else body.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if self._answer is not None and line.startswith(b"data:"):
                self._read_event(self._answer, line[5:].strip())

    def on_message_complete(self) -> None:
        if self._answer is None:
            return
        if self._parser.should_keep_alive():
            self._idle.append(self)
        elif self._transport is not None:
            self._transport.close()
        if self._status != 200:
            self._end(f"{self._status // 100}xx", f"HTTP {self._status}: {self._refusal.decode(errors='replace')}")
        elif not self._is_whole:
            self._end("broken", "the stream ended before the answer did")
        else:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if self._answer is None or self._over is None:
            return
        if self._requests > 1 and not self._has_read:
            self._answer = None
            self._over.set_result(False)
        else:
            self._end("broken", f"the connection was lost: {exc!r}" if exc else "the server closed the connection")

    def _read_event(self, answer: TimedAnswer, data: bytes) -> None:
        if data == _DONE:
            self._is_whole = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail("broken", f"an event cannot be read: {error}")
            return
        if bytes(event.error) not in _NOTHING:
            self._fail("error", bytes(event.error)[:MESSAGE_BYTES].decode(errors="replace"))
            return
        counted = 0
        if event.usage is not None:
            counted = event.usage.completion_tokens
            answer.prompt_tokens, answer.output_tokens = event.usage.prompt_tokens or answer.prompt_tokens, counted
            if event.usage.prompt_tokens_details is not None:
                answer.cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
        if event.choices:
            choice = event.choices[0]
            text = choice.added
            # Some servers count 0 until the end: then an event with text is one token, as where there is no usage.
            answer.add(self._now_s, counted - answer.counted if counted else int(bool(text)))
            if self._keeps_text and text:
                answer.pieces.append(text)
            self._is_whole = self._is_whole or choice.finish_reason is not None

    def _fail(self, kind: str, message: str) -> None:
        self._end(kind, message)
        self.close()

    def _end(self, error: str = "", message: str = "") -> None:
        answer, self._answer = self._answer, None
        if answer is not None and self._over is not None:
            answer.end(time.perf_counter(), error, message)
            self._over.set_result(True)


def tls_context(verify: bool) -> ssl.SSLContext:
    """How https is spoken. verify: whether the server's certificate must be one that this machine trusts."""
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
