"""gRPC beside HTTP: SGLang's scheduler service and the standard health check, in the router's loop.

Owns the port, the bounds of calls and connections, and the way of a call from its message to the last one of its answer; and the
message classes, made from the descriptors beside this file (see sglang_scheduler.proto) in a pool of their own, and what each
field means. What a call takes of the router, it takes as an HTTP request does: see `Visit`. Does not know how it is served.

A call is served as a stream in both directions, whatever it is on the wire: so its key is looked at before its message is read,
and so many messages arrive at a time. Only --grpc-port imports this: grpcio is an extra.

A field of proto3 that is zero may as well not be there: nobody can tell the two apart on the wire. So zero means what POST
/generate means by leaving the field out, but where zero is a choice that people make: see `_ZERO_COUNTS`.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClassesForFiles
from google.protobuf.unknown_fields import UnknownFieldSet
from starlette.types import Scope

from common.access import Access
from common.config import RouterConfig
from common.errors import BadRequest, ConfigError, DeadlinePassed, NotFound, Overloaded, TandemError
from common.ids import ID_BYTES, unpack_ids
from common.logs import REQUEST
from common.messages import Finished, TokenLogprob
from common.text.embedding import EmbeddingMode
from router.api.admission import CLIENT_CLOSED, SPARE_CONNECTIONS, Visit
from router.api.answers import Accepted, finish_of
from router.api.app import Api
from router.api.embeddings import EmbeddingFields, EmbeddingRequest, embedding_of, embedding_request, lacking
from router.api.errors import RETRY_AFTER_S, BodyTooSlow, ContextExceeded, shown
from router.api.fields import Unsupported, read_fields
from router.api.guard import HEADER, Guard, NeededKey, checked_id, id_in
from router.api.logprobs import finite
from router.api.sending import AnswerFailed, news_of
from router.api.server import GRACE_S, HEAD_BYTES, HEAD_S, KEEP_ALIVE_S, MAX_BODY_BYTES, SEND_TIMEOUT_S
from router.api.sglang import GENERATE, PARAMETERS, GenerateRequest, generate_request
from router.api.threads import Turns
from router.metrics import RouterMetrics
from router.requests import ChoiceDelta

SCHEDULER, HEALTH = "sglang.grpc.scheduler", "grpc.health.v1"


def _message_classes() -> Mapping[str, Any]:
    """By full name. They are `Any`: their fields are made when this is imported."""
    pool = DescriptorPool()
    described = FileDescriptorSet.FromString((Path(__file__).parent / "sglang_scheduler.binpb").read_bytes())
    for file in described.file:
        pool.AddSerializedFile(file.SerializeToString())
    classes: Mapping[str, Any] = GetMessageClassesForFiles([file.name for file in described.file], pool)
    return classes


CLASSES = _message_classes()
_NAMES = ("GenerateResponse", "GenerateStreamChunk", "GenerateComplete", "OutputLogProbs", "InputLogProbs")
_Response, _Chunk, _Complete, _OutputLogProbs, _InputLogProbs = (CLASSES[f"{SCHEDULER}.{name}"] for name in _NAMES)
_MATCHED = {str: "matched_stop_str", int: "matched_token_id"}
_MULTIMODAL: Mapping[str, tuple[object, ...]] = {"mm_inputs": (), "data_parallel_rank": ()}
_NOT_GENERATED = {**GENERATE.values, **_MULTIMODAL, "disaggregated_params": (), "require_reasoning": ()}
_GENERATE = Unsupported(_NOT_GENERATED, inside={"sampling_params": PARAMETERS})
_EMBED = Unsupported({**_MULTIMODAL, "token_type_ids": (), "is_cross_encoder": (), "texts": (), "sampling_params": ({},)})
_OTHER_NAMES = {"request_id": "rid", "lora_id": "lora_path", "ebnf_grammar": "ebnf"}
"""Fields that POST /generate has under another name."""
_ZERO_COUNTS: Mapping[str, object] = {"temperature": 0.0, "skip_special_tokens": False}
"""Sampling parameters that a client means when it sends `sampling_params` and leaves these zero."""


def parsed(name: str, body: bytes) -> Any:
    """The message of this full name. Raises BadRequest."""
    try:
        return CLASSES[name].FromString(body)
    except DecodeError as error:
        raise BadRequest(f"the message is no {name}: {error}") from error


def fields_in(message: Any, most: int, path: str = "") -> dict[str, Any]:
    """The fields that are set. most: entries of a list, as no prompt has more tokens. Raises BadRequest, for a field of a version
    that is not known here too."""
    if unknown := UnknownFieldSet(message):
        raise BadRequest(f"{path}{unknown[0].field_number} is the number of no field that is known here: leave it out")
    fields: dict[str, Any] = {}
    for field, value in message.ListFields():
        name, key = f"{path}{field.name}", _OTHER_NAMES.get(field.name, field.name)
        if isinstance(value, Message):
            fields[key] = fields_in(value, most, f"{name}.") if field.message_type.fields else name
        elif isinstance(value, float):
            fields[key] = _decimal(value, name)
        elif isinstance(value, (bool, int, str)):
            fields[key] = value
        elif len(value) > most:
            raise ContextExceeded(most, f"{name} has {len(value)}, so shorten it", name)
        elif isinstance(value, Mapping):
            fields[key] = {one: _decimal(of, name) if isinstance(of, float) else of for one, of in value.items()}
        else:
            fields[key] = list(value)
    if "rid" in fields:
        checked_id(fields["rid"], "request_id")
    return fields


def _decimal(value: float, name: str) -> float:
    """The shortest decimal that is this float32: what a client has written, such as 0.7, and not 0.699999988. Raises BadRequest
    for what JSON has no number for."""
    if not math.isfinite(value):
        raise BadRequest(f"{name} must be a number, is {value}", field=name)
    return float(str(np.float32(value)))


def read_generate_message(model: str, timeout_s: float | None, body: bytes, context_tokens: int) -> GenerateRequest:
    """See `generate_request`. timeout_s: what is left of the call's deadline."""
    message = parsed(f"{SCHEDULER}.GenerateRequest", body)
    fields = fields_in(message, context_tokens)
    fields.pop("timestamp", None)
    sampling = fields.get("sampling_params", {})
    if message.HasField("sampling_params"):
        sampling = {**_ZERO_COUNTS, **sampling}
    start = fields.pop("logprob_start_len", 0)
    if start > 0 or "return_logprob" in fields:
        fields["logprob_start_len"] = start
    prompt = _prompt_in(fields)
    raw = {**fields, "sampling_params": sampling, "text" if isinstance(prompt, str) else "input_ids": prompt}
    return generate_request(model, raw, _GENERATE, timeout_s)


