"""The HTTP side: what each URL does, and how refusals look to OpenAI clients.

Owns the routes and the way of a request from its body to the response that sends its answer. Does not know how a request is
served, nor what it takes of the router: that is given back by `Visit`.
"""

import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.access import OPEN, Access
from common.addresses import LOOPBACK
from common.config import RouterConfig
from common.errors import TandemError
from common.ids import InstanceId
from common.messages.adapters import AdapterEntry
from common.options import parse_bytes
from common.text.embedding import EmbeddingMode
from router.adapters import FleetAdapters
from router.api import adapters, roles, scaling, server_info, vllm, weight_groups, weights
from router.api.admission import CLIENT_CLOSED, Admission, Doorkeeper, visit_of
from router.api.answers import Accepted, AnswerShape, OpenAIBody
from router.api.bodies import unless_left
from router.api.chat import ChatChoice, ChatFields, ChatShape, read_chat
from router.api.completions import CompletionFields, CompletionShape, TextChoice, read_completion
from router.api.description import COMPLETION_REFUSALS, Described, DescribedApp, call_route, check_route, completion_route
from router.api.embeddings import EmbeddingBody, EmbeddingFields, EmbeddingShape, read_embeddings
from router.api.errors import ErrorDetail, error_response, response_to
from router.api.fields import ReadRequest
from router.api.guard import HEADER, REQUESTS_PREFIX, Guard, id_in
from router.api.intake import Intake
from router.api.refused import refused_routes
from router.api.responses import ResponseBody, ResponseFields, ResponseShape, read_response
from router.api.routes import (
    Detokenized,
    DetokenizeFields,
    ModelCard,
    ModelList,
    StrictRoute,
    Tokenized,
    TokenizeFields,
    read_detokenize,
    read_tokenize,
)
from router.api.sending import EventStream, json_response, whole_answer
from router.api.sglang import (
    Aborted,
    AbortFields,
    Flushed,
    Generated,
    GenerateFields,
    GenerateShape,
    read_abort,
    read_generate,
)
from router.api.timelines import FORGET, LOAD, READ, READ_TIMELINE, START, TimelineApi, TraceApi
from router.cluster import SafeToDelete, cluster_page
from router.core import Gateway
from router.metrics import RouterCollector, RouterMetrics, member_metrics, role_metrics
from router.outbox import ClientRequest

R = TypeVar("R", bound=ReadRequest)


