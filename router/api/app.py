"""The HTTP side: what each URL does, and how refusals look to OpenAI clients.

Owns the routes, the limits of a body, and the guarantee that what a handler opened is closed when its HTTP request is over.
Does not know how a request is served.
"""

import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.access import OPEN, Access
from common.addresses import LOOPBACK
from common.errors import TandemError
from common.ids import InstanceId, RequestId
from common.text.embedding import EmbeddingMode
from router.api.admission import AT_END, CLIENT_CLOSED, Door, Doorkeeper, OpenAnswers
from router.api.answers import Accepted, AnswerShape, OpenAIBody
from router.api.bodies import IS_LARGE, LARGE_BODY_BYTES, body_of, unless_left
from router.api.chat import ChatChoice, ChatFields, ChatShape, read_chat
from router.api.completions import CompletionFields, CompletionShape, TextChoice, read_completion
from router.api.description import COMPLETION_REFUSALS, Described, DescribedApp, call_route, check_route, completion_route
from router.api.embeddings import EmbeddingBody, EmbeddingFields, EmbeddingShape, read_embeddings
from router.api.errors import ErrorDetail, error_response, response_to
from router.api.fields import ReadRequest
from router.api.guard import REQUESTS_PREFIX, Guard
from router.api.intake import Intake, unknown_model
from router.api.request_ids import HEADER, OWNER, REQUEST_ID, AnswerId, answer_id
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
from router.api.sending import Answer, StreamResponse, WholeResponse
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
from router.api.timelines import FORGET, READ, READ_TIMELINE, START, TimelineApi, TraceApi
from router.cluster import cluster_page
from router.core import Gateway
from router.metrics import DetokenizerCollector, FleetCollector, MailCollector, RouterMetrics, member_metrics
from router.requests import Places

SPARE_CONNECTIONS = 256
"""How many requests with a body may be open beyond --max-requests: answers that are still being sent, and calls to a tokenizer.
Pages such as /health have no limit: the server sees to it that none of them waits for its client."""
COMING = "tandem.coming"
"""Where a request's scope holds its `Coming`."""

R = TypeVar("R", bound=ReadRequest)
T = TypeVar("T")


