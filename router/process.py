"""The router's process: HTTP server, mailbox and core in one event loop.

Owns sockets, the loop's duties and their order at start and end. Decides nothing. Whoever calls `serve` chooses the loop (uvloop
where there is one), handles signals, and starts the detokenizer's process.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from common.config import ModelConfig, RouterConfig, parse_bytes
from common.errors import ConfigError
from common.ids import DETOKENIZER, ROUTER, Incarnation
from common.messages import RouterInbox
from common.text.tokenizer_manager import TokenizerManager
from common.wire import Mailbox
from router.app import Api, build_app
from router.core import RouterCore
from router.gateway import Gateway
from router.intake import Intake
from router.metrics import RouterMetrics

GRACE_S = 5
"""How long open answers may go on after the router was told to stop."""
KEEP_ALIVE_S = 75
BACKLOG = 2048

_log = logging.getLogger(__name__)


async def serve(
    config: RouterConfig,
    model: ModelConfig,
    detokenizer_address: str,
    ready: Callable[[str, str], None],
    stop: asyncio.Event,
) -> None:
    """Serve until `stop` is set, then end open answers within `GRACE_S`.

    ready: called once with the HTTP URL and the control address, ports chosen, when both are listening.
    Raises ConfigError when an address cannot be listened on or the tokenizer cannot be loaded.
    """
    tokenizer = TokenizerManager(model.model)
    name = model.served_name or tokenizer.model_name
    host = _resolve(config.host)
    listener = _listen(host, config.port)
    with contextlib.closing(listener), contextlib.closing(_mailbox(host, config.control_port)) as mailbox:
        mailbox.route(DETOKENIZER, detokenizer_address)
        metrics = RouterMetrics()
        core = RouterCore(Incarnation(secrets.token_hex(8)), detokenizer_address, config, metrics)
        gateway = Gateway(core, mailbox, time.monotonic)
        intake = Intake(core, tokenizer, name)
        api = Api(gateway, intake, metrics, name, tokenizer.context_tokens, parse_bytes(config.max_body))
        server = _Server(_server_config(build_app(api, metrics, config.max_requests)))
        mailbox.attach(asyncio.get_running_loop(), gateway.pump)
        try:
            url = f"http://{config.host}:{listener.getsockname()[1]}"
            _log.info("the router serves %s on %s, instances register at %s", name, url, mailbox.address)
            await _serve_http(server, listener, lambda: ready(url, mailbox.address), stop)
        finally:
            gateway.close()
            intake.close()


async def _serve_http(server: "_Server", listener: socket.socket, ready: Callable[[], None], stop: asyncio.Event) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    started = asyncio.create_task(server.started_event.wait())
    try:
        await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            ready()
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        stopping.cancel()
        started.cancel()
        if not serving.done():
            server.force_exit = True
            serving.cancel()


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, and with an event that says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.started_event = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_event.set()


def _server_config(app: Callable[..., Any]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )


def _resolve(host: str) -> str:
    """The IPv4 address of a host name: ZeroMQ binds to numbers only. Raises ConfigError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"--host {host!r} is no address or name of this host: {error}") from error


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen for HTTP on {host}:{port}: {error.strerror}. Choose another --port, or 0") from error
    listener.setblocking(False)
    return listener


def _mailbox(host: str, control_port: int) -> Mailbox[RouterInbox]:
    return Mailbox(ROUTER, RouterInbox, f"tcp://{host}:{control_port}")
