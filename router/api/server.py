"""The HTTP server: a listening socket, and uvicorn on it until it is told to stop.

Owns the settings of the server and its end, and bounds heads, bodies and clients that do not read. Does not know what it
serves, and handles no signals.

Connections that wait for their clients: for a request, because none has arrived or the last was answered, or for its body.

Owns their number, the bytes that are held of bodies, and the time that the head of a request may take, whether its sender sends
nothing, single bytes or empty lines. Counts each connection that the server drops. Connections whose request is here are bounded
elsewhere. Does not know HTTP.

    connected ──► head awaited ──(HEAD_S)──► dropped
                   │  ▲ first byte
                   ▼  │
              in progress ──► answered: rests ──(the server's own keep-alive)──► closed
                   │             └─ more rest than may: the one that rests for longest is dropped, first of those without a key
                   └─ body awaited: of too many, the oldest of the key with the most is dropped;
                      of too many bytes, those that are held for longest
"""

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import httptools
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from common.errors import BadRequest, ConfigError
from router.api.admission import Visit
from router.api.errors import VISIT, ErrorDetail, error_json
from router.metrics import Dropped

HEAD_S = 10.0
"""How long the head of a request may take, from the connection or from its first byte."""
SEND_TIMEOUT_S = 60.0
"""How long a client may take to read what fills its send buffer."""

MAX_BODY_BYTES = 256 * 2**20
"""What may be held of bodies that have not arrived whole."""


class Connection(Protocol):
    @property
    def owner(self) -> str:
        """Name of the API key of its last request; "" before that is known."""

    def drop(self) -> None:
        """Close it at once, whatever has not been sent."""


@dataclass(slots=True)
class _Body:
    """A body that has not arrived whole. since_s: when its first part came."""

    since_s: float
    bytes: int