class Api:
    """The handlers. model: the name that clients use. embedding: how the model makes embeddings; None: it makes none."""

    def __init__(
        self,
        gateway: Gateway,
        intake: Intake,
        metrics: RouterMetrics,
        model: str,
        config: RouterConfig,
        embedding: EmbeddingMode | None = None,
    ) -> None:
        self.admission = Admission(gateway, intake, config.max_requests, parse_bytes(config.max_body))
        self.traces = TraceApi(gateway)
        self.weights = weights.WeightsApi(gateway)
        self.roles = roles.RolesApi(gateway)
        self.vllm = vllm.VllmApi(gateway)
        self.server_info = server_info.ServerInfoApi(gateway, model)
        self.groups = weight_groups.WeightGroupsApi(gateway)
        self.adapters = adapters.AdaptersApi(gateway, model)
        self.timelines = TimelineApi(gateway)
        self.scaling = scaling.ScalingApi(gateway)
        self._gateway = gateway
        self._intake = intake
        self._metrics = metrics
        self._model = model
        self._embedding = embedding
        self._session_header = config.sessions_by
        self._keep_alive_s = config.keep_alive_s
        self._started = int(time.time())
        metrics.registry.register(RouterCollector(gateway.core, gateway.mail))

    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat: each message has a role and a text."""
        return await self._answer(request, read_chat, "chatcmpl-", self._intake.accept_chat, ChatShape)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation of items: messages, thoughts, calls and their results. Nothing is stored, so a request brings its
        whole conversation."""
        return await self._answer(request, read_response, "resp_", self._intake.accept_chat, ResponseShape)

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts, given as texts or token ids."""
        return await self._answer(request, read_completion, "cmpl-", self._intake.accept_completion, CompletionShape)

    async def embeddings(self, request: Request) -> Response:
        """The embedding of each of one or more prompts, given as texts or token ids."""
        reader = partial(read_embeddings, self._model, self._embedding)
        return await self._answer(request, reader, "embd-", self._intake.accept_completion, EmbeddingShape)

    async def generate(self, request: Request) -> Response:
        """SGLang's own endpoint: continue one prompt or a batch of prompts. Each event of a stream repeats the answer so far."""
        reader = partial(read_generate, self._model)
        return await self._answer(request, reader, "", self._intake.accept_completion, GenerateShape)

    async def _answer(
        self,
        request: Request,
        reader: Callable[[bytes, int], R],
        prefix: str,
        accept: Callable[[R, ClientRequest], Coroutine[Any, Any, Accepted]],
        shape_of: type[AnswerShape[R]],
    ) -> Response:
        """The way of a request through the router. prefix: of its answer's id. Returns the response that sends the answer."""
        visit = visit_of(request)
        client = visit.enter(prefix, id_in(request.scope, self._session_header) if self._session_header else "")
        asked = await visit.read(request, reader)
        if asked.own_id:
            visit.id = client.id = asked.own_id
        choices = range(asked.choices)
        client.expect(len(choices), {**asked.named(client.id), visit.id: choices, client.id: choices})
        accepted = await visit.work(request, self._accept(asked, client, accept))
        self._gateway.deliver(self._gateway.core.requests.submit(client, accepted.specs, self._gateway.clock()))
        shape = shape_of(
            id=client.id,
            created=int(time.time()),
            model=accepted.specs[0].adapter or self._model,
            request=asked,
            accepted=accepted,
            token_texts=self._intake.token_text,
        )
        if asked.fields.stream:
            return EventStream(self._gateway, client, shape, visit.send, self._keep_alive_s)
        return await unless_left(request, whole_answer(client, shape, self._intake.writers))

    async def _accept(
        self, asked: R, client: ClientRequest, accept: Callable[[R, ClientRequest], Coroutine[Any, Any, Accepted]]
    ) -> Accepted:
        """Adapters that were evicted are loaded again first, also those that had to go again meanwhile."""
        for _ in range(MOST_RELOADS):
            evicted = self._intake.evicted_adapters(asked)
            if not evicted:
                break
            for name in evicted:
                await self._gateway.adapt(partial(_require, name))
        return await accept(asked, client)

    async def abort_request(self, request: Request) -> Response:
        """End requests of this router, as SGLang does. What their clients have got so far is their answer, with the finish reason
        `abort`. Requests of other API keys are not found."""
        visit = visit_of(request)
        asked = await visit.read(request, read_abort)
        return json_response(Aborted(self._gateway.abort(visit.owner, None if asked.abort_all else asked.rid)))

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text."""
        visit = visit_of(request)
        visit.enter()
        asked = await visit.read(request, read_tokenize)
        return json_response(await visit.work(request, self._intake.tokenize(asked, visit.owner)))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        visit = visit_of(request)
        visit.enter()
        asked = await visit.read(request, read_detokenize)
        return json_response(await visit.work(request, self._intake.detokenize(asked, visit.owner)))

    async def models(self) -> Response:
        """List the model that is served, and the LoRA adapters that requests can have with it."""
        cards = [self._adapter_card(entry) for entry in self._gateway.core.fleet.adapters.entries()]
        return json_response(ModelList(data=[self._model_card(), *cards]))

    async def model(self, name: str) -> Response:
        """Describe the model or the adapter of this name, if it is served."""
        adapter = self._intake.adapter_in(name)
        entry = self._gateway.core.fleet.adapters.entry(adapter)
        return json_response(self._model_card() if entry is None else self._adapter_card(entry))

    async def health(self) -> Response:
        """200 while the router and its detokenizer are alive, otherwise 503 and why."""
        reasons = self._gateway.core.unhealthy()
        return json_response({"status": "unhealthy" if reasons else "ok", "reasons": reasons}, 503 if reasons else 200)

    async def ready(self) -> Response:
        """200 when a request could be served now, otherwise 503 and why not."""
        reasons = self._gateway.core.unready()
        return json_response({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    async def metrics(self) -> Response:
        """Metrics of the router and of every instance, in Prometheus' text format."""
        fleet = self._gateway.core.fleet
        text = self._metrics.text() + role_metrics(fleet) + await member_metrics(fleet.members())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def cluster(self, links: str | None = None) -> Response:
        """What every instance last reported, which instances left or were refused, and the router's open requests. links: only
        the links of this prefill instance, with their traffic, as it tells them now."""
        if links is not None:
            return json_response(await self._gateway.links_of(InstanceId(links)))
        return json_response(await cluster_page(self._gateway.core))

    async def drain(self, instance: str) -> Response:
        """Give the instance no more requests. It serves what it has, and leaves."""
        self._gateway.drain_instance(InstanceId(instance))
        return json_response({"id": instance, "state": "draining"}, 202)

    async def safe_to_delete(self, instance: str) -> Response:
        """Whether every push from or to the instance is proven to have ended, and no request of any router needs it. What is not
        known, as of an instance that died, is no."""
        reasons = self._gateway.core.fleet.why_keep(InstanceId(instance))
        return json_response(SafeToDelete(instance, not reasons, reasons))

    async def flush_cache(self) -> Response:
        """Have every instance forget its prefix cache: what requests shared so far is computed again. Running requests go on."""
        return json_response(Flushed(self._gateway.flush_caches()))

    def _model_card(self) -> ModelCard:
        return ModelCard(id=self._model, created=self._started, max_model_len=self._intake.context_tokens)

    def _adapter_card(self, entry: AdapterEntry) -> ModelCard:
        return ModelCard(
            id=entry.name,
            created=self._started,
            max_model_len=self._intake.context_tokens,
            root=entry.folder,
            parent=self._model,
            digest=entry.digest,
        )


