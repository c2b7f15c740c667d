"""The HTTP server: a listening socket, and uvicorn on it until it is told to stop.

Owns the server's settings and its end. Does not know what it serves, and handles no signals.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import ConfigError
from router.connections import WaitingConnections

GRACE_S = 5
"""How long it may take to send what is left when the server stops."""
KEEP_ALIVE_S = 75
BACKLOG = 2048


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
) -> None:
    """Serve until `until` is done, and raise what it raises. Then listen no more, and end open answers within `GRACE_S`. ready:
    called when the server listens. waiting: bounds the connections without a request in progress."""
    server = _Server(_config(app, waiting))
    serving = asyncio.create_task(server.serve(sockets=listeners))
    started = asyncio.create_task(server.listening.wait())
    stopping = asyncio.create_task(until)
    try:
        await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            ready()
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        if stopping.done():
            stopping.result()
    finally:
        for task in (serving, started, stopping):
            task.cancel()


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, and with an event for when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class _Protocol(HttpToolsProtocol):
    """Uvicorn's HTTP/1.1, with bounds for connections that wait, and without requests that are pipelined behind an open POST (RFC
    9112, 9.3.2, warns clients against it).

    Uvicorn stops reading behind an open request, so it would never notice that the client leaves, and the answer would go on for
    nobody.
    """

    def __init__(self, waiting: WaitingConnections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._waiting = waiting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting.rests(self)
        self._waiting.expects_head(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.leaves(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._waiting.expects_head(self)

    def on_headers_complete(self) -> None:
        self._waiting.leaves(self)
        answering = self.cycle
        super().on_headers_complete()
        if self.pipeline and answering is not None and answering.scope["method"] == "POST":
            answering.disconnected = True
            answering.message_event.set()
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.loop.call_later(KEEP_ALIVE_S, self.transport.abort)  # a client that reads nothing would keep it open for ever
        elif self.cycle.response_complete:
            self._waiting.rests(self)

    def timeout_keep_alive_handler(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Close it at once: a client that reads nothing would keep it open for ever."""
        self.transport.abort()


def _config(app: Callable[..., Any], waiting: WaitingConnections) -> uvicorn.Config:
    make_protocol: Any = partial(_Protocol, waiting)  # uvicorn only calls it
    return uvicorn.Config(
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
