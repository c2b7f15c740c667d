"""The answer to one client: what arrives for it, and the two ways to send it, as a stream of events or as one JSON body.

Owns the watch over the client's connection, and the promise that a dispatched request is cancelled however its answer ends.
Nothing is sent before the first news of the request, so an early failure still gets its proper status; a later one becomes an
error event. A stream that is silent for long begins without news, with a comment line, because proxies close idle connections.
Does not know the fleet.

One answer as a stream of server-sent events: what arrives is passed on, and a slow client is waited for.

Owns the order of what is sent, and the silence that a comment line breaks. Does not know the fleet, and nothing of a request but
its deltas.

    news ─► take what is unread ─► encode ─► send ── done at once ──► nothing waits
             ▲                                └─ the client is slow ─► a task waits, then takes
             └─────────────────────────────────────────────────────── what has arrived meanwhile

No task waits for news: waking one costs more than everything else that a token costs here. The first news of a turn of mail is
sent while it is handled. More of it in the same turn is sent together, when the turn is over: mail that had to wait costs less.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from types import coroutine
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.messages import Failed
from router.api.answers import LOOP_SIZE, Accepted, AnswerShape, WholeChoice
from router.api.errors import detail_of_failure, error_json, response_to_failure
from router.api.threads import SharedThreads
from router.core import Gateway
from router.outbox import ChoiceDelta, Outbox, joined

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it (https://html.spec.whatwg.org/multipage/server-sent-events.html#authoring-notes)."""


class ClientGone(Exception):
    """The connection is closed: nobody reads the answer."""


class Source(Protocol):
    """Where the stream's deltas come from."""

    @property
    def turn(self) -> int:
        """Number of the present turn of mail."""

    @property
    def ended(self) -> bool:
        """Whether the last delta was taken."""

    def take(self) -> Sequence[ChoiceDelta]:
        """The deltas that are unread."""