def read_embed_message(
    model: str, served: EmbeddingMode | None, timeout_s: float | None, body: bytes, context_tokens: int
) -> tuple[EmbeddingRequest, str]:
    """See `embedding_request`. Returns also the id that the client gives the request; "": none."""
    fields = fields_in(parsed(f"{SCHEDULER}.EmbedRequest", body), context_tokens)
    own_id, prompt = fields.pop("rid", ""), _prompt_in(fields)
    raw = {**fields, "input": prompt, "timeout": timeout_s}
    return embedding_request(model, served, read_fields(raw, EmbeddingFields, _EMBED)), own_id


def _prompt_in(fields: dict[str, Any]) -> str | list[int]:
    """Token ids, or a text where there are none: beside ids, SGLang's clients send the text to be read by people. Raises
    BadRequest."""
    tokenized = fields.pop("tokenized", {})
    prompt: str | list[int] | None = tokenized.get("input_ids") or tokenized.get("original_text")
    if prompt is None:
        raise BadRequest("tokenized is empty: send input_ids, or original_text", field="tokenized")
    return prompt


class GenerateMessages:
    """The messages of one answer. request_id: as the client knows it."""

    def __init__(self, request_id: str, request: GenerateRequest, accepted: Accepted) -> None:
        self._id, self._request = request_id, request
        self._so_far = [self._begun(index, spec.prompt) for index, spec in enumerate(accepted.specs)]
        """The last message of each choice, as far as it has come."""

    def _begun(self, index: int, prompt: bytes) -> Any:
        complete, start = _Complete(index=index, prompt_tokens=len(prompt) // ID_BYTES), self._request.logprob_start * ID_BYTES
        if self._request.logprobs is not None:
            complete.output_logprobs.SetInParent()
        if self._request.prompt_logprobs is not None and start < len(prompt):
            first = int(unpack_ids(prompt[start : start + ID_BYTES])[0])  # it has no number, as at SGLang
            tops = min(1, self._request.prompt_logprobs) * [dict[str, Any]()]
            complete.input_logprobs.MergeFrom(_InputLogProbs(token_logprobs=[{}], token_ids=[first], top_logprobs=tops))
        return complete

    def of(self, delta: ChoiceDelta) -> list[bytes]:
        """What a client gets of this news: in a stream a chunk with what is new, and when a choice has ended all of it, but the
        log probabilities of the prompt only once."""
        request, complete = self._request, self._so_far[delta.index]
        new_ids, new = delta.token_ids, delta.logprobs
        complete.output_ids.extend(new_ids)
        complete.completion_tokens += len(new_ids)
        complete.cached_tokens += delta.cached_tokens
        if of_prompt := delta.prompt_logprobs[request.logprob_start :]:
            numbers = [{"value": finite(token.logprob)} for token in of_prompt]
            complete.input_logprobs.MergeFrom(_logprobs(_InputLogProbs, of_prompt, numbers))
        logprobs = _logprobs(_OutputLogProbs, new, [finite(token.logprob) for token in new]) if new else None
        if logprobs is not None:
            complete.output_logprobs.MergeFrom(logprobs)
        messages: list[bytes] = []
        if request.fields.stream and new_ids:
            counts = {name: getattr(complete, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "index")}
            chunk = _Chunk(token_ids=new_ids, output_logprobs=logprobs, **counts)
            if complete.HasField("input_logprobs"):
                chunk.input_logprobs.CopyFrom(complete.input_logprobs)
                complete.ClearField("input_logprobs")
            messages.append(_Response(request_id=self._id, chunk=chunk).SerializeToString())
        if isinstance(delta.ending, Finished):
            complete.finish_reason = finish_of(delta.ending)
            if delta.ending.matched is not None:
                setattr(complete, _MATCHED[type(delta.ending.matched)], delta.ending.matched)
            messages.append(_Response(request_id=self._id, complete=complete).SerializeToString())
        return messages


def _logprobs(kind: Any, tokens: Sequence[TokenLogprob], numbers: Sequence[object]) -> Any:
    """A message of this kind with the log probabilities of these tokens. numbers: their own, as it holds them."""
    tops = [{"token_ids": [id for id, _ in token.top], "values": [finite(one) for _, one in token.top]} for token in tokens]
    ids = [token.token_id for token in tokens]
    return kind(token_logprobs=numbers, token_ids=ids, top_logprobs=[top for top in tops if top["token_ids"]])


MOST_CONNECTIONS = 16_384
"""At once: an idle one holds some 17 KiB. At this bound grpcio refuses every new client and closes nobody's connection, so it is
far above what clients need."""
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
                places = self._api.admission.places
                places.take(visit.owner)
                context.add_done_callback(lambda _: places.leave(visit.owner))  # the client has read all
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


async def _no_response(message: object) -> None:
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
    """The bounds of grpcio. most: calls of a connection. most_bytes: of a message. is_shared: several routers have the
    port. Compressed messages are refused, because only their compressed length is bounded."""
    return [
        ("grpc.so_reuseport", int(is_shared)),
        ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
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