class WaitingConnections:
    """Those of one server. most: so many may wait for a request, and so many for a body. dropped: called for each that is
    dropped. most_body_bytes: of bodies that have not arrived whole. Use it on one loop's thread."""

    def __init__(self, most: int, dropped: Callable[[Dropped], object], most_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._most = most
        self._most_body_bytes = most_body_bytes
        self._bodies: dict[Connection, _Body] = {}
        """The oldest is first."""
        self._body_bytes = 0
        self._dropped = dropped
        self._waiting: dict[Connection, None] = {}
        """The one that waits for longest is first."""
        self._strangers: dict[Connection, None] = {}
        """Those of them whose last request had no key, in the same order."""
        self._heads: dict[Connection, float] = {}
        """By when each must have sent a head, the earliest first: all get the same time."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def rests(self, connection: Connection) -> None:
        """No request is in progress on it, and none has begun to arrive."""
        self.expects_no_body(connection)
        self._waiting[connection] = None
        if not connection.owner:
            self._strangers[connection] = None
        if len(self._waiting) > self._most:
            self.drop(next(iter(self._strangers or self._waiting)), Dropped.TOO_MANY)

    def expects_head(self, connection: Connection) -> None:
        """A request begins to arrive on it, or must do so now. Repeating this gives no more time."""
        if connection in self._waiting and connection not in self._heads:
            loop = asyncio.get_running_loop()
            self._heads[connection] = loop.time() + HEAD_S
            if self._timer is None:
                self._timer = loop.call_later(HEAD_S, self._ring)

    def expects_body(self, connection: Connection, body_bytes: int) -> None:
        """So many bytes of a request's body are here, and the rest must come."""
        now = asyncio.get_running_loop().time()
        body = self._bodies.setdefault(connection, _Body(now, 0))
        self._body_bytes += body_bytes - body.bytes
        body.bytes = body_bytes
        if len(self._bodies) > self._most:
            of_keys = Counter(each.owner for each in self._bodies)
            oldest = max(self._bodies, key=lambda each: of_keys[each.owner])  # the first of several
            self.drop(oldest, Dropped.MANY_BODIES)
        while self._body_bytes > self._most_body_bytes:
            costliest = max(self._bodies.items(), key=lambda item: item[1].bytes * (now - item[1].since_s))
            self.drop(costliest[0], Dropped.LARGE_BODIES)

    def expects_no_body(self, connection: Connection) -> None:
        """The body is here, or nobody wants it. Idempotent."""
        if (body := self._bodies.pop(connection, None)) is not None:
            self._body_bytes -= body.bytes

    def leaves(self, connection: Connection) -> None:
        """A request is in progress on it, or it is closed. Idempotent."""
        self.expects_no_body(connection)
        self._waiting.pop(connection, None)
        self._strangers.pop(connection, None)
        self._heads.pop(connection, None)

    def drop(self, connection: Connection, why: Dropped) -> None:
        """Close it at once, whether it waits or not."""
        self.count(connection, why)
        connection.drop()

    def count(self, connection: Connection, why: Dropped) -> None:
        """The server closes it for this reason."""
        self.leaves(connection)
        self._dropped(why)

    def _ring(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        for connection, until_s in list(self._heads.items()):
            if until_s > loop.time():
                self._timer = loop.call_at(until_s, self._ring)
                return
            self.drop(connection, Dropped.NO_HEAD)


GRACE_S = 5
"""How long it may take to send what is left when the server stops."""
KEEP_ALIVE_S = 75
BACKLOG = 65536
"""Connections that may wait to be accepted. The kernel allows as many as net.core.somaxconn, and resets those beyond."""
HEAD_BYTES = 64 * 1024
"""Longest head of a request: its URL and headers."""
MAX_PIPELINED = 16
"""How many requests may wait behind an open one."""
PIECE_BYTES = 64 * 1024
"""Longer bodies are sent in pieces, each when the client has read most of what came before. So a client has SEND_TIMEOUT_S for
each piece, not for the whole answer, and an answer that is read slowly stays open and is counted."""


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket bound to this IPv4 address; port 0: any free port. shared: others may listen there too, and the kernel deals out
    the connections. Raises ConfigError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen for HTTP on {host}:{port}: {error.strerror}. Choose another --port, or 0") from error
    listener.setblocking(False)
    return listener


async def serve_app(
    app: Callable[..., Any],
    listeners: list[socket.socket],
    ready: Callable[[], None],
    until: Coroutine[Any, Any, object],
    waiting: WaitingConnections,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve until `until` is done, and raise what it raises. Then listen no more, and end open answers within `GRACE_S`. ready:
    called when the server listens. waiting: bounds the connections without a request in progress. tls: None for plain HTTP."""
    make_protocol: Any = partial(_Protocol, waiting)  # uvicorn only calls it
    config = uvicorn.Config(
        app,
        http=make_protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config, tls, ready)
    serving, stopping = asyncio.create_task(server.serve(sockets=listeners)), asyncio.create_task(until)
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        if stopping.done():
            stopping.result()
    finally:
        serving.cancel()
        stopping.cancel()


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which tells when it listens, and with a bound for TLS handshakes."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._tls = tls
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        make_protocol: Any = self.config.http_protocol_class
        make = partial(make_protocol, config=self.config, server_state=self.server_state, app_state={})
        loop = asyncio.get_running_loop()
        handshake_s, shutdown_s = (None, None) if self._tls is None else (HEAD_S, float(GRACE_S))
        self.servers = [
            await loop.create_server(
                make,
                sock=each,
                backlog=self.config.backlog,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=shutdown_s,
            )
            for each in sockets
        ]
        self.started = True
        self._ready()


class _Protocol(HttpToolsProtocol):
    """Uvicorn's HTTP/1.1, with bounds for connections that wait, for heads and for clients that do not read; with few
    pipelined requests: none behind an open POST (RFC 9112, 9.3.2, warns clients against it) or an answer that is not read; and
    without upgrades.

    Uvicorn stops reading behind an open request, so it would never notice that the client leaves, and the answer would go on for
    nobody. It goes on reading after each answer, so one client could fill the memory with requests. It closes a connection only
    when all is sent, so a client that reads nothing would keep it open for ever. It reads the body of a request that offers an
    upgrade as the next request.
    """

    def __init__(self, waiting: WaitingConnections, **arguments: Any) -> None:
        self._pieces: list[bytes] = []
        """The pieces of a body that arrived with the present read."""
        super().__init__(**arguments)
        self._waiting = waiting
        self._unread: asyncio.TimerHandle | None = None
        """Runs while the send buffer is full."""
        self._ending: asyncio.TimerHandle | None = None
        """Runs when nothing more is read, until all is sent."""
        self._head_bytes = 0
        """Bytes since the last head or piece of a body: of the present head, or of what follows a chunked body."""
        self._body_bytes = 0
        """Bytes of the present body."""
        self._is_in_body = False
        self._refused = False
        self._answering: RequestResponseCycle | None = None
        """The request that was started last: those behind it wait."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting.rests(self)
        self._waiting.expects_head(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.leaves(self)
        self._stop_unread()
        if self._ending is not None:
            self._ending.cancel()
        self._unset_keepalive_if_required()  # a timer would hold the connection and its body in memory
        self.pipeline.clear()
        if (answering := self._open_cycle()) is not None:
            answering.disconnected = True
            answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while len(data) > (room := HEAD_BYTES - self._head_bytes) and not self._is_over():
            self._feed(data[:room])
            data = data[room:]
            if self._head_bytes >= HEAD_BYTES:
                self._refuse_head()
        if not self._is_over():
            self._feed(data)
            self._waiting.expects_head(self)
            if self._is_in_body and not self._is_over() and not self.cycle.response_complete:
                self._waiting.expects_body(self, self._body_bytes)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ConnectionRefusedError("no tunnels here")
            return  # the head comes again without the offer
        self._waiting.leaves(self)
        self._head_bytes = 0
        answering = self._open_cycle()
        is_behind_post = answering is not None and answering.scope["method"] == "POST"
        if is_behind_post or self.flow.write_paused or len(self.pipeline) >= MAX_PIPELINED:
            self._waiting.drop(self, Dropped.PIPELINED)
            raise ConnectionAbortedError("too many requests at once")  # so that the parser stops
        self._body_bytes, self._is_in_body = 0, True
        super().on_headers_complete()

    @property
    def on_body(self) -> Callable[[bytes], None]:
        """Gets the pieces of a body. Chunks may be single bytes, so each costs as little as can be."""
        return self._pieces.append

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._take_pieces()
        self._is_in_body = False
        self._waiting.expects_no_body(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline and self.flow.write_paused:
            self._waiting.drop(self, Dropped.PIPELINED)
            return
        super().on_response_complete()
        if self.transport.is_closing():
            self._end_within(SEND_TIMEOUT_S)
        elif self.cycle.response_complete:
            self._waiting.rests(self)

    def send_400_response(self, msg: str) -> None:
        if self._is_over():
            return
        super().send_400_response(msg)
        self._end_within(GRACE_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(SEND_TIMEOUT_S, self._drop_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def timeout_keep_alive_handler(self) -> None:
        self.drop()

    @property
    def owner(self) -> str:
        """The guard has noted it in the turn of the loop after that of the head."""
        visit = None if self._answering is None else self.scope.get(VISIT)  # there is no scope before the first request
        return visit.owner if isinstance(visit, Visit) else ""

    def drop(self) -> None:
        """Close it at once: a client that reads nothing would keep it open for ever."""
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        app = partial(_in_pieces, app)
        super()._start_asgi_task(cycle, partial(_unframed, cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    # --- inside --------------------------------------------------------------------------------------------------------

    def _open_cycle(self) -> RequestResponseCycle | None:
        """The request that is being answered."""
        return None if self._answering is None or self._answering.response_complete else self._answering

    def _is_over(self) -> bool:
        """Whether what still arrives is not read."""
        return self._refused or self.transport.is_closing()

    def _feed(self, data: bytes) -> None:
        """Parse it. A server need not take an upgrade that a client offers (RFC 9110, 7.8), but the parser skips the body of such
        a request. So another one gets the head again without the offer."""
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
            self._take_pieces()
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _take_pieces(self) -> None:
        """All pieces of one read go on as one."""
        if self._pieces:
            body = b"".join(self._pieces)
            self._pieces.clear()
            self._head_bytes = 0
            self._body_bytes += len(body)
            super().on_body(body)

    def _parse(self, data: bytes) -> bytes:
        """Returns what follows a head with an offer."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            (offset,) = offer.args
            start = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            headers = (b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade")
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"\r\n".join((start, *headers, b"\r\n")))
            return data[offset:]
        return b""

    def _refuse_head(self) -> None:
        """Answer that the head is too long, unless an answer is under way. What the client goes on sending is read for a while,
        or it would get a reset instead of the answer."""
        if self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self._waiting.drop(self, Dropped.LONG_HEAD)
            return
        self._waiting.count(self, Dropped.LONG_HEAD)
        self.transport.write(_HEAD_TOO_LONG)
        if self.transport.can_write_eof():  # TLS cannot: there the answer's head says that the connection ends
            self.transport.write_eof()
        self._end_within(GRACE_S, self.drop)

    def _end_within(self, seconds: float, end: Callable[[], None] | None = None) -> None:
        """Drop it when it is not closed by then. end: called then in place of counting it as unread."""
        if self._ending is not None:
            self._ending.cancel()
        self._ending = self.loop.call_later(seconds, end or self._drop_unread)

    def _drop_unread(self) -> None:
        if self in self.connections:
            self._waiting.drop(self, Dropped.UNREAD)

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


async def _in_pieces(app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve the request, and send long bodies piece by piece."""

    async def send_pieces(message: Message) -> None:
        body = memoryview(message["body"])
        for first in range(0, len(body), PIECE_BYTES):
            more = first + PIECE_BYTES < len(body) or message.get("more_body", False)
            await send({"type": message["type"], "body": body[first : first + PIECE_BYTES], "more_body": more})

    def send_message(message: Message) -> Awaitable[None]:
        return send(message) if len(message.get("body", b"")) <= PIECE_BYTES else send_pieces(message)

    await app(scope, receive, send_message)


async def _unframed(cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a client of HTTP/1.0, which does not know chunks: a body of unknown length ends with the connection. Uvicorn knows
    only bodies of a known length and chunks, so each piece is announced to it as the length that is left."""
    is_unframed = False

    async def send_unframed(message: Message) -> None:
        nonlocal is_unframed
        if message["type"] == "http.response.start":
            is_unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if is_unframed:
                cycle.chunked_encoding = False
        elif is_unframed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_unframed)


_message = f"the head of the request is longer than {HEAD_BYTES} bytes: shorten its URL or its headers"
_body = error_json(ErrorDetail(_message, BadRequest.kind))
_HEAD_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_body), _body)
)
