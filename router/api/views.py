"""What people look at: what became of requests and what took time (GET /requests/{id}, traces of /cluster/trace), and the live
page at `/` with the states that it reads (GET /cluster/events).

Owns the shape of a timeline, the change from the router's clock to UNIX time, and the lines that a trace is read as: the first
says how it stands, each other one is a span, in no order. Packed spans become lines in a thread, a few at a time: a trace may be
hundreds of megabytes. Does not know who records what.

Routers share no state, and the kernel deals out connections, so a client that asks for a request may meet a router that never had
it. That router asks the others behind its HTTP port, with the client's own key; they obey their own rules, and ask nobody else.
This is bounded: so many threads, which keys take in turns, and so long.

Owns also the files of the live page, and the beat: a state a second while somebody looks, computed once for all, and nothing
while nobody does. A viewer takes the latest state when it has read the one before: a slow one misses states, and nothing waits
for it. `router.live` owns what is in a state.
"""

import asyncio
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from common.config import RouterConfig
from common.errors import BadRequest, NotFound, Overloaded, Unavailable
from common.messages import unpack_spans
from common.processes.router_client import RequestFailed, RouterClient
from common.tracing import TraceLine, TraceStatus
from router.api.admission import visit_of
from router.api.answers import BEGIN, DONE, END
from router.api.description import ApiPart, Described
from router.api.errors import shown
from router.api.guard import EVERYBODY, PAGE_PREFIX, REQUESTS_PREFIX, key_in
from router.api.sending import HEADERS_AS_TEXT
from router.api.threads import SharedThreads
from router.core import Gateway
from router.live import LiveRoster, LiveState, LiveView
from router.metrics import RouterMetrics
from router.timelines import (
    REMEMBERED,
    AttemptTimeline,
    ChoiceTimes,
    Durations,
    LoadLine,
    PastRequest,
    RequestTimes,
    SecondsOrNull,
    lines_of,
)
from router.traces import Frame

ASK_S = 2.0
"""For all of them together: they are on this host, and look in a dictionary."""
WAIT_S = 5.0
"""With the wait for a thread."""
_AT_ONCE = 2


class OtherRouters:
    """urls: of their own HTTP ports. tls: whom to trust there."""

    def __init__(self) -> None:
        self._urls: Sequence[str] = ()
        self._tls: ssl.SSLContext | None = None
        self._threads = SharedThreads(_AT_ONCE, "other routers")

    def meet(self, urls: Sequence[str], tls: ssl.SSLContext | None = None) -> None:
        """From now on these are the others."""
        self._urls, self._tls = tuple(urls), tls

    async def find(self, name: str, owner: str, key: bytes | None) -> Any:
        """The timeline, as JSON, that one of them has for a client with this key; None when none has it, or not in time."""
        if not self._urls:
            return None
        try:
            async with asyncio.timeout(WAIT_S):
                return await self._threads.run(owner, partial(self._ask, name, (key or b"").decode("latin-1")))
        except TimeoutError:
            return None

    def close(self) -> None:
        self._threads.close()

    def _ask(self, name: str, key: str) -> Any:
        until = time.monotonic() + ASK_S
        path = f"{REQUESTS_PREFIX}/{quote(name, safe='')}?here=true"
        for url in self._urls:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            try:
                return RouterClient(url, key, left_s, self._tls).get(path)
            except RequestFailed:  # it does not know it, or is not there
                continue
        return None


class RequestDurations(Durations, frozen=True, kw_only=True):
    """In seconds; those of instances are sums over attempts and exact, because each is of one instance's clock."""

    time_to_first_token_s: SecondsOrNull = None
    """From the arrival at the router to the first token there."""
    predicted_ttft_s: SecondsOrNull = None
    """The same, as predicted when the request was last placed before that token."""
    e2e_s: SecondsOrNull = None
    """From the arrival at the router to the ending."""


class ChoiceTimeline(ChoiceTimes, kw_only=True):
    durations: RequestDurations
    attempts: tuple[AttemptTimeline, ...]


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    choices: tuple[ChoiceTimeline, ...]
    """The choices of the latest requests that were sent with this id."""


class TimelineApi(ApiPart):
    """The handler."""

    def __init__(self, gateway: Gateway, model: str) -> None:
        super().__init__(gateway, model)
        self.others = OtherRouters()

    @Described(
        f"GET {REQUESTS_PREFIX}/{{name:path}}",
        "Operations",
        "The timeline of a request",
        "What is known so far.",
        RequestTimeline,
        refusals=(404,),
    )
    async def read(self, request: Request, name: str, here: str = "") -> Any:
        """When each thing happened to a request, and how long each part took: while it is open, and for a while after. An API key
        finds its own requests only, the control key those of all. Of several routers behind one port, any finds it. name: its
        X-Request-Id, or the id of its answer. here: true: only the router that is asked looks."""
        if here not in ("", "true"):
            raise BadRequest(f"here must be true, not {shown(here)!r}", field="here")
        owner, core = visit_of(request).owner, self._gateway.core
        known = core.requests.timelines.find(name, None if owner == EVERYBODY else owner)
        if not known and not here and (found := await self.others.find(name, owner, key_in(request.scope))) is not None:
            return found
        return request_timeline(name, known, core.unix_s)


