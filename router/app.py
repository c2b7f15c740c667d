"""The HTTP side: which URL does what, and that every refusal looks as OpenAI clients expect.

Owns the routes and the limits of a body. Does not know how a request is served.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import Overloaded, TandemError
from common.ids import InstanceId
from router.answer import Answer
from router.cluster import cluster_page
from router.gateway import Gateway
from router.intake import Accepted, Intake, unknown_model
from router.metrics import DetokenizerCollector, FleetCollector, MailCollector, RouterMetrics
from router.openai_answers import AnswerShape, ChatShape, CompletionShape
from router.openai_api import SamplingFields, read_chat, read_completion
from router.openai_errors import BodyTooLarge, BodyTooSlow, ErrorDetail, error_response, response_to
from router.responses import Asked, StreamResponse, WholeResponse

BODY_TIMEOUT_S = 60.0
SPARE_CONNECTIONS = 256
"""HTTP requests at once beyond --max-requests: bodies that are being read, and pages such as /health."""
CLIENT_CLOSED = 499
"""The status, known from nginx, that is counted when nobody is left to send one to."""


class Api:
    """The handlers. model: the name that clients use. max_body_bytes: None for no limit."""

    def __init__(
        self,
        gateway: Gateway,
        intake: Intake,
        metrics: RouterMetrics,
        model: str,
        max_body_bytes: int | None,
    ) -> None:
        self._gateway = gateway
        self._intake = intake
        self._metrics = metrics
        self._model = model
        self._max_body_bytes = max_body_bytes
        self._started = int(time.time())
        metrics.registry.register(FleetCollector(gateway.core))
        metrics.registry.register(DetokenizerCollector(gateway.core))
        metrics.registry.register(MailCollector(gateway.mail))

    async def chat_completions(self, request: Request) -> Response:
        received_at = self._gateway.clock()
        asked = read_chat(await self._body(request))
        accepted = await self._intake.chat(asked)
        shape = ChatShape(accepted.id, int(time.time()), self._model, asked.sampling.include_usage)
        return self._respond(accepted, asked.sampling, shape, received_at)

    async def completions(self, request: Request) -> Response:
        received_at = self._gateway.clock()
        asked = read_completion(await self._body(request))
        accepted = await self._intake.completion(asked)
        shape = CompletionShape(accepted.id, int(time.time()), self._model, asked.sampling.include_usage)
        return self._respond(accepted, asked.sampling, shape, received_at)

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        if name != self._model:
            raise unknown_model(name, self._model)
        return _json(self._model_card())

    async def health(self) -> Response:
        """The router lives, and so does the detokenizer, through which every token passes."""
        reasons = self._gateway.core.unhealthy()
        return _json({"status": "unhealthy" if reasons else "ok", "reasons": reasons}, 503 if reasons else 200)

    async def ready(self) -> Response:
        """A request could be served now, by instances that are whole."""
        reasons = self._gateway.core.unready()
        return _json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def cluster(self) -> Response:
        return _json(cluster_page(self._gateway.core))

    async def drain(self, instance: str) -> Response:
        """The instance gets no more requests, serves what it has, and leaves."""
        self._gateway.drain(InstanceId(instance))
        return _json({"id": instance, "state": "draining"}, 202)

    def _respond(self, accepted: Accepted, sampling: SamplingFields, shape: AnswerShape, received_at: float) -> Response:
        asked = Asked(shape, len(accepted.specs), accepted.prompt_tokens, sampling.include_usage, sampling.return_token_ids)
        kind = StreamResponse if sampling.stream else WholeResponse
        return kind(asked, lambda receive: Answer(self._gateway, accepted, received_at, receive))

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "tandem",
            "max_model_len": self._intake.context_tokens,
        }

    async def _body(self, request: Request) -> bytes:
        """Raises BodyTooLarge, BodyTooSlow."""
        limit = self._max_body_bytes
        too_large = BodyTooLarge(f"the body is longer than {limit} bytes: send less, or raise --max-body")
        length = request.headers.get("content-length", "")
        if limit is not None and length.isdecimal() and int(length) > limit:
            raise too_large
        parts: list[bytes] = []
        received = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.stream():
                    parts.append(part)
                    received += len(part)
                    if limit is not None and received > limit:
                        raise too_large
        except TimeoutError as error:
            raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
        return b"".join(parts)


class CountedResponses:
    """ASGI middleware: counts responses by route and status, and refuses what is too much at once."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, limit: int) -> None:
        self._app = app
        self._metrics = metrics
        self._limit = limit
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app: ASGIApp = self._app
        if self._open >= self._limit:
            app = response_to(Overloaded(f"the router has {self._limit} HTTP requests open: try again shortly"))
        self._open += 1
        try:
            await app(scope, receive, watched_send)
        except Exception:
            status = 500  # a bug: whoever called us answers for it
            raise
        finally:
            self._open -= 1
            route = scope.get("route")
            self._metrics.responded("other" if route is None else route.path, status)


def build_app(api: Api, metrics: RouterMetrics, max_requests: int) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="Tandem", openapi_url=None)
    routes: tuple[tuple[str, str, Callable[..., Awaitable[Response]]], ...] = (
        ("POST", "/v1/chat/completions", api.chat_completions),
        ("POST", "/v1/completions", api.completions),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{name:path}", api.model),
        ("GET", "/health", api.health),
        ("GET", "/ready", api.ready),
        ("GET", "/metrics", api.metrics),
        ("GET", "/cluster", api.cluster),
        ("POST", "/cluster/{instance}/drain", api.drain),
    )
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    app.add_exception_handler(TandemError, _on_tandem_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(CountedResponses, metrics=metrics, limit=max_requests + SPARE_CONNECTIONS)
    return app


async def _on_tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return response_to(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown URLs and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = error_response(error.status_code, ErrorDetail(message, "invalid_request_error"))
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while its body was read; the response reaches nobody."""
    return Response(status_code=CLIENT_CLOSED)


async def _on_bug(request: Request, error: Exception) -> Response:
    """An error that nobody foresaw; the framework logs it."""
    return error_response(500, ErrorDetail("internal error: see the router's log", "internal_error"))


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
