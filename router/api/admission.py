"""The doorkeeper: what happens around every HTTP request, whatever handles it.

Owns the middleware, and where a request's scope holds what must be closed when it is over. Does not know the routes.

The drain of a router: it takes no more requests, and lets those that are open end.

    told to stop ── new requests are refused, open ones go on ──► none is open, or the time is over ── the rest is ended ──► over

Owns the count of open requests, from their first byte to the end of their response, and the order of a drain. Does not know
signals, sockets or processes. The pages, such as /ready, are served throughout.

The answers that are open or coming, by the ids that clients know them by.

Owns the ids. An answer is coming while its prompt is still tokenized: until then no request stands for it. Two answers may have
the same id: clients choose ids.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import BadRequest, Unavailable
from common.ids import RequestId
from common.messages import Failed
from router.api.errors import response_to
from router.api.guard import Guard
from router.api.request_ids import HEADER, OWNER, REQUEST_ID, id_in, new_id
from router.api.sending import DIRECT_SEND
from router.core import Gateway, RouterCore
from router.metrics import RouterMetrics

_log = logging.getLogger(__name__)


class Door:
    """Through which requests for the model come in and leave."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self.inside = 0
        """Requests whose response has not ended yet."""
        self.last_left = asyncio.Event()
        """The door is closed, and nobody is inside."""

    @property
    def closed(self) -> bool:
        return self._core.draining

    def enter(self) -> None:
        """Whoever entered must `leave`. Raises Unavailable when the router drains."""
        if self.closed:
            raise Unavailable("the router is draining and will stop: send the request to another router, or try again later")
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        assert self.inside >= 0
        self._note_last()

    def close(self) -> None:
        """Nobody enters any more."""
        self._core.draining = True
        self._note_last()

    def _note_last(self) -> None:
        if self.closed and not self.inside:
            self.last_left.set()


async def drain(door: Door, gateway: Gateway, timeout_s: float, stop: asyncio.Event, at_once: asyncio.Event) -> None:
    """Wait for `stop`, drain, and return when the last request has left. After `timeout_s`, or when `at_once` is set, those that
    are still open end with an error, and their responses may not have been sent yet when this returns."""
    await stop.wait()
    door.close()
    if door.inside:
        _log.info("draining: %d requests are open and may take %g s", door.inside, timeout_s)
    waits = [asyncio.ensure_future(event.wait()) for event in (door.last_left, at_once)]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if door.inside:
        _log.warning("%d requests were still open when the drain ended: they end with an error", door.inside)
        stopping = Unavailable("the router was stopped before the request had ended: send it again")
        gateway.deliver(gateway.core.requests.end_all(Failed.of(stopping), gateway.clock()))


@dataclass(slots=True, eq=False)
class Coming:
    """An answer that is not dispatched yet. choices: how many it has. names: each id with how many choices it stands for.
    aborted: the ids for which these were aborted meanwhile."""

    owner: str
    choices: int
    names: Mapping[str, int]
    aborts_all: bool = False
    aborted: set[str] = field(default_factory=set)

    def abort(self, name: str | None) -> int:
        """Returns how many choices this ends. name: None: all."""
        if self.aborts_all or name in self.aborted:
            return 0
        if name is None:
            self.aborts_all = True
            return self.choices
        if name not in self.names:
            return 0
        self.aborted.add(name)
        return self.names[name]


class OpenAnswers:
    """Which requests of the core an id stands for."""

    def __init__(self) -> None:
        self._coming: set[Coming] = set()
        self._requests: dict[str, list[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, named: Mapping[str, Iterable[RequestId]]) -> Callable[[], None]:
        """Returns what to call when the answer is over."""
        added = [(name, request) for name, requests in named.items() for request in requests]
        for name, request in added:
            self._requests.setdefault(name, []).append(request)

        def remove() -> None:
            for name, request in added:
                rest = self._requests[name]
                rest.remove(request)
                if not rest:
                    del self._requests[name]

        return remove

    def expect(self, owner: str, choices: int, names: Mapping[str, int]) -> Coming:
        """Whoever expects an answer says when it has `arrived`."""
        coming = Coming(owner, choices, names)
        self._coming.add(coming)
        return coming

    def arrived(self, coming: Coming) -> None:
        """It is dispatched, or never will be. Idempotent."""
        self._coming.discard(coming)

    def abort_coming(self, owner: str, name: str | None) -> int:
        """Abort what the owner has coming by this id, or with None all of it. Returns how many choices that ends."""
        return sum(coming.abort(name) for coming in self._coming if coming.owner == owner)

    def aborted(self, coming: Coming, requests: Sequence[RequestId]) -> list[RequestId]:
        """Which of its requests, which are open now, were aborted while it was coming."""
        self.arrived(coming)
        named = {request for name in coming.aborted for request in self.find(name)}
        return [request for request in requests if coming.aborts_all or request in named]

    def find(self, name: str) -> tuple[RequestId, ...]:
        """The requests of all answers of this id."""
        return tuple(self._requests.get(name, ()))


CLIENT_CLOSED = 499
"""The status counted when no client is left to send one to, as in nginx."""
AT_END = "tandem.at_end"
"""Where a request's scope holds the ExitStack of what must be closed when it is over."""


class Doorkeeper:
    """ASGI middleware: refuses requests without the key that they need, counts responses by route and status, gives each request
    and its response an id, and closes what a handler left in the scope's AT_END, however the request ends and whether or not its
    response was ever sent. While the router drains, each response ends its connection, so that clients connect to another
    router."""

    def __init__(self, app: ASGIApp, door: Door, metrics: RouterMetrics, guard: Guard) -> None:
        self._app = app
        self._door = door
        self._metrics = metrics
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ends = ((b"connection", b"close"),) if self._door.closed else ()
                headers = [*message.get("headers", ()), (HEADER, scope[REQUEST_ID].encode()), *ends]
                message = {**message, "headers": headers}
            await send(message)

        try:
            scope[DIRECT_SEND] = send
            with ExitStack() as scope[AT_END]:
                await self._admit(scope)(scope, receive, watched_send)
        except Exception:
            status = 500  # a bug: the server answers for it
            raise
        finally:
            route = scope.get("route")
            self._metrics.responded("other" if route is None else route.path, status)

    def _admit(self, scope: Scope) -> ASGIApp:
        """Note whose request it is. Returns who answers it."""
        scope[REQUEST_ID] = new_id()
        try:
            scope[REQUEST_ID] = id_in(scope)
            scope[OWNER] = self._guard.admit(scope)
        except BadRequest as error:
            return response_to(error)
        return self._app
