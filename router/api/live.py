"""The live page at `/`, and the states that it reads: GET /cluster/events.

Owns the files of the page, and the beat: a state a second while somebody looks, computed once for all, and nothing while nobody
does. A viewer takes the newest state when it has read the one before, so a slow one misses states and nothing waits for it.
`router.live` owns what is in a state.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from common.errors import Overloaded, Unavailable
from router.api.description import ApiPart, Described
from router.api.guard import PAGE_PREFIX
from router.api.sending import HEADERS
from router.core import Gateway
from router.live import LiveRoster, LiveState, LiveView

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
}
HINT = "This is a Tandem router. A browser shows its fleet here, live. The API is described at /docs.\n"


def page_routes() -> list[Route]:
    """The page, and the files that it loads. They hold no figures, so they need no key."""
    folder = files("router") / "page"
    contents = {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in KINDS}

    async def read(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2] or INDEX
        if name == INDEX and "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(HINT, headers={"vary": "accept"})
        return Response(contents[name], headers=PAGE_HEADERS | {"vary": "accept"}, media_type=KINDS[name.rpartition(".")[2]])

    return [Route("/", read), *(Route(f"{PAGE_PREFIX}/{name}", read) for name in contents if name != INDEX)]


class LiveBeat:
    """The states for those who look since one was the first. It ends when the last of them has left, or the router drains."""

    def __init__(self, view: LiveView, gateway: Gateway) -> None:
        self._view, self._gateway = view, gateway
        self._state: LiveState | None = None
        self._encoded = self._roster = b""
        self._news = asyncio.Event()
        """Set when there is another state, or no more; then there is another event."""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self._view.begin(self._gateway.clock())
        try:
            while not self._gateway.core.requests.is_draining:
                state = await self._view.look(self._gateway.clock())
                if self._state is None or state.roster != self._state.roster:
                    self._roster = _event(self._view.roster)
                self._state, self._encoded = state, _event(state)
                self._tell()
                await asyncio.sleep(BEAT_S)
        finally:
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def events(self) -> AsyncIterator[bytes]:
        """The newest state, each time when the one before it was taken; before it the roster, when it is another one."""
        state, roster = None, 0
        while not self._task.done():
            if state is self._state:
                await self._news.wait()
                continue
            state = self._state
            assert state is not None
            changed, roster = roster != state.roster, state.roster
            yield self._roster + self._encoded if changed else self._encoded
        yield b"data: [DONE]\n\n"

    def end(self) -> None:
        self._task.cancel()


class LiveApi(ApiPart):
    """The handler, and who looks."""

    def __init__(self, gateway: Gateway, model: str, view: LiveView) -> None:
        super().__init__(gateway, model)
        self._view = view
        self._beat: LiveBeat | None = None
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
    def look(self) -> Iterator[LiveBeat]:
        """Raises Overloaded, Unavailable."""
        if self._gateway.core.requests.is_draining:
            raise Unavailable("the router drains: look at another one, or try again later")
        if self.viewers >= MOST_VIEWERS:
            raise Overloaded(f"{MOST_VIEWERS} look at this router already: try again when one has left", RETRY_S)
        self.viewers += 1
        beat = self._beat = self._beat or LiveBeat(self._view, self._gateway)
        try:
            yield beat
        finally:
            self.viewers -= 1
            if not self.viewers:
                beat.end()
                self._beat = None


class _Viewing(Response):
    """The response to one viewer, who takes a place while it is sent."""

    def __init__(self, api: LiveApi) -> None:
        super().__init__()
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._api.look() as beat:
            headers = {name.decode(): value.decode() for name, value in HEADERS}
            await StreamingResponse(beat.events(), headers=headers)(scope, receive, send)


def _event(said: LiveRoster | LiveState) -> bytes:
    return b"data: " + msgspec.json.encode(said) + b"\n\n"