class Api:
    """The handlers. model: the name that clients use. max_body_bytes: None for no limit. keep_alive_s: after so long a silence a
    stream gets a comment; 0: never. max_requests: SPARE_CONNECTIONS more may be open, counted from when their body is here.
    embedding: how the model makes embeddings; None: it makes none. session_header: see `answer_id`."""

    def __init__(
        self,
        gateway: Gateway,
        intake: Intake,
        metrics: RouterMetrics,
        model: str,
        max_body_bytes: int | None,
        keep_alive_s: float,
        max_requests: int,
        embedding: EmbeddingMode | None = None,
        session_header: str = "",
    ) -> None:
        self.door = Door(gateway.core)
        self.traces = TraceApi(gateway)
        self._gateway = gateway
        self._intake = intake
        self._metrics = metrics
        self._model = model
        self._embedding = embedding
        self._session_header = session_header
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s
        self._here = Places(max_requests + SPARE_CONNECTIONS, "HTTP requests")
        """Of open requests whose body is here."""
        self._started = int(time.time())
        self._open = OpenAnswers()
        self.timelines = TimelineApi(gateway)
        metrics.registry.register(FleetCollector(gateway.core))
        metrics.registry.register(DetokenizerCollector(gateway.core))
        metrics.registry.register(MailCollector(gateway.mail))

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
        received_s = self._enter(request)
        asked = await self._read(request, partial(read_generate, self._model))
        if len(asked.rids) == 1:
            request.scope[REQUEST_ID] = asked.rids[0]
        answer = answer_id(request.scope, session_header=self._session_header)
        named = asked.named(answer.shown, asked.choices)
        counts = {name: len(numbers) for name, numbers in named.items()}
        accepted = await self._accept(request, answer, self._intake.accept_completion(asked, answer), asked.choices, counts)
        requests = {name: [accepted.specs[number].request_id for number in numbers] for name, numbers in named.items()}
        return self._dispatch(request, GenerateShape, asked, accepted, received_s, requests if asked.is_batch else {})

    async def abort_request(self, request: Request) -> Response:
        """End requests of this router, as SGLang does. What their clients have got so far is their answer, with the finish reason
        `abort`. Requests of other API keys are not found."""
        asked = await self._read(request, read_abort)
        core, named, owner = self._gateway.core, self._open.find(asked.rid), request.scope[OWNER]
        own = [record.spec.request_id for record in core.requests.records() if record.spec.owner == owner]
        ids = own if asked.abort_all else [request_id for request_id in own if request_id in named]
        self._gateway.deliver(core.requests.cancel(ids, self._gateway.clock()))
        return _json(Aborted(len(ids) + self._open.abort_coming(owner, None if asked.abort_all else asked.rid)))

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text."""
        self._enter(request)
        asked = await self._read(request, read_tokenize)
        return _json(await unless_left(request, self._intake.tokenize(asked, request.scope[OWNER])))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        self._enter(request)
        asked = await self._read(request, read_detokenize)
        return _json(await unless_left(request, self._intake.detokenize(asked, request.scope[OWNER])))

    def _enter(self, request: Request) -> float:
        """Let the request in, until its response has ended. Returns the time. Raises Unavailable when the router drains."""
        self.door.enter()
        request.scope[AT_END].callback(self.door.leave)
        return self._gateway.clock()

    async def _answer(
        self,
        request: Request,
        reader: Callable[[bytes, int], R],
        prefix: str,
        accept: Callable[[R, AnswerId], Coroutine[Any, Any, Accepted]],
        shape_of: type[AnswerShape[R]],
    ) -> Response:
        """The way of a request through the router. prefix: of its answer's id."""
        received_s = self._enter(request)
        asked = await self._read(request, reader)
        answer = answer_id(request.scope, prefix, self._session_header)
        accepted = await self._accept(request, answer, accept(asked, answer), asked.choices)
        return self._dispatch(request, shape_of, asked, accepted, received_s)

    async def _accept(
        self,
        request: Request,
        answer: AnswerId,
        work: Coroutine[Any, Any, Accepted],
        choices: int,
        names: Mapping[str, int] | None = None,
    ) -> Accepted:
        """Do the intake's work, while the request can be aborted. names: further ones, each with how many choices it stands for.
        Raises what the work raises."""
        counts = dict(names or {}) | dict.fromkeys((request.scope[REQUEST_ID], answer.shown), choices)
        coming = request.scope[COMING] = self._open.expect(answer.owner, choices, counts)
        request.scope[AT_END].callback(self._open.arrived, coming)
        return await unless_left(request, work)

    def _dispatch(
        self,
        request: Request,
        shape_of: type[AnswerShape[R]],
        asked: R,
        accepted: Accepted,
        received_s: float,
        named: Mapping[str, list[RequestId]] | None = None,
    ) -> Response:
        """Submit every choice to the fleet. named: further ids by which the client knows some of them. Returns the response that
        sends the answer. Raises Overloaded, Unavailable, BadRequest."""
        requests = [spec.request_id for spec in accepted.specs]
        names = dict(named or {}) | dict.fromkeys((request.scope[REQUEST_ID], accepted.id), requests)
        request.scope[AT_END].callback(self._open.add(names))
        answer = Answer(self._gateway, accepted)
        request.scope[AT_END].callback(answer.close)
        answer.dispatch(received_s)
        self._gateway.core.requests.timelines.name(names)
        if aborted := self._open.aborted(request.scope[COMING], requests):
            self._gateway.deliver(self._gateway.core.requests.cancel(aborted, self._gateway.clock()))
        shape = shape_of(
            id=accepted.id,
            created=int(time.time()),
            model=self._model,
            asked=asked,
            accepted=accepted,
            token_texts=self._intake.token_text,
        )
        if asked.fields.stream:
            return StreamResponse(answer, shape, self._keep_alive_s)
        return WholeResponse(answer, shape, self._intake.writers)

    async def models(self) -> Response:
        """List the model that is served."""
        return _json(ModelList(data=[self._model_card()]))

    async def model(self, name: str) -> Response:
        """Describe the model of this name, if it is the one that is served."""
        if name != self._model:
            raise unknown_model(name, self._model)
        return _json(self._model_card())

    async def health(self) -> Response:
        """200 while the router and its detokenizer are alive, otherwise 503 and why."""
        reasons = self._gateway.core.unhealthy()
        return _json({"status": "unhealthy" if reasons else "ok", "reasons": reasons}, 503 if reasons else 200)

    async def ready(self) -> Response:
        """200 when a request could be served now, otherwise 503 and why not."""
        reasons = self._gateway.core.unready()
        return _json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    async def metrics(self) -> Response:
        """Metrics of the router and of every instance, in Prometheus' text format."""
        text = self._metrics.text() + await member_metrics(self._gateway.core.fleet.members())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def cluster(self, links: str | None = None) -> Response:
        """What every instance last reported, which instances left or were refused, and the router's open requests. links: only
        the links of this prefill instance, with their traffic, as it tells them now."""
        if links is not None:
            return _json(await self._gateway.links_of(InstanceId(links)))
        return _json(await cluster_page(self._gateway.core))

    async def drain(self, instance: str) -> Response:
        """Give the instance no more requests. It serves what it has, and leaves."""
        self._gateway.deliver(self._gateway.core.fleet.drain(InstanceId(instance)))
        return _json({"id": instance, "state": "draining"}, 202)

    async def flush_cache(self) -> Response:
        """Have every instance forget its prefix cache: what requests shared so far is computed again. Running requests go on."""
        sends = self._gateway.core.fleet.flush_caches()
        self._gateway.deliver(sends)
        return _json(Flushed(len(sends)))

    async def _read(self, request: Request, reader: Callable[[bytes, int], T]) -> T:
        """What the body asks for. Raises BadRequest, Overloaded."""
        owner: str = request.scope[OWNER]
        self._here.require(owner)
        body = await body_of(request, self._max_body_bytes)
        self._here.take(owner)
        request.scope[AT_END].callback(self._here.leave, owner)
        request.scope[IS_LARGE] = len(body) > LARGE_BODY_BYTES
        return await unless_left(request, self._intake.read(reader, body, owner))

    def _model_card(self) -> ModelCard:
        return ModelCard(id=self._model, created=self._started, max_model_len=self._intake.context_tokens)