def _require(name: str, adapters: FleetAdapters, answer: Callable[[AdapterEntry | TandemError], object], now: float) -> None:
    adapters.require(name, answer, now)


MOST_RELOADS = 4
"""So often the adapters of a request are loaded again, if others need their places before it begins."""
_Route: TypeAlias = tuple[str, str, Callable[..., Awaitable[Response]], Described]


COMPLETIONS = completion_route("Text completion", CompletionFields, OpenAIBody[TextChoice])
EMBEDDINGS = call_route("OpenAI", "Embeddings", EmbeddingFields, EmbeddingBody, COMPLETION_REFUSALS)
METRICS = Described("Operations", "Metrics", "Prometheus' text format.", media_types=("text/plain",))
READY = check_route("Readiness", "A request could be served now.")
FLUSH = Described("SGLang", "Flush the prefix caches", "Who was told.", Flushed)
DRAIN = Described("Operations", "Drain an instance", "It drains.", status=202, refusals=(404,))
SAFE = Described("Operations", "Whether to delete an instance", "What is known.", SafeToDelete, refusals=(404,))


def _fleet_routes(api: Api) -> tuple[_Route, ...]:
    return (
        ("GET", "/cluster", api.cluster, Described("Operations", "The fleet", "The fleet as it is now.")),
        ("POST", "/cluster/{instance}/drain", api.drain, DRAIN),
        ("POST", "/cluster/instances", api.scaling.start, scaling.START_ONE),
        ("POST", "/cluster/decisions", api.scaling.decided, scaling.DECIDED),
        ("GET", "/cluster/decisions", api.scaling.decisions, scaling.DECISIONS),
        ("GET", "/cluster/{instance}/safe_to_delete", api.safe_to_delete, SAFE),
        ("POST", "/cluster/{instance}/role", api.roles.change, roles.CHANGE),
        ("POST", "/pd_role_switch", api.roles.switch, roles.SWITCH),
        ("POST", "/cluster/trace", api.traces.start, START),
        ("GET", "/cluster/trace", api.traces.read, READ),
        ("DELETE", "/cluster/trace", api.traces.forget, FORGET),
        ("GET", "/cluster/load", api.traces.load, LOAD),
    )


