"""gRPC beside HTTP: SGLang's scheduler service and the standard health check, in the router's loop.

Owns the port, the bounds of calls and connections, and the way of a call from its message to the last one of its answer. What a
call takes of the router, it takes as an HTTP request does: see `Visit`. Does not know how a request is served.

A call is served as a stream in both directions, whatever it is on the wire: so its key is looked at before its message is read,
and so many messages arrive at a time. Only --grpc-port imports this: grpcio is an extra.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
from starlette.types import Message, Scope

from common.access import Access
from common.config import RouterConfig
from common.errors import BadRequest, ConfigError, DeadlinePassed, NotFound, Overloaded, TandemError
from common.logs import REQUEST
from router.api.admission import CLIENT_CLOSED, SPARE_CONNECTIONS, Visit
from router.api.app import Api
from router.api.embeddings import embedding_of, lacking
from router.api.errors import RETRY_AFTER_S, BodyTooSlow, shown
from router.api.grpc_messages import (
    CLASSES,
    HEALTH,
    SCHEDULER,
    GenerateMessages,
    parsed,
    read_embed_message,
    read_generate_message,
)
from router.api.guard import HEADER, Guard, NeededKey, id_in
from router.api.sending import AnswerFailed, news_of
from router.api.server import GRACE_S, HEAD_BYTES, HEAD_S, KEEP_ALIVE_S, MAX_BODY_BYTES, SEND_TIMEOUT_S
from router.api.threads import Turns
from router.metrics import RouterMetrics

MESSAGE_S = 10.0
"""How long a message may take to arrive: it is one of few that do at a time, because any of them may be long."""
CHECK_S, MOST_CHECKS = 1.0, 16
"""The same for health checks, which need no key: what strangers begin to send takes no turn of those with one."""
PING_S, PONG_S = 60, 20
"""After so long a silence a connection is asked whether its client is there, and closed without an answer."""
LEAST_PING_S = 10
"""Clients that ping more often than so without a call lose their connection."""

_log = logging.getLogger(__name__)
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""What our statuses are in gRPC; others are INTERNAL."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call whose message is here. context: a grpc.aio.ServicerContext. scope: its metadata, as headers of an ASGI scope."""

    context: Any
    visit: Visit
    scope: Scope
    body: bytes

    async def write(self, message: bytes) -> None:
        """Raises DeadlinePassed for a client that does not read."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self.context.write(message)
        except TimeoutError as error:
            raise DeadlinePassed(f"the client did not read its answer within {SEND_TIMEOUT_S:g} s") from error

    async def answer(self, name: str, **fields: Any) -> None:
        """Write the message of this full name."""
        await self.write(CLASSES[name](**fields).SerializeToString())


Serve: TypeAlias = Callable[[Call], Coroutine[Any, Any, None]]


class GrpcCalls:
    """Serves the calls of one router."""

    def __init__(self, api: Api, guard: Guard, metrics: RouterMetrics, config: RouterConfig) -> None:
        self._api, self._guard, self._metrics = api, guard, metrics
        self._gateway, self._intake = api.admission.gateway, api.admission.intake
        self._longest_s = config.max_request_timeout_s
        self._started = time.time()
        most_bytes = api.admission.max_body_bytes or MAX_BODY_BYTES
        self._arriving = Turns(max(2, MAX_BODY_BYTES // most_bytes))
        """A message has a turn while it arrives."""
        self._checking = Turns(MOST_CHECKS)
        scheduler = f"/{SCHEDULER}.SglangScheduler/"
        served: Mapping[str, Serve] = {
            f"{scheduler}Generate": self._generate,
            f"{scheduler}Embed": self._embed,
            f"{scheduler}Abort": self._abort,
            f"{scheduler}GetModelInfo": self._model_info,
            f"{scheduler}GetServerInfo": self._server_info,
            f"{scheduler}HealthCheck": self._health_check,
            f"/{HEALTH}.Health/Check": self._check,
        }
        self._handlers = {
            path: grpc.stream_stream_rpc_method_handler(partial(self._serve, path, serve)) for path, serve in served.items()
        }

    def service(self, called: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Implements grpc.GenericRpcHandler."""
        return self._handlers.get(called.method)

    async def _serve(self, path: str, serve: Serve, _: object, context: Any) -> None:
        """The way of a call through the router: what `Doorkeeper` is for HTTP."""
        metadata = context.invocation_metadata()
        headers = [(name.encode(), one if isinstance(one, bytes) else one.encode()) for name, one in metadata]
        scope = {"method": "POST", "path": path, "headers": headers}
        visit, status, problem = Visit(self._api.admission, scope, _no_response), CLIENT_CLOSED, ""
        wait_s: int | None = None
        try:
            visit.id = id_in(scope) or visit.id
            REQUEST.set(visit.id)
            needs_key = serve not in (self._health_check, self._check)  # as at HTTP: load balancers have none
            if needs_key:
                visit.owner = self._guard.name_of_caller(scope, NeededKey.API)
                visit.take_place()
                place = visit.hand_over_place()  # until the client has read all
                context.add_done_callback(lambda _: place.close(status))
            await serve(Call(context, visit, scope, await self._message(visit.owner, context, needs_key)))
            status = 200
        except TandemError as error:
            status, problem = error.failed.status if isinstance(error, AnswerFailed) else error.status, str(error)
            wait_s = error.retry_after_s if isinstance(error, Overloaded) else RETRY_AFTER_S.get(status)
        except grpc.aio.BaseError:
            raise  # nobody is left to answer: grpcio ends the call
        except Exception:  # noqa: BLE001  grpcio would tell the client what went wrong inside
            _log.exception("a call of %s failed", path)
            status, problem = 500, "internal error: see the router's log"
        finally:
            visit.close(status)
            self._metrics.responded(path, status)
        trailers = [(HEADER.decode(), visit.id)]
        if wait_s is not None:
            trailers.append(("grpc-retry-pushback-ms", str(1000 * wait_s)))
        context.set_trailing_metadata(tuple(trailers))
        if status != 200:
            await context.abort(_CODES.get(status, grpc.StatusCode.INTERNAL), problem)

    async def _message(self, owner: str, context: Any, needs_key: bool) -> bytes:
        """The message of a call. Raises BadRequest, BodyTooSlow."""
        turns, within_s = (self._arriving, MESSAGE_S) if needs_key else (self._checking, CHECK_S)
        try:
            async with asyncio.timeout(within_s), turns.held(owner):
                message = await context.read()
        except TimeoutError as error:
            raise BodyTooSlow(f"the message did not arrive within {within_s:g} s") from error
        if not isinstance(message, bytes):
            raise BadRequest("the call has no message")
        return message

    async def _generate(self, call: Call) -> None:
        client = call.visit.enter(scope=call.scope)
        asked = await call.visit.parse(call.body, partial(read_generate_message, self._api.model_name, self._left_s(call)))
        accepted = await self._api.dispatch(call.visit, client, asked)
        messages, whole = GenerateMessages(client.id, asked, accepted), list[tuple[int, bytes]]()
        async for delta in news_of(client):
            for message in messages.of(delta):
                if asked.fields.stream:
                    await call.write(message)
                else:
                    whole.append((delta.index, message))
        for _, message in sorted(whole):
            await call.write(message)

    async def _embed(self, call: Call) -> None:
        client = call.visit.enter(scope=call.scope)
        reader = partial(read_embed_message, self._api.model_name, self._api.embedding, self._left_s(call))
        asked, own_id = await call.visit.parse(call.body, reader)
        call.visit.id = client.id = own_id or client.id
        accepted = await self._api.dispatch(call.visit, client, asked)
        async for delta in news_of(client):
            if (failed := lacking(delta.ending)) is not None:
                raise AnswerFailed(failed)
            numbers, counts = embedding_of(delta, asked).tolist(), {"prompt_tokens": accepted.prompt_tokens}
            await call.answer(f"{SCHEDULER}.EmbedResponse", embedding=numbers, embedding_dim=len(numbers), **counts)

    async def _abort(self, call: Call) -> None:
        asked = parsed(f"{SCHEDULER}.AbortRequest", call.body)
        if not asked.request_id:
            raise BadRequest("request_id is missing: send the id of a request")
        ended = self._gateway.abort(call.visit.owner, asked.request_id)
        await call.answer(f"{SCHEDULER}.AbortResponse", success=ended > 0, message=f"{ended} answers were ended")

    async def _health_check(self, call: Call) -> None:
        reasons = self._gateway.core.unready()
        await call.answer(f"{SCHEDULER}.HealthCheckResponse", healthy=not reasons, message="; ".join(reasons))

    async def _check(self, call: Call) -> None:
        service = parsed(f"{HEALTH}.HealthCheckRequest", call.body).service
        if service not in ("", f"{SCHEDULER}.SglangScheduler", f"{HEALTH}.Health"):
            raise NotFound(f"{shown(service)!r} is no service of this router")
        status = "NOT_SERVING" if self._gateway.core.unready() else "SERVING"
        await call.answer(f"{HEALTH}.HealthCheckResponse", status=status)

    async def _model_info(self, call: Call) -> None:
        context, version = self._intake.context_tokens, self._gateway.core.fleet.weights.version
        fields = {"served_model_name": self._api.model_name, "weight_version": version, "is_generation": True}
        name = f"{SCHEDULER}.GetModelInfoResponse"
        await call.answer(name, max_context_length=context, max_req_input_len=context - 1, **fields)

    async def _server_info(self, call: Call) -> None:
        core = self._gateway.core
        ranks = sum(len(member.info.ranks) for member in core.fleet.members())
        fields = {"active_requests": len(core.requests), "is_paused": core.fleet.weights.is_paused, "server_type": "grpc"}
        times = {"uptime_seconds": time.time() - self._started, "start_time": {"seconds": int(self._started)}}
        server = {"served_model_name": self._api.model_name, "num_gpus": ranks, "tp_size": ranks}
        await call.answer(f"{SCHEDULER}.GetServerInfoResponse", server_args=server, **fields, **times)

    def _left_s(self, call: Call) -> float | None:
        """What is left of the call's deadline; None: it has none."""
        left_s = call.context.time_remaining()
        return None if left_s is None else min(max(left_s, 0.001), self._longest_s)