_Route: TypeAlias = tuple[str, str, Callable[..., Awaitable[Response]], Described]


def _routes(api: Api) -> tuple[_Route, ...]:
    """Method, path, handler, and what the description says about it."""
    return (
        ("POST", "/v1/chat/completions", api.chat_completions, completion_route("Chat", ChatFields, OpenAIBody[ChatChoice])),
        (
            "POST",
            "/v1/completions",
            api.completions,
            completion_route("Text completion", CompletionFields, OpenAIBody[TextChoice]),
        ),
        ("POST", "/v1/responses", api.responses, completion_route("Response", ResponseFields, ResponseBody)),
        (
            "POST",
            "/v1/embeddings",
            api.embeddings,
            call_route("OpenAI", "Embeddings", EmbeddingFields, EmbeddingBody, COMPLETION_REFUSALS),
        ),
        ("POST", "/generate", api.generate, completion_route("Generate", GenerateFields, Generated | list[Generated], "SGLang")),
        ("POST", "/abort_request", api.abort_request, call_route("SGLang", "Abort", AbortFields, Aborted)),
        ("POST", "/tokenize", api.tokenize, call_route("vLLM", "Tokenize", TokenizeFields, Tokenized)),
        ("POST", "/detokenize", api.detokenize, call_route("vLLM", "Detokenize", DetokenizeFields, Detokenized)),
        (
            "GET",
            "/v1/models",
            api.models,
            Described(tag="OpenAI", summary="Models", answer="The list.", answer_type=ModelList),
        ),
        (
            "GET",
            "/v1/models/{name:path}",
            api.model,
            Described(tag="OpenAI", summary="One model", answer="The model.", answer_type=ModelCard, refusals=(404,)),
        ),
        ("GET", "/health", api.health, check_route("Health", "The router and its detokenizer are alive.")),
        ("GET", "/ready", api.ready, check_route("Readiness", "A request could be served now.")),
        (
            "GET",
            "/metrics",
            api.metrics,
            Described(tag="Operations", summary="Metrics", answer="Prometheus' text format.", media_types=("text/plain",)),
        ),
        ("GET", f"{REQUESTS_PREFIX}/{{name:path}}", api.timelines.read, READ_TIMELINE),
        ("GET", "/cluster", api.cluster, Described(tag="Operations", summary="The fleet", answer="The fleet as it is now.")),
        (
            "POST",
            "/cluster/{instance}/drain",
            api.drain,
            Described(tag="Operations", summary="Drain an instance", answer="It drains.", status=202, refusals=(404,)),
        ),
        (
            "POST",
            "/flush_cache",
            api.flush_cache,
            Described(tag="SGLang", summary="Flush the prefix caches", answer="Who was told.", answer_type=Flushed),
        ),
        ("POST", "/cluster/trace", api.traces.start, START),
        ("GET", "/cluster/trace", api.traces.read, READ),
        ("DELETE", "/cluster/trace", api.traces.forget, FORGET),
    )


def build_app(api: Api, metrics: RouterMetrics, access: Access = OPEN, hosts: Collection[str] = (LOOPBACK,)) -> FastAPI:
    """The ASGI application. hosts: what the router was told to listen on."""
    routes = _routes(api)
    app = DescribedApp(described for _, _, _, described in routes)
    app.router.route_class = StrictRoute
    for method, path, endpoint, described in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None, **described.route_arguments())
    app.add_exception_handler(TandemError, _on_tandem_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(Doorkeeper, door=api.door, metrics=metrics, guard=Guard(access, hosts))
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
    response.headers["x-request-id"] = request.scope[REQUEST_ID]
    return response


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
