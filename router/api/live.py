"""The live page at `/`, and the states that it reads: GET /cluster/events.

Owns the files of the page, and the beat: a state a second while somebody looks, computed once for all, and nothing while nobody
does. A viewer takes the latest state when it has read the one before: a slow one misses states, and nothing waits for it.
`router.live` owns what is in a state.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from common.config import RouterConfig
from common.errors import Overloaded, Unavailable
from router.api.description import ApiPart, Described
from router.api.guard import PAGE_PREFIX
from router.api.sending import HEADERS_AS_TEXT
from router.core import Gateway
from router.live import LiveRoster, LiveState, LiveView
from router.metrics import RouterMetrics

BEAT_S = 1.0
MOST_VIEWERS = 32
RETRY_S = 10
INDEX = "index.html"
KINDS = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Only what is from here, and no page around it. No text becomes HTML, whatever a script does with it."""
PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept",
}
HINT = "This is a Tandem router. A browser shows its fleet here, live. The API is described at /docs.\n"


def page_routes() -> list[Route]:
    """The page, and the files that it loads. They hold no figures, so they need no key."""
    folder = files("router") / "page"
    contents = {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in KINDS}

    async def read(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2] or INDEX
        if name == INDEX and "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(HINT, headers=PAGE_HEADERS)
        return Response(contents[name], headers=PAGE_HEADERS, media_type=KINDS[name.rpartition(".")[2]])

    return [Route("/", read), *(Route(f"{PAGE_PREFIX}/{name}", read) for name in contents if name != INDEX)]


class LiveApi(ApiPart):
    """The handler, and who looks."""

    def __init__(self, gateway: Gateway, model: str, metrics: RouterMetrics, config: RouterConfig) -> None:
        super().__init__(gateway, model)
        named = model, str(config.dispatch), str(config.prefill_policy), str(config.decode_policy)
        self._new_view = partial(LiveView, gateway.core, metrics, named)
        self._view: LiveView | None = None
        self._latest = 0.0, 0, b"", b""
        """When the last state was computed, the version of its roster, and both as events. It is of `_view`."""
        self._looking = asyncio.Lock()
        self.viewers = 0

    @Described(
        "GET /cluster/events",
        "Operations",
        "The fleet, live",
        "Server-sent events, without an end until the router drains: a roster when it changes, and a state each second.",
        media_types=("text/event-stream",),
        refusals=(429, 503),
    )
    async def events(self) -> Response:
        """What the page at `/` and `launch top` show: figures of the instances, times of requests, and what has happened. No text
        or token is in it. At most 32 may look at once; one that reads slowly misses states."""
        return _Viewing(self)

    @contextmanager
    def look(self) -> Iterator[AsyncIterator[bytes]]:
        """Take a place, and read the events. Raises Overloaded, Unavailable."""
        if self._gateway.core.requests.is_draining:
            raise Unavailable("the router drains: look at another one, or try again later")
        if self.viewers >= MOST_VIEWERS:
            raise Overloaded(f"{MOST_VIEWERS} look at this router already: try again when one has left", RETRY_S)
        self.viewers += 1
        try:
            yield self._events()
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._view = None

    async def _events(self) -> AsyncIterator[bytes]:
        shown_s, seen = -math.inf, 0
        while not self._gateway.core.requests.is_draining:
            computed_s, version, roster, state = await self._state()
            if computed_s > shown_s:
                yield roster + state if version != seen else state
                shown_s, seen = computed_s, version
            await asyncio.sleep(max(0.0, computed_s + BEAT_S - self._gateway.clock()))
        yield b"data: [DONE]\n\n"

    async def _state(self) -> tuple[float, int, bytes, bytes]:
        """The latest one. Whoever comes first when it is too old computes the next one, for all."""
        async with self._looking:
            now = self._gateway.clock()
            view = self._view = self._view or self._new_view(now)
            if not view.roster.version or now >= self._latest[0] + BEAT_S:
                state = await view.look(now)
                self._latest = now, state.roster, _event(view.roster), _event(state)
            return self._latest


class _Viewing(StreamingResponse):
    """The response to one viewer, who takes a place while it is sent."""

    def __init__(self, api: LiveApi) -> None:
        super().__init__((), headers=HEADERS_AS_TEXT)
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._api.look() as events:
            self.body_iterator = events
            await super().__call__(scope, receive, send)


def _event(said: LiveRoster | LiveState) -> bytes:
    return b"data: " + msgspec.json.encode(said) + b"\n\n"