async def _no_response(message: Message) -> None:
    raise AssertionError("a call has no HTTP response")


@asynccontextmanager
async def serving_grpc(
    config: RouterConfig, api: Api, metrics: RouterMetrics, access: Access, host: str, stop: asyncio.Event
) -> AsyncIterator[str]:
    """Serve meanwhile; yields the URL. From `stop` on no call is taken, and clients are told to go elsewhere; those that are open
    when this is left are cut off. Raises ConfigError."""
    most = config.max_requests + SPARE_CONNECTIONS
    options = _options(most, api.admission.max_body_bytes, is_shared=config.share_port == "on")
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=2 * most)  # beside those with a place: health checks
    server.add_generic_rpc_handlers((GrpcCalls(api, Guard(access, (), ()), metrics, config),))
    where = f"{host}:{config.grpc_port}"
    try:
        if access.pem is None:
            port = server.add_insecure_port(where)
        else:
            port = server.add_secure_port(where, grpc.ssl_server_credentials((access.pem,)))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen for gRPC on {where}: {error}. Choose another --grpc-port, or 0") from error
    await server.start()
    leaving = asyncio.create_task(_leave(server, stop, config.drain_timeout_s))
    try:
        yield f"{'grpc' if access.pem is None else 'grpcs'}://{config.host}:{port}"
    finally:
        leaving.cancel()
        await server.stop(GRACE_S)


