"""Admission: what an HTTP request takes of the router, from its arrival to the end of its response, and what is told of it then.

Owns the middleware around every request: it lets requests in by their keys, gives each an id, counts the responses, and gives
back what a request has taken, however it ends. Owns the limit of requests whose body is here, which the keys share. Does not
know the routes, nor what a body says.

A line of the access log and spans for a collector tell of a response that has ended. What both are made of is gathered once, and
nothing waits: lines go to the log's thread, and reports to the thread of whoever makes spans (`router/api/spans.py`). The name of
a key is told, never the key; no text of a prompt or an answer is.
"""

import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.config import RouterConfig
from common.errors import BadRequest
from common.logs import REQUEST, with_fields
from common.options import parse_bytes
from router.api.bodies import LARGE_BODY_BYTES, body_of, unless_left
from router.api.errors import MESSAGES_PATH, VISIT, response_to
from router.api.guard import HEADER, Guard, id_in
from router.api.intake import Intake
from router.core import Gateway
from router.metrics import RouterMetrics
from router.requests import Asked, ClientRequest, Places
from router.timelines import RequestTimes

MOST_CHARS = 1_024
"""The longest path and header that are kept: reports and lines wait for a while, and a client may send 64 KiB."""
_access = logging.getLogger("router.access")


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request whose response has ended. Times are of the router's clock. It holds no text, and nothing that does."""

    method: str
    path: str
    route: str
    """Its path as the router describes it; "": there is none."""
    parent: Mapping[str, Sequence[str]]
    """Its headers `traceparent` and `tracestate`."""
    request_id: str
    key: str
    """The name of its API key; "": it has none."""
    status: int
    begun_s: float
    ended_s: float
    answer_id: str
    session: str
    asked: Asked | None
    """None: it was not dispatched."""
    choices: tuple[RequestTimes, ...]

    @property
    def endings(self) -> list[str]:
        """How each choice ended."""
        return [each.ending or "" for each in self.choices]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Cached tokens of each prompt once, with its first choice."""
        samples = 1 if self.asked is None else self.asked.samples
        return sum(each.cached_tokens for each in self.choices if each.index % samples == 0)

    @property
    def drafts(self) -> dict[str, int]:
        """Tokens that were proposed for the answers, and those of them that are in one; nothing where none were."""
        drafted, accepted = (sum(each.drafts[place] for each in self.choices) for place in range(2))
        return {"drafted_tokens": drafted, "accepted_tokens": accepted} if drafted else {}

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to the first token of any choice."""
        first_s = min((each.first_token_s for each in self.choices if each.first_token_s is not None), default=None)
        return None if first_s is None else first_s - self.begun_s


ToSpans: TypeAlias = Callable[[ServedRequest], object]


def _parent_in(scope: Scope) -> Mapping[str, Sequence[str]]:
    """The headers of W3C's trace context. A client that sends two parents has sent none that counts."""
    headers = Headers(scope=scope)
    found = {name: [one for one in headers.getlist(name) if len(one) <= MOST_CHARS] for name in ("traceparent", "tracestate")}
    return found if len(found["traceparent"]) == 1 else {}


def _log_access(report: ServedRequest) -> None:
    asked, ttft_s = report.asked, report.ttft_s
    of_answer = {}
    if asked is not None:
        of_answer = {
            "model": asked.model,
            "prompt_tokens": asked.prompt_tokens,
            "cached_tokens": report.cached_tokens,
            "answer_tokens": report.tokens,
            **report.drafts,
            "ttft_s": None if ttft_s is None else round(ttft_s, 6),
            "finish": ",".join(dict.fromkeys(report.endings)),
        }
    of_http = {"method": report.method, "path": report.path, "status": report.status}
    duration_s = round(report.ended_s - report.begun_s, 6)
    fields = with_fields(report.request_id, **of_http, key=report.key or None, **of_answer, duration_s=duration_s)
    _access.info("served", extra=fields)


SPARE_CONNECTIONS = 256
"""How many requests with a body may be open beyond --max-requests: answers that are still being sent, and calls to a tokenizer.
Pages such as /health have no limit: the server sees to it that none of them waits for its client."""
CLIENT_CLOSED = 499
"""The status counted when no client is left to send one to, as in nginx."""
BATCH_OWNER = "tandem.batch_owner"
"""Where the scope of a line of a batch holds the name of the key that sent the batch. No client can set it."""

R = TypeVar("R")
T = TypeVar("T")


class Admission:
    """Where the requests of one router get what they take of it."""

    def __init__(self, gateway: Gateway, intake: Intake, config: RouterConfig) -> None:
        self.gateway = gateway
        self.intake = intake
        self.has_access_log = config.access_log == "on"
        if self.has_access_log:
            _access.setLevel(logging.INFO)
        self.to_spans: ToSpans | None = None
        """Makes spans of a report, without waiting; None: nobody does."""
        self.max_body_bytes = parse_bytes(config.max_body)
        """None: bodies may have any length."""
        self.session_header = config.sessions_by
        """Names the session of a request; empty: nothing does."""
        self.places = Places(config.max_requests + SPARE_CONNECTIONS, "HTTP requests")
        """A request has one from when its body is here."""


