"""The HTTP side: what each URL does, and how refusals look to OpenAI clients.

Owns the routes and the way of a request from its body to the response that sends its answer. Does not know how a request is
served, nor what it takes of the router: that is given back by `Visit`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Send

from common.access import OPEN, Access
from common.addresses import LOOPBACK
from common.config import RouterConfig
from common.errors import BadRequest, TandemError
from common.ids import InstanceId
from common.messages.variants import AdapterEntry
from common.options import parse_bytes
from common.text.embedding import EmbeddingMode
from router.api.admission import CLIENT_CLOSED, Admission, Doorkeeper, Visit, visit_of
from router.api.answers import Accepted, AnswerShape, OpenAIBody
from router.api.batches import BatchesApi
from router.api.bodies import names_in, unless_left
from router.api.chat import ChatChoice, ChatFields, ChatShape, read_chat
from router.api.completions import CompletionFields, CompletionShape, TextChoice, read_completion
from router.api.description import ANTHROPIC, ApiPart, Described, DescribedApp, completion, hint_at, numbers
from router.api.embeddings import (
    POOLING,
    EmbeddingBody,
    EmbeddingFields,
    EmbeddingShape,
    Encoded,
    EncodeFields,
    EncodeShape,
    PoolingShape,
    read_embeddings,
    read_encode,
)
from router.api.errors import ErrorDetail, error_response, response_to
from router.api.fields import ReadRequest
from router.api.files import FilesApi
from router.api.guard import HEADER, Guard
from router.api.instances import AdaptersApi, InstancesApi
from router.api.intake import Intake
from router.api.messages import CountFields, MessageBody, MessageFields, MessageShape, TokenCount, read_count, read_message
from router.api.responses import ResponseBody, ResponseFields, ResponseShape, read_response
from router.api.routes import (
    Detokenized,
    DetokenizeFields,
    InputTokens,
    ModelCard,
    ModelList,
    Tokenized,
    TokenizeFields,
    TokenizeRequest,
    read_detokenize,
    read_tokenize,
)
from router.api.scoring import RerankBody, RerankFields, ScoreFields, ScoresBody, ScoreShape, read_rerank, read_score
from router.api.sending import EventStream, json_response, whole_answer
from router.api.sglang import ABORT, Aborted, AbortFields, Generated, GenerateFields, GenerateShape, read_generate
from router.api.store import Store
from router.api.stored_responses import StoredResponses
from router.api.trainers import AbortedMany, AbortManyFields, ServerInfoApi, VllmApi
from router.api.views import LiveApi, TimelineApi, TraceApi, page_routes
from router.api.weights import WeightsApi
from router.core import Gateway
from router.live import SafeToDelete, cluster_page
from router.metrics import MetricAliases, RouterCollector, RouterMetrics, member_metrics, role_metrics
from router.requests import Asked, ClientRequest

R = TypeVar("R", bound=ReadRequest)
S = TypeVar("S", bound=AnswerShape[Any])
T = TypeVar("T")
PARTS = (TraceApi, InstancesApi, WeightsApi, VllmApi, ServerInfoApi, AdaptersApi)
BEAT_S = 1.0
"""How often the store is asked what there is to do."""
TELL_AGAIN_S = 60.0
"""How often the log says that the store is still in the same trouble."""
END_S = 5.0
"""How long responses in the background may take to be stored when the router ends, and then how
long the store may take to close."""
MOST_RELOADS = 4
"""So often the adapters of a request are loaded again, if others need their places before it begins."""
_log = logging.getLogger(__name__)
_NOT_SO = ((503, "Not so; `reasons` says why."),)


class InvocationFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /invocations: that of another endpoint, which a field of it tells."""

    messages: list[Any] | None = None
    """The body is that of POST /v1/chat/completions."""
    prompt: Any = None
    """It is that of POST /v1/completions."""
    input: Any = None
    """It is that of POST /v1/embeddings."""


