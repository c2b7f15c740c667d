"""The HTTP server: a listening socket, and uvicorn on it until it is told to stop.

Owns the server's settings and its end. Does not know what it serves, and handles no signals.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import ConfigError

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
    app: Callable[..., Any], listeners: list[socket.socket], ready: Callable[[], None], until: Coroutine[Any, Any, object]
) -> None:
    """Serve until `until` is done, and raise what it raises. Then listen no more, and end open answers within `GRACE_S`. ready:
    called when the server listens."""
    server = _Server(_config(app))
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
    """Uvicorn's HTTP/1.1, without requests that are pipelined behind an open POST (RFC 9112, 9.3.2, warns clients against it).

    Uvicorn stops reading then, so it would never notice that the client leaves, and the answer would go on for nobody.
    """

    def on_headers_complete(self) -> None:
        answering = self.cycle
        super().on_headers_complete()
        if self.pipeline and answering is not None and answering.scope["method"] == "POST":
            answering.disconnected = True
            answering.message_event.set()
            self.transport.close()


def _config(app: Callable[..., Any]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
