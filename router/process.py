"""The router's process: HTTP server, mailbox and core in one event loop.

Owns the composition, and the order of start and end. Decides nothing. The caller of `serve` chooses the loop, handles signals,
and starts the detokenizers' processes.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common.access import LOOPBACK_ONLY, OPEN, Access, Trust
from common.addresses import bind_address
from common.config import ModelConfig, RouterConfig
from common.errors import ConfigError
from common.extras import install_command
from common.host import allow_many_files
from common.ids import InstanceId
from common.mail import Mailbox
from common.messages import RouterInbox
from common.options import parse_bytes
from common.text.embedding import read_embedding
from common.text.tokenizer_manager import TokenizerManager
from router.api.admission import SPARE_CONNECTIONS
from router.api.app import Api, build_app
from router.api.intake import Intake
from router.api.server import MAX_BODY_BYTES, WaitingConnections, listen, serve_app
from router.core import Gateway, RouterCore
from router.metrics import RouterMetrics
from router.scaling import ScalingBoard

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """A router that serves. All addresses have the ports that were chosen."""

    url: str
    """Where it serves HTTP."""
    own_url: str
    """The same, but nobody else listens there."""
    grpc_url: str
    """Where it serves gRPC; "": nowhere."""
    control: str
    """Where instances register."""
    detokenizer_moved: Callable[[int, str], None]
    """Call it, on the router's loop, with number and address of a detokenizer that replaces the former one."""
    meet_others: Callable[[Sequence[str], ssl.SSLContext | None], None]
    """Call it there with the own URLs of all routers at the same port, and whom to trust behind https."""
    scaling: ScalingBoard
    """Set there who keeps instances beside this router."""


async def serve(
    config: RouterConfig,
    model: ModelConfig,
    router: InstanceId,
    detokenizers: Sequence[str],
    ready: Callable[[Serving], None],
    stop: asyncio.Event,
    at_once: asyncio.Event,
    trust: Trust = LOOPBACK_ONLY,
    access: Access = OPEN,
) -> None:
    """Serve until `stop` is set, then drain: open answers may go on for --drain-timeout-s, or until `at_once` is set.

    router: the name of this life of it. detokenizers: their addresses. access: who may use HTTP, and by which certificate.
    ready: called once, when both addresses are listening.
    Raises ConfigError when an address cannot be listened on or the tokenizer cannot be loaded.
    """
    allow_many_files()
    tokenizer = TokenizerManager(model.model, config.chat_template)
    embedding = read_embedding(model.model, config.pooling)
    name = model.served_name or tokenizer.model_name
    host = bind_address(config.host, "--host")
    control = f"tcp://{host}:{config.control_port}"
    shared, scheme = config.share_port == "on", "http" if access.tls is None else "https"
    with (
        contextlib.closing(listen(host, config.port, shared=shared)) as listener,
        contextlib.closing(listen(host, config.own_port)) if shared else contextlib.nullcontext(listener) as own_listener,
        contextlib.closing(Mailbox[RouterInbox](router, RouterInbox, control, trust=trust)) as mailbox,
    ):
        metrics = RouterMetrics()
        core = RouterCore(router, detokenizers, config, metrics, tokenizer.vocab_size, time.time() - time.monotonic())
        for detokenizer, address in zip(core.detokenizer_names, detokenizers, strict=True):
            mailbox.route(detokenizer, address)
        with (
            contextlib.closing(Gateway(core, mailbox, time.monotonic)) as gateway,
            contextlib.closing(Intake(core, tokenizer, name, config)) as intake,
        ):
            api = Api(gateway, intake, metrics, name, config, embedding)
            app = build_app(api, metrics, access, (config.host, host))
            url, own_url = (f"{scheme}://{config.host}:{each.getsockname()[1]}" for each in (listener, own_listener))
            _log.info("%s serves %s at %s; instances register at %s", router, name, url, mailbox.address)
            mailbox.attach(asyncio.get_running_loop(), gateway.pump, gateway.connection_broken)
            meet = api.timelines.others.meet
            most_body_bytes = max(MAX_BODY_BYTES, 2 * (parse_bytes(config.max_body) or 0))
            most_waiting = config.max_requests + SPARE_CONNECTIONS
            waiting = WaitingConnections(most_waiting, metrics.connection_dropped, most_body_bytes)
            listeners = [listener, own_listener] if shared else [listener]
            with contextlib.closing(api.timelines.others):
                grpc = _grpc(config, api, metrics, access, host, stop)
                async with _making_spans(config, api, core, metrics), api.working(), grpc as grpc_url:
                    serving = Serving(url, own_url, grpc_url, mailbox.address, gateway.detokenizer_moved, meet, core.scaling)
                    drained = gateway.drain(config.drain_timeout_s, stop, at_once)
                    await serve_app(app, listeners, lambda: ready(serving), drained, waiting, access.tls)


@contextlib.contextmanager
def _extra(need: str, extra: str) -> Iterator[None]:
    """Import what only this extra of the package installs. Raises ConfigError."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{need}, which is not installed here ({error}): {install_command(extra)}") from error


def _grpc(config: RouterConfig, *others: Any) -> contextlib.AbstractAsyncContextManager[str]:
    """See `serving_grpc`. Raises ConfigError also where grpcio is not installed."""
    if not config.grpc_port:
        return contextlib.nullcontext("")
    with _extra("--grpc-port needs grpcio and protobuf", "grpc"):
        from router.api.grpc_server import serving_grpc
    return serving_grpc(config, *others)


@contextlib.asynccontextmanager
async def _making_spans(config: RouterConfig, api: Api, core: RouterCore, metrics: RouterMetrics) -> AsyncIterator[None]:
    """Meanwhile a collector gets spans, if there is to be one. Raises ConfigError also where the SDK is not installed."""
    if not config.otlp_endpoint:
        yield
        return
    with _extra("--otlp-endpoint needs the SDK of OpenTelemetry", "otlp"):
        from router.api.spans import SpanMaker
    spans = api.admission.to_spans = SpanMaker(config, core, metrics)
    try:
        yield
    finally:
        await asyncio.to_thread(spans.close)