class Api(ApiPart):
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
        super().__init__(gateway, model)
        self.model_name = model
        self.admission = Admission(gateway, intake, config)
        self.timelines = TimelineApi(gateway, model)
        self.live = LiveApi(gateway, model, metrics, config)
        self._store = (
            Store(config.store, parse_bytes(config.store_bytes) or 0, config.store_age_s, gateway.core.router)
            if config.store
            else None
        )
        self.stored_responses = StoredResponses(gateway, model, self._store, config.keep_alive_s)
        self.batches = BatchesApi(gateway, model, self._store, config.batch_requests)
        stored = (self.stored_responses, FilesApi(gateway, model, self._store), self.batches)
        self.parts = (self, *stored, self.timelines, self.live, *(part(gateway, model) for part in PARTS))
        """All, in the order of the description."""
        self._intake = intake
        self._metrics = metrics
        self.embedding = embedding
        self._judge = intake.judge(embedding)
        self._keep_alive_s = config.keep_alive_s
        self._started = int(time.time())
        metrics.registry.register(RouterCollector(gateway.core, gateway.mail, self._store_stalled_s))
        self._aliases = MetricAliases(config.metric_aliases, model, metrics.registry) if config.metric_aliases != "none" else None

    def _store_stalled_s(self) -> float:
        return 0.0 if self._store is None else self._store.stalled_s()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Meanwhile responses in the background and batches are worked on. At the end what has not ended is broken off."""
        if self._store is None:
            yield
            return
        beating = asyncio.create_task(self._beat(self._store))
        try:
            yield
        finally:
            beating.cancel()
            await self.stored_responses.close(END_S)
            await self.batches.close()
            await self._store.close(END_S)

    async def _beat(self, store: Store) -> None:
        told, told_s = "", 0.0
        while True:
            self.batches.news.clear()
            try:
                await self.stored_responses.beat()
                await self.batches.beat()
                await store.do(store.sweep)
                told = ""
            except (TandemError, OSError) as error:  # OSError: such as too many open files; the next beat may do better
                if str(error) != told or time.monotonic() - told_s >= TELL_AGAIN_S:
                    told, told_s = str(error), time.monotonic()
                    _log.error("%s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.batches.news.wait(), BEAT_S)

    @completion("POST /v1/chat/completions", "OpenAI", "Chat", ChatFields, OpenAIBody[ChatChoice])
    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat: each message has a role and a text."""
        return await self._answer(request, read_chat, "chatcmpl-", ChatShape)

    @completion("POST /v1/responses", "OpenAI", "Response", ResponseFields, ResponseBody)
    async def responses(self, request: Request) -> Response:
        """Answer a conversation of items: messages, thoughts, calls and their results. Where the router has `--store`, the answer
        is kept: a later request may go on from it, and it may be computed in the background."""
        stored = self.stored_responses
        return await self._answer(request, read_response, "resp_", ResponseShape, stored.continued, stored.answer)

    @Described("POST /v1/responses/input_tokens", "OpenAI", "Count the tokens of a response's input", body=ResponseFields)
    async def input_tokens(self, request: Request) -> InputTokens:
        """How many tokens the prompt of such a response has."""
        visit, asked = await self._read_to_tokenize(request, read_response)
        whole = await self.stored_responses.continued(asked, visit)
        counted = TokenizeRequest(fields=TokenizeFields(model=whole.fields.model), prompt=whole)
        return InputTokens((await visit.work(request, self._intake.tokenize(counted, visit.owner))).count)

    @completion("POST /v1/messages", ANTHROPIC, "Message", MessageFields, MessageBody)
    async def messages(self, request: Request, beta: str = "") -> Response:
        """Answer a conversation of blocks: texts, thoughts, calls of tools and their results. Nothing is stored, so a request
        brings its whole conversation. beta: changes nothing, because the fields say what is asked for."""
        return await self._answer(request, read_message, "msg_", MessageShape)

    @Described("POST /v1/messages/count_tokens", ANTHROPIC, "Count tokens", body=CountFields)
    async def count_tokens(self, request: Request, beta: str = "") -> TokenCount:
        """How many tokens the prompt of a message has. beta: changes nothing."""
        visit, asked = await self._read_to_tokenize(request, read_count)
        return TokenCount((await visit.work(request, self._intake.tokenize(asked, visit.owner))).count)

    @completion("POST /v1/completions", "OpenAI", "Text completion", CompletionFields, OpenAIBody[TextChoice])
    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts, given as texts or token ids."""
        return await self._answer(request, read_completion, "cmpl-", CompletionShape)

    @numbers("POST /v1/embeddings", "OpenAI", "Embeddings", EmbeddingFields, EmbeddingBody)
    async def embeddings(self, request: Request) -> Response:
        """The embedding of each of one or more prompts, given as texts or token ids."""
        reader = partial(read_embeddings, self._model, self.embedding)
        return await self._answer(request, reader, "embd-", EmbeddingShape)

    @numbers("POST /pooling", "vLLM", "Pooling", EmbeddingFields, EmbeddingBody)
    async def pooling(self, request: Request) -> Response:
        """As POST /v1/embeddings, with another name of what comes."""
        reader = partial(read_embeddings, self._model, self.embedding, unsupported=POOLING)
        return await self._answer(request, reader, "pool-", PoolingShape)

    @numbers("POST /encode", "SGLang", "Encode", EncodeFields, Encoded | list[Encoded])
    async def encode(self, request: Request) -> Response:
        """The embedding of one prompt or of each of a batch, as SGLang's own endpoint has it."""
        reader = partial(read_encode, self._model, self.embedding)
        return await self._answer(request, reader, "", EncodeShape)

    @numbers("POST /v1/rerank, POST /rerank, POST /v2/rerank", "vLLM", "Rerank", RerankFields, RerankBody)
    async def rerank(self, request: Request) -> Response:
        """Order documents by how well they fit a query, as Jina's and Cohere's API do: by the cosine of embeddings, or with the
        chat template of a reranker by how likely the model says yes."""
        return await self._answer(request, partial(read_rerank, self._judge), "rerank-", ScoreShape)

    @numbers("POST /v1/score, POST /score", "vLLM", "Score", ScoreFields, ScoresBody)
    async def score(self, request: Request) -> Response:
        """How well two texts fit each other, judged as for POST /v1/rerank. Or, with `query`, `items` and `label_token_ids`: how
        likely each of these tokens follows the query with each item, by any model."""
        return await self._answer(request, partial(read_score, self._judge), "score-", ScoreShape)

    @completion("POST /invocations", "OpenAI", "Invocation", InvocationFields, None)
    async def invocations(self, request: Request) -> Response:
        """What Amazon SageMaker calls every endpoint: a chat, a text completion or embeddings, by what the body holds."""
        names = names_in(await visit_of(request).peek(request))
        ways = {"messages": Api.chat_completions, "prompt": Api.completions, "input": Api.embeddings}
        found = [way for name, way in ways.items() if name in names]
        if len(found) != 1:
            raise BadRequest("send messages for a chat, prompt for a text completion or input for embeddings", field="messages")
        answer: Response = await found[0].handler(self, request)
        return answer

    @completion("POST /generate", "SGLang", "Generate", GenerateFields, Generated | list[Generated])
    async def generate(self, request: Request) -> Response:
        """SGLang's own endpoint: continue one prompt or a batch of prompts. Each event of a stream repeats the answer so far."""
        reader = partial(read_generate, self._model)
        return await self._answer(request, reader, "", GenerateShape)

    async def _answer(
        self,
        request: Request,
        reader: Callable[[bytes, int], R],
        prefix: str,
        shape_of: Callable[..., S],
        complete: Callable[[R, Visit], Coroutine[Any, Any, R]] | None = None,
        send: Callable[[Visit, S, Callable[[Send], Coroutine[Any, Any, Response]]], Coroutine[Any, Any, Response]] | None = None,
    ) -> Response:
        """The way of a request through the router. prefix: of its answer's id. complete: adds what is stored to what is asked.
        send: in place of the usual ways to send an answer. Returns the response that sends it."""
        visit = visit_of(request)
        client = visit.enter(prefix, request.scope)
        asked = await visit.read(request, reader)
        if complete is not None:
            asked = await complete(asked, visit)
        accepted = await self.dispatch(visit, client, asked, request)
        shape = shape_of(
            id=client.id,
            created=int(time.time()),
            model=accepted.specs[0].adapter or self._model,
            request=asked,
            accepted=accepted,
            token_texts=self._intake.token_text,
        )

        async def usual(write: Send) -> Response:
            if asked.fields.stream:
                return EventStream(self._gateway, client, shape, write, self._keep_alive_s)
            return await unless_left(request, whole_answer(client, shape, self._intake.writers))

        return await (usual(visit.send) if send is None else send(visit, shape, usual))

    async def dispatch(self, visit: Visit, client: ClientRequest, asked: ReadRequest, request: Request | None = None) -> Accepted:
        """Send a request that was read to the fleet. request: see `Visit.work`."""
        if asked.own_id:
            visit.id = client.id = asked.own_id
        choices, client.hides_answer = range(asked.choices), asked.hides_answer
        client.expect(len(choices), {**asked.named(client.id), visit.id: choices, client.id: choices})
        accepted = await visit.work(request, self._accept(asked, client))
        client.asked = _asked(asked, accepted, self._model)
        self._gateway.deliver(self._gateway.core.requests.submit(client, accepted.specs, self._gateway.clock()))
        return accepted

    async def _accept(self, asked: ReadRequest, client: ClientRequest) -> Accepted:
        """Adapters that were evicted are loaded again first, also those that had to go again meanwhile."""
        for _ in range(MOST_RELOADS):
            evicted = self._intake.evicted_adapters(asked)
            if not evicted:
                break
            for name in evicted:
                await self._gateway.adapt(self._gateway.core.fleet.adapters.reload(name))
        return await self._intake.accept(asked, client)

    @Described("POST /abort_request", "SGLang", "Abort", unsupported=ABORT)
    async def abort_request(self, request: Request, asked: AbortFields) -> Aborted:
        """End requests of this router, as SGLang does. What their clients have got so far is their answer, with the finish reason
        `abort`. Requests of other API keys are not found."""
        return Aborted(self._gateway.abort(visit_of(request).owner, None if asked.abort_all else asked.rid))

    @Described("POST /abort_requests", "vLLM", "Abort several")
    async def abort_requests(self, request: Request, asked: AbortManyFields) -> AbortedMany:
        """End requests of this router, as POST /abort_request does."""
        owner = visit_of(request).owner
        return AbortedMany(sum(self._gateway.abort(owner, name) for name in asked.request_ids or (None,)))

    @Described("POST /tokenize, POST /v1/tokenize", "vLLM", "Tokenize", body=TokenizeFields)
    async def tokenize(self, request: Request) -> Tokenized:
        """The token ids of a text."""
        visit, asked = await self._read_to_tokenize(request, read_tokenize)
        return await visit.work(request, self._intake.tokenize(asked, visit.owner))

    @Described("POST /detokenize, POST /v1/detokenize", "vLLM", "Detokenize", body=DetokenizeFields)
    async def detokenize(self, request: Request) -> Detokenized:
        """The text of token ids."""
        visit, asked = await self._read_to_tokenize(request, read_detokenize)
        return await visit.work(request, self._intake.detokenize(asked, visit.owner))

    async def _read_to_tokenize(self, request: Request, reader: Callable[[bytes, int], T]) -> tuple[Visit, T]:
        """What a request asks of the tokenizer."""
        visit = visit_of(request)
        visit.enter()
        return visit, await visit.read(request, reader)

    @Described("GET /tokenizer_info", "vLLM", "The tokenizer")
    async def tokenizer_info(self) -> dict[str, Any]:
        """Its special tokens and the chat template, with the names of a tokenizer_config.json, for clients such as lm-eval."""
        return self._intake.tokenizer_info()

    @Described("GET /v1/models", "OpenAI", "Models", "The list.")
    async def models(self) -> ModelList:
        """List the model that is served, and the LoRA adapters that requests can have with it."""
        return ModelList(data=[self._card(None), *map(self._card, self._gateway.core.fleet.adapters.entries())])

    @Described("GET /v1/models/{name:path}", "OpenAI", "One model", "The model.", refusals=(404,))
    async def model(self, name: str) -> ModelCard:
        """Describe the model or the adapter of this name, if it is served."""
        return self._card(self._gateway.core.fleet.adapters.entry(self._intake.adapter_in(name)))

    @Described(
        "GET /health, GET /ping, POST /ping",
        "Operations",
        "Health",
        "The router, its detokenizer and its store are alive.",
        troubles=_NOT_SO,
    )
    async def health(self) -> Response:
        """200 while the router, its detokenizer and its store are alive, otherwise 503 and why."""
        trouble = None if self._store is None else self._store.trouble()
        reasons = self._gateway.core.unhealthy() + ([] if trouble is None else [trouble])
        return json_response({"status": "unhealthy" if reasons else "ok", "reasons": reasons}, 503 if reasons else 200)

    @Described("GET /ready, GET /health_generate", "Operations", "Readiness", "A request could be served now.", troubles=_NOT_SO)
    async def ready(self) -> Response:
        """200 when a request that comes now is served, or waits while the fleet's weights change; otherwise 503 and why not.
        `degraded` says what is wrong with a fleet that serves all the same."""
        core = self._gateway.core
        reasons = core.unready()
        answer = {"ready": not reasons, "reasons": reasons, "degraded": core.degraded()}
        return json_response(answer, 503 if reasons else 200)

    @Described("GET /metrics", "Operations", "Metrics", "Prometheus' text format.", media_types=("text/plain",))
    async def metrics(self) -> Response:
        """Metrics of the router and of every instance, in Prometheus' text format."""
        fleet = self._gateway.core.fleet
        text = self._metrics.text() + role_metrics(fleet) + await member_metrics(fleet.members())
        if self._aliases is not None:
            text += await self._aliases.text(fleet.members())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @Described("GET /cluster", "Operations", "The fleet", "The fleet as it is now.")
    async def cluster(self, links: str | None = None) -> Response:
        """What every instance last reported, which instances left or were refused, and the router's open requests. links: only
        the links of this prefill instance, with their traffic, as it tells them now."""
        if links is not None:
            return json_response(await self._gateway.links_of(InstanceId(links)))
        return json_response(await cluster_page(self._gateway.core))

    @Described("POST /cluster/{instance}/drain", "Operations", "Drain an instance", "It drains.", status=202, refusals=(404,))
    async def drain(self, instance: str) -> Response:
        """Give the instance no more requests. It serves what it has, and leaves. `warning`: no decode instance is left."""
        warning = self._gateway.drain_instance(InstanceId(instance))
        answer = {"id": instance, "state": "draining"}
        return json_response(answer | {"warning": warning} if warning else answer, 202)

    @Described(
        "GET /cluster/{instance}/safe_to_delete", "Operations", "Whether to delete an instance", "What is known.", refusals=(404,)
    )
    async def safe_to_delete(self, instance: str) -> SafeToDelete:
        """Whether every push from or to the instance is proven to have ended, and no request of any router needs it. What is not
        known, as of an instance that died, is no."""
        reasons = self._gateway.core.fleet.why_keep(InstanceId(instance))
        return SafeToDelete(instance, not reasons, reasons)

    def _card(self, adapter: AdapterEntry | None) -> ModelCard:
        """None: of the model."""
        card = ModelCard(id=self._model, created=self._started, max_model_len=self._intake.context_tokens)
        if adapter is None:
            return card
        return replace(card, id=adapter.name, root=adapter.folder, parent=self._model, digest=adapter.digest)


def _asked(request: ReadRequest, accepted: Accepted, model: str) -> Asked:
    """model: the name of what is served."""
    sampling, is_chat = accepted.specs[0].sampling, request.prompt_field in ("messages", "input")
    operation = "embeddings" if sampling.pooling is not None else "chat" if is_chat else "text_completion"
    parameters = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
    named, fields = accepted.specs[0].adapter or model, request.fields
    return Asked(operation, named, accepted.prompt_tokens, fields.n, fields.stream, parameters)


def build_app(api: Api, metrics: RouterMetrics, access: Access = OPEN, hosts: Collection[str] = (LOOPBACK,)) -> DescribedApp:
    """The ASGI application. hosts: what the router was told to listen on."""
    app = DescribedApp(api.parts)
    app.router.routes += page_routes()
    api.batches.app = app
    app.add_exception_handler(TandemError, _on_tandem_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(Doorkeeper, admission=api.admission, metrics=metrics, guard=Guard(access, hosts, app.control_paths))
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
    hint = f": {hint_at(request.url.path)}" if error.status_code == HTTPStatus.NOT_FOUND else ""
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