def request_timeline(name: str, known: Sequence[RequestTimes], unix_s: float) -> RequestTimeline:
    """known: the requests of this id that the asking client may see. unix_s: what to add to the router's times. Raises
    NotFound when there is none."""
    if not known:
        reason = f"the router remembers the open requests and the last {REMEMBERED} that ended, by X-Request-Id and by answer id"
        raise NotFound(f"no request {shown(name)!r} is known: {reason}")
    return RequestTimeline(id=name, choices=tuple(_choice(each, unix_s) for each in known))


def _choice(request: RequestTimes, unix_s: float) -> ChoiceTimeline:
    attempts: list[AttemptTimeline] = []
    for each in request.attempts:
        instances = sorted(each.instances, key=lambda told: told.role, reverse=True)
        attempts.append(AttemptTimeline(**_moved(each, AttemptTimeline, unix_s) | {"instances": instances}))
    return ChoiceTimeline(**_moved(request, ChoiceTimes, unix_s), durations=_durations(request), attempts=tuple(attempts))


def _moved(times: msgspec.Struct, kind: type[msgspec.Struct], unix_s: float) -> dict[str, Any]:
    """The fields of this kind, with UNIX times."""
    told = {name: getattr(times, name) for name in kind.__struct_fields__}
    return {name: _at(value, unix_s) if name.endswith("_s") else value for name, value in told.items()}


def _durations(request: RequestTimes) -> RequestDurations:
    parts = [Durations.of(each.role, each.times) for attempt in request.attempts for each in attempt.instances]
    return RequestDurations(
        **{name: _sum(getattr(each, name) for each in parts) for name in Durations.__struct_fields__},
        time_to_first_token_s=_at(request.first_token_s, -request.received_s),
        predicted_ttft_s=request.predicted_first_s,
        e2e_s=_at(request.ended_s, -request.received_s),
    )


def _sum(seconds: Iterable[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return sum(known) if known else None


def _at(time_s: float | None, more_s: float) -> float | None:
    return None if time_s is None else time_s + more_s


SECONDS = "60"
LINES = "application/x-ndjson"
PIECE_FRAMES = 8
"""Several thousand spans at most, which take milliseconds."""

_log = logging.getLogger(__name__)


class TraceApi(ApiPart):
    """The handlers."""

    @Described(
        "POST /cluster/trace",
        "Operations",
        "Begin a trace",
        "Every process of the fleet records what takes time, for `seconds` (60; at most 600).",
        status=202,
        refusals=(400, 409),
    )
    async def start(self, seconds: str = SECONDS) -> TraceStatus:
        """The router also counts processes that join meanwhile. `GET /cluster/trace` has the spans when the time is over. The
        trace before this one is forgotten."""
        try:
            wanted_s = float(seconds)
        except ValueError:
            raise BadRequest(f"seconds must be a number, not {seconds[:32]!r}", field="seconds") from None
        now, traces = self._gateway.clock(), self._gateway.core.traces
        self._gateway.deliver(traces.start(wanted_s, now))
        return traces.status(now)

    @Described(
        "GET /cluster/trace",
        "Operations",
        "Read the trace",
        "JSON lines: the first says how the trace stands, and when it is over, each other one is a span.",
        TraceStatus,
        media_types=(LINES,),
        refusals=(404,),
    )
    async def read(self) -> Response:
        """Requests that are still open at its end have no span of their own; what was done for them has."""
        traces = self._gateway.core.traces
        status = traces.status(self._gateway.clock())
        frames = traces.frames() if status.state == "over" else []
        return StreamingResponse(_lines(msgspec.json.encode(status) + b"\n", frames), media_type=LINES)

    @Described("DELETE /cluster/trace", "Operations", "Forget the trace", "It is ended and forgotten.", refusals=(404,))
    async def forget(self) -> TraceStatus:
        """It gives its memory back, which the next trace does too."""
        now, traces = self._gateway.clock(), self._gateway.core.traces
        status = traces.status(now)
        self._gateway.deliver(traces.end(now))
        return status

    @Described(
        "GET /cluster/load",
        "Operations",
        "The requests of the last hour",
        "JSON lines, a trace in Mooncake's format for `launch plan` and `launch simulate`.",
        LoadLine,
        media_types=(LINES,),
    )
    async def load(self) -> Response:
        """The requests of this router that have ended: when each came, in milliseconds from the first, how long prompt and answer
        were, and numbers for the blocks of 512 tokens that it may have in common with others. The latest 50,000 at most, without
        texts, tokens and keys."""
        requests = self._gateway.core.requests.past.requests(self._gateway.clock())
        return Response(await asyncio.to_thread(_load, requests), media_type=LINES)


async def _lines(first: bytes, frames: Sequence[Frame]) -> AsyncIterator[bytes]:
    yield first
    for begin in range(0, len(frames), PIECE_FRAMES):
        yield await asyncio.to_thread(_piece, frames[begin : begin + PIECE_FRAMES])


def _load(requests: Sequence[PastRequest]) -> bytes:
    return msgspec.json.Encoder().encode_lines(lines_of(requests))


def _piece(frames: Sequence[Frame]) -> bytes:
    lines: list[TraceLine] = []
    for frame in frames:
        try:
            spans = unpack_spans(frame.packed)
        except msgspec.DecodeError as error:
            _log.warning("spans of process %d of a trace cannot be read: %s", frame.process, error)
            continue
        lines += [
            TraceLine(frame.process, span.track, span.name, span.begin_s, span.end_s, span.request, span.args) for span in spans
        ]
    return msgspec.json.Encoder().encode_lines(lines)


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
        yield DONE

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
    return BEGIN + msgspec.json.encode(said) + END
