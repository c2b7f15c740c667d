"""The answer to one client: what arrives for it, and the two ways to send it, as a stream of events or as one JSON body.

Owns the watch over the client's connection, and the promise that a dispatched request is cancelled however its answer ends.
Nothing is sent before the first news of the request, so an early failure still gets its proper status; a later one becomes an
error event. A stream that is silent for long begins without news, with a comment line, because proxies close idle connections.
Does not know the fleet.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.messages import Failed
from router.api.answers import LOOP_SIZE, AnswerShape, WholeChoice
from router.api.errors import response_to_failure
from router.api.event_stream import ClientGone, EventStream
from router.api.intake import Accepted
from router.api.threads import SharedThreads
from router.gateway import Gateway
from router.outbox import ChoiceDelta, Outbox

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