async def _leave(server: grpc.aio.Server, stop: asyncio.Event, drain_s: float) -> None:
    await stop.wait()
    await server.stop(drain_s + GRACE_S)


def _options(most: int, most_bytes: int | None, *, is_shared: bool) -> list[tuple[str, int]]:
    """The bounds of grpcio. most: connections, and calls of one. most_bytes: of a message. is_shared: several routers have the
    port. Compressed messages are refused, because only their compressed length is bounded."""
    return [
        ("grpc.so_reuseport", int(is_shared)),
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.max_concurrent_streams", most),
        ("grpc.max_receive_message_length", -1 if most_bytes is None else most_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", HEAD_BYTES),
        ("grpc.absolute_max_metadata_size", HEAD_BYTES),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # of "identity" alone
        ("grpc.per_message_decompression", 0),
        ("grpc.http2.bdp_probe", 0),  # it would let more of a message arrive before it is read
        ("grpc.server_handshake_timeout_ms", int(1000 * HEAD_S)),
        ("grpc.max_connection_idle_ms", 1000 * KEEP_ALIVE_S),
        ("grpc.keepalive_time_ms", 1000 * PING_S),
        ("grpc.keepalive_timeout_ms", 1000 * PONG_S),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000 * LEAST_PING_S),
    ]