class EventStream:
    """Sends a chunk for each piece of text; pieces that wait for a slow client are sent as one.

    start: the message that begins the response; send_start sends it, and send all others. over: ends with None when all is sent,
    with the failure when the answer failed before anything was sent, or with ClientGone. Call `wake` when there is news, and
    `close` at the end.
    """

    __slots__ = (
        "_loop",
        "_opened",
        "_over",
        "_send",
        "_send_start",
        "_sent_in_turn",
        "_shape",
        "_silent_since_s",
        "_source",
        "_start",
        "_timer",
        "_waiting",
        "_woken",
    )

    def __init__(
        self,
        source: Source,
        shape: AnswerShape[Any],
        start: Message,
        send_start: Send,
        send: Send,
        over: "asyncio.Future[Failed | None]",
    ) -> None:
        self._source, self._shape = source, shape
        self._start: Message | None = start
        self._send_start, self._send = send_start, send
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._woken = False
        """What is unread is taken when this turn is over."""
        self._sent_in_turn = -1
        """The turn in which something was last sent."""
        self._waiting: asyncio.Task[None] | None = None
        """Waits for a slow client."""
        self._opened: set[int] = set()
        self._silent_since_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def keep_alive(self, limit_s: float) -> None:
        """From now on send a comment after so long a silence.

        The timer is not moved when something is sent: it looks when it rings, so that a piece of text costs no timer.
        """
        left_s = self._silent_since_s + limit_s - self._loop.time()
        if left_s <= 0:
            if self._waiting is None and not self._woken:
                self._take(KEEP_ALIVE)
            left_s = limit_s
        self._timer = self._loop.call_later(left_s, self.keep_alive, limit_s)

    def wake(self) -> None:
        """There is news."""
        if self._woken or self._waiting is not None:
            return
        turn = self._source.turn
        if turn == self._sent_in_turn:
            self._woken = True
            self._loop.call_soon(self._take)
        else:
            self._sent_in_turn = turn
            self._take()

    def close(self) -> None:
        for waits in (self._timer, self._waiting):
            if waits is not None:
                waits.cancel()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _take(self, comment: bytes = b"") -> None:
        """Send the comment, and what is unread."""
        self._woken = False
        if self._over.done():
            return
        try:
            events, failed = self._encode(self._source.take())
            self._pass_on(comment + events, failed)
        except Exception as error:  # noqa: BLE001  others' news is handled with this: whoever awaits the end raises it
            self._over.set_exception(error)

    def _encode(self, deltas: Sequence[ChoiceDelta]) -> tuple[bytes, Failed | None]:
        """The events for these deltas, and the failure if they hold one."""
        events = b""
        failed: Failed | None = None
        for delta in deltas if len(deltas) == 1 else joined(deltas):
            if isinstance(delta.ending, Failed):
                failed = failed or delta.ending
            opens = delta.index not in self._opened
            if opens:
                self._opened.add(delta.index)
            events += self._shape.events(delta, opens=opens)
        return events, failed

    def _pass_on(self, events: bytes, failed: Failed | None) -> None:
        """Send these events, and what follows them if they are the last."""
        if failed is not None and self._start is not None:
            self._over.set_result(failed)
            return
        last: bytes | None = None
        if failed is not None:
            events, last = events + b"data: " + error_json(detail_of_failure(failed)) + b"\n\n", b""
        elif self._source.ended:
            last = self._shape.last_events()
        messages: list[Message] = []
        if self._start is not None and events:
            messages.append(self._start)
            self._start = None
        if events:
            messages.append({"type": "http.response.body", "body": events, "more_body": True})
        if last is not None:
            messages.append({"type": "http.response.body", "body": last})
        self._silent_since_s = self._loop.time()
        for number, message in enumerate(messages):
            rest = begin(self._sending(message))
            if rest is not None:
                self._waiting = self._loop.create_task(self._wait(rest, messages[number + 1 :], last is not None))
                return
        if last is not None:
            self._over.set_result(None)

    def _sending(self, message: Message) -> Awaitable[None]:
        return (self._send_start if message["type"] == "http.response.start" else self._send)(message)

    async def _wait(self, rest: Awaitable[None], messages: Sequence[Message], is_last: bool) -> None:
        """Wait for a slow client, send the rest, and take what has arrived meanwhile. The server drops who stops reading."""
        try:
            await rest
            for message in messages:
                await self._sending(message)
        except Exception as error:  # noqa: BLE001  whoever awaits the end raises it
            if not self._over.done():
                self._over.set_exception(error)
            return
        self._waiting = None
        self._silent_since_s = self._loop.time()
        if not is_last:
            self._take()
        elif not self._over.done():
            self._over.set_result(None)


def begin(awaitable: Awaitable[None]) -> Coroutine[Any, Any, None] | None:
    """Run it as far as it goes without waiting. Returns None when it is done, otherwise what is left to await."""
    running = awaitable.__await__()
    try:
        waits_for = next(running)
    except StopIteration:
        return None
    return _rest(running, waits_for)


@coroutine
def _rest(running: Generator[Any, Any, None], waits_for: object) -> Generator[Any, Any, None]:
    """waits_for: what `running` yielded before."""
    try:
        yield waits_for
        yield from running
    finally:
        running.close()


DIRECT_SEND = "tandem.direct_send"
"""Where a request's scope may hold the server's own send. Events take it: each layer above costs as much as encoding them."""


class Answer:
    """What arrives for one client's request. Whoever dispatches it sees to it that it is closed."""

    __slots__ = ("_gateway", "_outbox", "_specs", "_unended")

    def __init__(self, gateway: Gateway, accepted: Accepted) -> None:
        self._gateway = gateway
        self._specs = accepted.specs
        self._outbox = Outbox(_ignore)
        self._unended = 0
        """Choices that have been dispatched and have not ended."""

    def dispatch(self, received_s: float) -> None:
        """Raises Overloaded, Unavailable, BadRequest."""
        requests, now = self._gateway.core.requests, self._gateway.clock()
        sends = requests.submit(self._specs, self._outbox, received_s, now)
        self._unended = len(self._specs)
        self._gateway.deliver(sends)

    def close(self) -> None:
        """Cancel what is still open, and tell of no more news. Idempotent."""
        self._outbox.wake = _ignore
        if self._unended:
            self._unended = 0
            ids = [spec.request_id for spec in self._specs]
            self._gateway.deliver(self._gateway.core.requests.cancel(ids, self._gateway.clock()))

    @property
    def ended(self) -> bool:
        """Whether every choice has ended and was taken. Each ends by its deadline."""
        return self._unended == 0

    @property
    def turn(self) -> int:
        """Number of the present turn of mail."""
        return self._gateway.turn

    def on_news(self, listen: Callable[[], object]) -> None:
        """Call this from now on whenever there is something to take."""
        self._outbox.wake = listen
        if self._outbox.unread:
            listen()

    def take(self) -> Sequence[ChoiceDelta]:
        """The deltas since the last call."""
        deltas = self._outbox.take()
        for delta in deltas:
            if delta.ending is not None:
                self._unended -= 1
        return deltas