@dataclass(slots=True, eq=False)
class Visit:
    """One HTTP request, and all that it has taken. `close` gives back what is left of that."""

    _admission: Admission
    _scope: Scope | None
    """ASGI's; a gRPC call has one like it."""
    send: Send
    """The server's own: events of a stream take it, because each layer above costs as much as encoding them."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    owner: str = ""
    """The name of the client's API key; empty without one."""
    is_from_batch: bool = False
    """The router sends it to itself, for a line of a batch."""
    _begun_s: float = field(init=False)
    _body: bytes | None = None
    _has_place: bool = False
    _is_large: bool = False
    _client: ClientRequest | None = None

    def __post_init__(self) -> None:
        self._begun_s = self._admission.gateway.clock()

    @property
    def client(self) -> ClientRequest:
        """The request that it has let in."""
        assert self._client is not None
        return self._client

    @property
    def max_body_bytes(self) -> int | None:
        return self._admission.max_body_bytes

    def close(self, status: int) -> None:
        """The end of its response: what is left of it is given back, and logs and traces are told."""
        if self._client is not None:
            self._admission.gateway.leave(self._client)
        if self._has_place:
            self._admission.places.leave(self.owner)
        if self._scope is not None:
            self._report(self._scope, status)

    def _report(self, scope: Scope, status: int) -> None:
        to_spans = None if self._client is None else self._admission.to_spans
        if to_spans is None and not self._admission.has_access_log:
            return
        client, gateway, route = self._client or ClientRequest(), self._admission.gateway, scope.get("route")
        report = ServedRequest(
            method=scope["method"],
            path=scope["path"][:MOST_CHARS],
            route="" if route is None else route.path,
            parent=_parent_in(scope),
            request_id=self.id,
            key=self.owner,
            status=status,
            begun_s=self._begun_s,
            ended_s=gateway.clock(),
            answer_id=client.id,
            session=client.session,
            asked=client.asked,
            choices=client.times,
        )
        if self._admission.has_access_log:
            _log_access(report)
        if to_spans is not None:
            to_spans(report)

    def hand_over(self) -> "Visit":
        """What it has taken goes to another one, which somebody closes after the end of this response."""
        other = copy(self)
        self._scope, self._client, self._has_place = None, None, False
        return other

    def enter(self, prefix: str = "", scope: Scope | None = None) -> ClientRequest:
        """Let a request for the model in: the router knows it from now on. prefix: of its answer's id. scope: its headers may
        name a session. Raises Unavailable when the router drains."""
        header = self._admission.session_header
        session = id_in(scope, header) if scope is not None and header else ""
        names = {self.id: (0,), prefix + self.id: (0,)}
        client = ClientRequest(prefix + self.id, self.owner, secrets.token_hex(8), session, names=names, choices=1)
        client.is_from_batch = self.is_from_batch
        gateway = self._admission.gateway
        gateway.core.requests.arrive(client, gateway.clock())
        self._client = client
        return client

    async def peek(self, request: Request) -> bytes:
        """The body, which `read` reads. Raises BadRequest, Overloaded, ClientDisconnect."""
        if self._body is None:
            self._admission.places.require(self.owner)
            self._body = await body_of(request, self._admission.max_body_bytes)
        return self._body

    async def read(self, request: Request, reader: Callable[[bytes, int], T]) -> T:
        """What the body asks for. Raises BadRequest, Overloaded, ClientDisconnect."""
        body, self._body = await self.peek(request), None
        self.take_place()
        return await self.parse(body, reader, request)

    def take_place(self) -> None:
        """Count as an open request until `close`. Raises Overloaded."""
        self._admission.places.take(self.owner)
        self._has_place = True

    async def parse(self, body: bytes, reader: Callable[[bytes, int], T], request: Request | None = None) -> T:
        """What a body that is here asks for. Raises BadRequest, Overloaded, ClientDisconnect."""
        intake = self._admission.intake
        self._is_large = self._is_large or len(body) > LARGE_BODY_BYTES
        if not self._is_large:
            return reader(body, intake.context_tokens)
        return await self.work(request, intake.read_large(reader, body, self.owner))

    async def work(self, request: Request | None, work: Coroutine[Any, Any, R]) -> R:
        """Do the intake's work for a request that was read. That for a large body ends when the client leaves. request: None for
        a call that is cancelled then. Raises ClientDisconnect, and what the work raises."""
        return await (unless_left(request, work) if self._is_large and request is not None else work)


def visit_of(request: Request) -> Visit:
    visit: Visit = request.scope[VISIT]
    return visit


class Doorkeeper:
    """ASGI middleware. While the router drains, each response ends its connection, so that clients connect to another router."""

    def __init__(self, app: ASGIApp, admission: Admission, metrics: RouterMetrics, guard: Guard) -> None:
        self._app = app
        self._admission = admission
        self._metrics = metrics
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit, app, status = Visit(self._admission, scope, send), self._app, CLIENT_CLOSED
        scope[VISIT] = visit

        async def send_named(message: Message) -> None:
            """Send the start of a response with the request's id."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(HEADER, visit.id.encode())]
                if scope["path"].startswith(MESSAGES_PATH):
                    ids.append((b"request-id", visit.id.encode()))  # as Anthropic calls it
                ends = ((b"connection", b"close"),) if self._admission.gateway.core.requests.is_draining else ()
                message = {**message, "headers": [*message.get("headers", ()), *ids, *ends]}
            await send(message)

        try:
            try:
                visit.id = id_in(scope) or visit.id
                REQUEST.set(visit.id)
                batch_owner = scope.get(BATCH_OWNER)
                visit.is_from_batch = batch_owner is not None
                visit.owner = self._guard.admit(scope) if batch_owner is None else self._guard.admit_batch(batch_owner)
            except BadRequest as error:
                app = response_to(error)
            await app(scope, receive, send_named)
        except Exception:
            status = 500  # a bug: the server answers for it
            raise
        finally:
            visit.close(status)
            route = scope.get("route")
            self._metrics.responded("other" if route is None else route.path, status)