def _routes(api: Api) -> tuple[_Route, ...]:
    """Method, path, handler, and what the description says about it."""
    return (
        ("POST", "/v1/chat/completions", api.chat_completions, completion_route("Chat", ChatFields, OpenAIBody[ChatChoice])),
        ("POST", "/v1/completions", api.completions, COMPLETIONS),
        ("POST", "/v1/responses", api.responses, completion_route("Response", ResponseFields, ResponseBody)),
        ("POST", "/v1/embeddings", api.embeddings, EMBEDDINGS),
        ("POST", "/generate", api.generate, completion_route("Generate", GenerateFields, Generated | list[Generated], "SGLang")),
        ("POST", "/abort_request", api.abort_request, call_route("SGLang", "Abort", AbortFields, Aborted)),
        ("POST", "/tokenize", api.tokenize, call_route("vLLM", "Tokenize", TokenizeFields, Tokenized)),
        ("POST", "/detokenize", api.detokenize, call_route("vLLM", "Detokenize", DetokenizeFields, Detokenized)),
        ("GET", "/v1/models", api.models, Described("OpenAI", "Models", "The list.", ModelList)),
        ("GET", "/v1/models/{name:path}", api.model, Described("OpenAI", "One model", "The model.", ModelCard, refusals=(404,))),
        ("GET", "/health", api.health, check_route("Health", "The router and its detokenizer are alive.")),
        ("GET", "/ready", api.ready, READY),
        ("GET", "/health_generate", api.ready, READY),
        ("GET", "/metrics", api.metrics, METRICS),
        ("GET", f"{REQUESTS_PREFIX}/{{name:path}}", api.timelines.read, READ_TIMELINE),
        ("POST", "/flush_cache", api.flush_cache, FLUSH),
        ("GET", "/flush_cache", api.flush_cache, FLUSH),
        ("POST", "/update_weights_from_disk", api.weights.from_disk, weights.FROM_DISK),
        ("POST", "/update_weights_from_tensor", api.weights.from_tensor, weights.FROM_TENSOR),
        ("POST", "/init_weights_update_group", api.groups.join, weight_groups.JOIN),
        ("POST", "/update_weights_from_distributed", api.groups.update, weight_groups.UPDATE),
        ("POST", "/destroy_weights_update_group", api.groups.leave, weight_groups.LEAVE),
        ("POST", "/get_weights_by_name", api.groups.read, weight_groups.READ),
        ("GET", "/get_weights_by_name", api.groups.read, weight_groups.READ),
        ("POST", "/update_weight_version", api.weights.rename, weights.RENAME),
        ("POST", "/pause_generation", api.weights.pause, weights.PAUSE),
        ("POST", "/continue_generation", api.weights.go_on, weights.CONTINUE),
        ("GET", "/weight_info", api.weights.info, weights.INFO),
        ("GET", "/get_weight_version", api.weights.info, weights.INFO_SGLANG),
        ("GET", "/weight_version", api.weights.info, weights.INFO_SGLANG),
        ("POST", "/pause", api.vllm.pause, vllm.PAUSE_STATUS),
        ("POST", "/resume", api.vllm.resume, vllm.RESUME_STATUS),
        ("GET", "/is_paused", api.vllm.is_paused, vllm.IS_PAUSED),
        ("POST", "/sleep", api.vllm.sleep, vllm.SLEEP),
        ("POST", "/wake_up", api.vllm.wake_up, vllm.WAKE_UP),
        ("GET", "/is_sleeping", api.vllm.is_sleeping, vllm.IS_SLEEPING),
        ("POST", "/abort_requests", api.vllm.abort_requests, vllm.ABORT_MANY),
        ("POST", "/reset_prefix_cache", api.vllm.reset_prefix_cache, vllm.RESET),
        ("GET", "/server_info", api.server_info.server, server_info.SERVER_INFO),
        ("GET", "/get_server_info", api.server_info.server, server_info.SERVER_INFO),
        ("GET", "/model_info", api.server_info.model, server_info.MODEL_INFO),
        ("GET", "/get_model_info", api.server_info.model, server_info.MODEL_INFO),
        ("GET", "/v1/loads", api.server_info.loads, server_info.LOADS),
        ("POST", "/load_lora_adapter", api.adapters.load, adapters.LOAD),
        ("POST", "/unload_lora_adapter", api.adapters.unload, adapters.UNLOAD),
        ("POST", "/v1/load_lora_adapter", api.adapters.load_v1, adapters.LOAD_V1),
        ("POST", "/v1/unload_lora_adapter", api.adapters.unload_v1, adapters.UNLOAD_V1),
        *_fleet_routes(api),
    )


def build_app(api: Api, metrics: RouterMetrics, access: Access = OPEN, hosts: Collection[str] = (LOOPBACK,)) -> FastAPI:
    """The ASGI application. hosts: what the router was told to listen on."""
    routes = _routes(api)
    app = DescribedApp(described for _, _, _, described in routes)
    app.router.route_class = StrictRoute
    for method, path, endpoint, described in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None, **described.route_arguments())
    app.router.routes += refused_routes()
    app.add_exception_handler(TandemError, _on_tandem_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(Doorkeeper, admission=api.admission, metrics=metrics, guard=Guard(access, hosts))
    if access.origins:  # outside of the doorkeeper: what a browser asks beforehand carries no key, and refusals are for pages too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(HEADER.decode(), "retry-after"),
        )
    return app


async def _on_tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return response_to(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The framework refuses unknown URLs and methods."""
    assert isinstance(error, HTTPException)
    hint = ": /docs lists what there is" if error.status_code == HTTPStatus.NOT_FOUND else ""
    message = f"{request.method} {request.url.path}: {error.detail}{hint}"
    response = error_response(error.status_code, ErrorDetail(message, "invalid_request_error"))
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while its body was read, so nobody gets the response."""
    return Response(status_code=CLIENT_CLOSED)


async def _on_bug(request: Request, error: Exception) -> Response:
    """An unexpected error. The framework logs it."""
    response = error_response(500, ErrorDetail("internal error: see the router's log", "internal_error"))
    response.headers["x-request-id"] = visit_of(request).id
    return response