def _ignore() -> None:
    """Nobody listens."""


class AnswerResponse(Response, ABC):
    """Sends a dispatched answer, and closes it when sending ends."""

    def __init__(self, answer: Answer, shape: AnswerShape[Any]) -> None:
        super().__init__()
        self._answer = answer
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        over: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()
        watch = asyncio.create_task(_watch_client(receive, over))
        try:
            failed = await self._send(scope, send, over)
        except (ClientGone, OSError):
            return  # ASGI servers raise OSError for a send to a client that has gone
        finally:
            watch.cancel()
            self._answer.close()
        if failed is not None:
            await response_to_failure(failed)(scope, receive, send)

    @abstractmethod
    async def _send(self, scope: Scope, send: Send, over: "asyncio.Future[Failed | None]") -> Failed | None:
        """Send the answer; or send nothing and return why there is none. over: its end. Raises ClientGone."""

    def _start(self, *headers: tuple[bytes, bytes]) -> Message:
        return {"type": "http.response.start", "status": 200, "headers": headers}


class WholeResponse(AnswerResponse):
    """One JSON body with every choice. writers: threads for those that take long to write."""

    def __init__(self, answer: Answer, shape: AnswerShape[Any], writers: SharedThreads) -> None:
        super().__init__(answer, shape)
        self._writers = writers
        self._choices = [WholeChoice() for _ in shape.accepted.specs]

    async def _send(self, scope: Scope, send: Send, over: "asyncio.Future[Failed | None]") -> Failed | None:
        self._answer.on_news(lambda: self._collect(over))
        if (failed := await over) is not None:
            return failed
        body = await self._body()
        start = self._start((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
        await send(start)
        await send({"type": "http.response.body", "body": body})
        return None

    async def _body(self) -> bytes:
        write = partial(self._shape.whole, self._choices)
        if self._shape.size(self._choices) <= LOOP_SIZE:
            return write()
        return await self._writers.run(self._shape.accepted.specs[0].owner, write)

    def _collect(self, over: "asyncio.Future[Failed | None]") -> None:
        for delta in self._answer.take():
            if (failed := self._shape.failure(delta.ending)) is not None:
                if not over.done():
                    over.set_result(failed)
                return
            self._choices[delta.index].add(delta)
        if self._answer.ended and not over.done():
            over.set_result(None)


class StreamResponse(AnswerResponse):
    """Server-sent events. keep_alive_s: a comment is sent after so long a silence; 0: never."""

    def __init__(self, answer: Answer, shape: AnswerShape[Any], keep_alive_s: float) -> None:
        super().__init__(answer, shape)
        self._keep_alive_s = keep_alive_s

    async def _send(self, scope: Scope, send: Send, over: "asyncio.Future[Failed | None]") -> Failed | None:
        no_buffers = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
        start = self._start((b"content-type", b"text/event-stream; charset=utf-8"), *no_buffers)
        stream = EventStream(self._answer, self._shape, start, send, scope.get(DIRECT_SEND, send), over)
        try:
            self._answer.on_news(stream.wake)
            if self._keep_alive_s:
                stream.keep_alive(self._keep_alive_s)
            return await over
        finally:
            stream.close()


async def _watch_client(receive: Receive, over: "asyncio.Future[Failed | None]") -> None:
    """End the answer with ClientGone when the client leaves. receive: the ASGI channel; the body has been read from it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not over.done():
        over.set_exception(ClientGone())
