"""The HTTP client: connections that stay open, and answers that are read event by event as their bytes come.

Owns sockets, HTTP and the format of events. It tells an `Answer` when its tokens came. Does not know when requests are due. It is
written for the cost of a token, because a busy client would measure itself: one call for each read of a socket, httptools for the
framing, and typed decoding of each event.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from bench.serve.answers import Answer

MESSAGE_BYTES = 300
_DONE = b"[DONE]"
_ABSENT = msgspec.Raw()
_NOTHING = (b"", b"null", b"[]")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = _ABSENT


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """Of completions and of chats. usage: so far, or of the whole answer in an event without choices."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = _ABSENT


_decode = msgspec.json.Decoder(_Event).decode


class HttpClient:
    """Requests to one server. url: http or https. headers: of each request. keeps_text: whether answers keep their text, which
    conversations need."""

    def __init__(
        self, url: str, path: str, headers: dict[str, str], timeout_s: float, *, verify: bool = True, keeps_text: bool = False
    ) -> None:
        parts = urlsplit(url)
        self._host, self._is_secure = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        lines = {"Host": parts.netloc, "Content-Type": "application/json", "Accept": "text/event-stream"} | headers
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._head = f"POST {path} HTTP/1.1\r\n{head}Content-Length: ".encode()
        self._tls = tls_of(verify) if self._is_secure else None
        self._timeout_s, self.keeps_text = timeout_s, keeps_text
        self._idle: list[_Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._open: set[_Connection] = set()

    def send(self, answer: Answer, body: bytes, ended: Callable[[Answer], object]) -> None:
        """Send this request now. `ended` is called once, when the answer is over or has failed."""
        exchange = _Exchange(answer, b"%b%d\r\n\r\n%b" % (self._head, len(body), body), ended, self)
        exchange.timer = asyncio.get_running_loop().call_later(self._timeout_s, exchange.late)
        self._start(exchange)

    def close(self) -> None:
        """Close every connection. Of requests that are open, nobody is told."""
        for task in self._connecting:
            task.cancel()
        for connection in list(self._open):
            connection.close()

    def again(self, exchange: "_Exchange") -> None:
        """Send it on a new connection: the server had closed the kept one before it read the request."""
        self._idle.clear()
        self._start(exchange)

    def idle(self, connection: "_Connection") -> None:
        """This connection can take the next request."""
        self._idle.append(connection)

    def connected(self, connection: "_Connection") -> None:
        """It is open."""
        self._open.add(connection)

    def lost(self, connection: "_Connection") -> None:
        """It is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _start(self, exchange: "_Exchange") -> None:
        if self._idle:
            self._idle.pop().ask(exchange)
        else:
            task = asyncio.get_running_loop().create_task(self._connect(exchange))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, exchange: "_Exchange") -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self), self._host, self._port, ssl=self._tls)
        except OSError as error:
            exchange.end("refused", str(error))
            return
        if exchange.is_over:
            self.idle(connection)
        else:
            connection.ask(exchange)


class _Exchange:
    """One request, and what is read of its answer."""

    def __init__(self, answer: Answer, request: bytes, ended: Callable[[Answer], object], client: HttpClient) -> None:
        self.answer, self.request = answer, request
        self._ended, self._keeps_text = ended, client.keeps_text
        self.timer: asyncio.TimerHandle | None = None
        self.connection: _Connection | None = None
        self.is_over = self.is_whole = False
        self._rest = b""
        self._texts: list[str] = []

    def read(self, data: bytes, now_s: float) -> None:
        """Part of the body came. An event is a line that begins with `data:`."""
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s)

    def late(self) -> None:
        """The deadline has passed."""
        self._break_off("timeout", "the answer was not over in time")

    def forget(self) -> None:
        """Nobody waits for it any more."""
        self.is_over = True
        if self.timer is not None:
            self.timer.cancel()

    def end(self, error: str = "", message: str = "") -> None:
        """The answer is over, whole or with an error. Only the first call counts."""
        if self.is_over:
            return
        self.forget()
        self.answer.text = "".join(self._texts)
        self.answer.ended(time.perf_counter(), error, message)
        self._ended(self.answer)

    def _break_off(self, error: str, message: str) -> None:
        self.end(error, message)
        if self.connection is not None:
            self.connection.close()

    def _take(self, data: bytes, now_s: float) -> None:
        if data == _DONE:
            self.is_whole = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._break_off("broken", f"an event cannot be read: {error}")
            return
        if bytes(event.error) not in _NOTHING:
            self._break_off("error", bytes(event.error)[:MESSAGE_BYTES].decode(errors="replace"))
            return
        if event.usage is not None:
            self._count(event.usage)
        if event.choices:
            choice = event.choices[0]
            text = _text_of(choice)
            so_far = event.usage.completion_tokens if event.usage is not None else 0
            # Some servers say 0 until the end: then an event with text is one token, as where there is no usage.
            self.answer.arrived(now_s, so_far - self.answer.counted if so_far else int(bool(text)))
            if self._keeps_text and text:
                self._texts.append(text)
            self.is_whole = self.is_whole or choice.finish_reason is not None

    def _count(self, usage: _Usage) -> None:
        answer = self.answer
        answer.prompt_tokens = usage.prompt_tokens or answer.prompt_tokens
        answer.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


def _text_of(choice: _Choice) -> str:
    """What the event adds to the answer. A call of a tool counts as text, though none is kept of it."""
    if choice.text is not None:
        return choice.text
    if choice.delta is None:
        return ""
    return (
        choice.delta.content or choice.delta.reasoning_content or (" " if bytes(choice.delta.tool_calls) not in _NOTHING else "")
    )


class _Connection(asyncio.Protocol):
    """One connection, and one request after another on it."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._exchange: _Exchange | None = None
        self._asked = 0
        self._has_read = False
        self._status = 0
        self._now_s = 0.0
        self._refusal = b""

    def ask(self, exchange: _Exchange) -> None:
        assert self._transport is not None and self._exchange is None
        self._exchange, exchange.connection = exchange, self
        self._parser = httptools.HttpResponseParser(self)
        self._asked += 1
        self._has_read, self._status, self._refusal = False, 0, b""
        self._transport.write(exchange.request)

    def close(self) -> None:
        """At once. A request that is still open gets no answer, and nobody is called."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.forget()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._client.connected(self)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self._has_read = True
        if self._exchange is None:
            self.close()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("broken", f"this is no HTTP: {error}")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is None:
            return
        if self._status == 200:
            self._exchange.read(body, self._now_s)
        elif len(self._refusal) < MESSAGE_BYTES:
            self._refusal += body

    def on_message_complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        keeps = self._parser.should_keep_alive()
        if keeps and not exchange.is_over:
            self._client.idle(self)
        elif self._transport is not None:
            self._transport.close()
        if self._status != 200:
            message = self._refusal[:MESSAGE_BYTES].decode(errors="replace")
            exchange.end(f"{self._status // 100}xx", f"HTTP {self._status}: {message}")
        elif not exchange.is_whole:
            exchange.end("broken", "the stream ended before the answer did")
        else:
            exchange.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lost(self)
        exchange, self._exchange = self._exchange, None
        if exchange is None or exchange.is_over:
            return
        if self._asked > 1 and not self._has_read:
            self._client.again(exchange)
        else:
            exchange.end("broken", f"the connection was lost: {exc!r}" if exc else "the server closed the connection")

    def _fail(self, kind: str, message: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(kind, message)
        self.close()


def tls_of(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
