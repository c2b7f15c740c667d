"""The answer to one client: sent as a stream of events as it arrives, or as one JSON body when it has ended.

Owns the order of what is sent, the silence that a comment line breaks, and the watch over the client's connection. Nothing is
sent before the first news of the request, so an early failure still gets its proper status; a later one becomes an error event.
A stream that is silent for long begins without news, with a comment line, because proxies close idle connections. Does not know
the fleet, and nothing of a request but its deltas: `Visit` cancels what is still open of it at the end.

    news ─► take what is unread ─► encode ─► send ── done at once ──► nothing waits
             ▲                                └─ the client is slow ─► a task waits, then takes
             └─────────────────────────────────────────────────────── what has arrived meanwhile

No task waits for news: waking one costs more than everything else that a token costs here. The first news of a turn of mail is
sent while it is handled. More of it in the same turn is sent together, when the turn is over: mail that had to wait costs less.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Generator, Sequence
from functools import partial
from types import coroutine
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.errors import TandemError
from common.messages import Failed
from router.api.answers import LOOP_SIZE, AnswerShape
from router.api.errors import response_to_failure
from router.api.threads import SharedThreads
from router.core import Gateway
from router.requests import JOIN_DELTAS, ChoiceDelta, ClientRequest, joined

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
HEADERS_AS_TEXT = {name.decode(): value.decode() for name, value in HEADERS}


class ClientGone(Exception):
    """The connection is closed: nobody reads the answer."""


class AnswerFailed(TandemError):
    """The answer ended with this failure."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


async def news_of(client: ClientRequest) -> AsyncIterator[ChoiceDelta]:
    """The news of an answer until all of its choices have ended; what comes while nobody asks is joined. Raises AnswerFailed."""
    arrived = asyncio.Event()
    client.read_by(arrived.set)
    while client.unended:
        await arrived.wait()
        arrived.clear()
        deltas = client.take()
        for delta in deltas if len(deltas) == 1 else joined(deltas):
            if not isinstance(delta.ending, Failed):
                yield delta
                continue
            if delta.token_ids or delta.text:
                yield replace(delta, ending=None)
            raise AnswerFailed(delta.ending)


async def whole_answer(client: ClientRequest, shape: AnswerShape[Any], writers: SharedThreads) -> Response:
    """The response with one JSON body of all choices, when they have ended, or with the failure of one. writers: threads for
    bodies that take long to write."""
    over: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()
    choices: list[ChoiceDelta] = []

    def collect() -> None:
        nonlocal choices
        news = client.take()
        choices += news
        if len(choices) >= len(shape.accepted.specs) + JOIN_DELTAS:
            choices = joined(choices)
        failed = next(filter(None, (shape.failure(delta.ending) for delta in news)), None)
        if (failed is not None or not client.unended) and not over.done():
            over.set_result(failed)

    client.read_by(collect)
    if (failed := await over) is not None:
        return response_to_failure(failed)
    choices = sorted(joined(choices), key=lambda choice: choice.index)
    write = partial(shape.whole, choices)
    body = write() if shape.size(choices) <= LOOP_SIZE else await writers.run(client.owner, write)
    return Response(body, media_type="application/json")


class EventStream(Response):
    """Server-sent events: a chunk for each piece of text; pieces that wait for a slow client are sent as one. send_event: sends
    all but the start. keep_alive_s: after so long a silence something is sent that says nothing; 0: never."""

    def __init__(
        self, gateway: Gateway, client: ClientRequest, shape: AnswerShape[Any], send_event: Send, keep_alive_s: float
    ) -> None:
        super().__init__()
        self._gateway, self._client, self._shape = gateway, client, shape
        self._keep_alive_s = keep_alive_s
        self._unsent_start: Message | None = {"type": "http.response.start", "status": 200, "headers": HEADERS}
        self._send_start = self._send_event = send_event
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[Failed | None] = self._loop.create_future()
        """Ends with None when there is no more to come, with the failure when the answer failed before anything was sent, or with
        ClientGone."""
        self._is_woken = False
        """What is unread is taken when this turn is over."""
        self._sent_in_turn = -1
        """The turn of mail in which something was last sent."""
        self._waiting: asyncio.Task[None] | None = None
        """Waits for a slow client."""
        self._opened: set[int] = set()
        self._silent_since_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, unless its client leaves; or the failure of an answer of which nothing was sent."""
        self._send_start = send
        watch = asyncio.create_task(self._watch(receive))
        try:
            self._client.read_by(self._wake)
            if self._keep_alive_s:
                self._keep_alive()
            failed = await self._over
        except (ClientGone, OSError):
            return  # ASGI servers raise OSError for a send to a client that has gone
        finally:
            for waits in (watch, self._timer, self._waiting):
                if waits is not None:
                    waits.cancel()
        if failed is not None:
            await response_to_failure(failed)(scope, receive, send)

    async def _watch(self, receive: Receive) -> None:
        """Notice when the client leaves. receive: the ASGI channel; the body has been read from it."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._over.done():
            self._over.set_exception(ClientGone())

    def _keep_alive(self) -> None:
        """Break so long a silence.

        The timer is not moved when something is sent: it looks when it rings, so that a piece of text costs no timer.
        """
        left_s = self._silent_since_s + self._keep_alive_s - self._loop.time()
        if left_s <= 0:
            if self._waiting is None and not self._is_woken:
                self._take(self._shape.keep_alive)
            left_s = self._keep_alive_s
        self._timer = self._loop.call_later(left_s, self._keep_alive)

    def _wake(self) -> None:
        """There is news."""
        if self._is_woken or self._waiting is not None:
            return
        if self._gateway.turn == self._sent_in_turn:
            self._is_woken = True
            self._loop.call_soon(self._take)
        else:
            self._sent_in_turn = self._gateway.turn
            self._take()

    def _take(self, events: bytes = b"") -> None:
        """Send these events, and those of what is unread."""
        self._is_woken = False
        if self._over.done():
            return
        failed: Failed | None = None
        deltas = self._client.take()
        try:
            for delta in deltas if len(deltas) == 1 else joined(deltas):
                if isinstance(delta.ending, Failed):
                    failed = failed or delta.ending
                opens = delta.index not in self._opened
                self._opened.add(delta.index)
                events += self._shape.events(delta, opens=opens)
            if failed is not None and self._unsent_start is not None:
                self._over.set_result(failed)
            elif failed is not None:
                self._write(events + self._shape.failure_event(failed), b"")
            else:
                self._write(events, None if self._client.unended else self._shape.last_events())
        except Exception as error:  # noqa: BLE001  others' news is handled with this: whoever awaits the end raises it
            self._over.set_exception(error)

    def _write(self, events: bytes, last: bytes | None) -> None:
        """Send these events as far as the client takes them. last: what follows if they are the last."""
        messages: list[tuple[Send, Message]] = []
        if events:
            if self._unsent_start is not None:
                messages.append((self._send_start, self._unsent_start))
                self._unsent_start = None
            messages.append((self._send_event, {"type": "http.response.body", "body": events, "more_body": True}))
        if last is not None:
            messages.append((self._send_event, {"type": "http.response.body", "body": last}))
        if messages:  # news may bring nothing to send, such as thoughts that the client wants omitted
            self._silent_since_s = self._loop.time()
        self._waiting = begin(self._send_each(messages))
        if self._waiting is not None:
            self._waiting.add_done_callback(partial(self._sent, is_last=last is not None))
        elif last is not None:
            self._over.set_result(None)

    @staticmethod
    async def _send_each(messages: Sequence[tuple[Send, Message]]) -> None:
        for send, message in messages:
            await send(message)

    def _sent(self, sending: asyncio.Task[None], is_last: bool) -> None:
        """A slow client has taken all: take what has arrived meanwhile. The server drops a client
        that stops reading."""
        self._waiting = None
        if sending.cancelled():
            return  # the client has left
        error = sending.exception()
        self._silent_since_s = self._loop.time()
        if self._over.done():
            return
        if error is not None:
            self._over.set_exception(error)
        elif is_last:
            self._over.set_result(None)
        else:
            self._take()


def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run it as far as it goes without waiting. Returns None when it is done, otherwise the task
    that does the rest.

    The task is like any other, also where it is cancelled before its first step: `work` meets
    CancelledError where it waits, and finishes its clean-up. As `work` begins outside of that task,
    it may not use `asyncio.timeout` around its first wait.
    """
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    rest = _rest(work, waits_for)
    rest.send(None)
    return asyncio.get_running_loop().create_task(rest)


@coroutine
def _rest(work: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """The rest of what has begun. waits_for: what `work` yielded last.

    Its caller runs it to the first yield before a task gets it: what is thrown into a generator that
    has not begun never reaches the code in it, so `work` would be dropped half done.
    """
    try:
        try:
            yield
        except asyncio.CancelledError as error:
            # Before the task's first step. A task first cancels what it waits for.
            if waits_for is None or not waits_for.cancel():
                waits_for = work.throw(error)
        while True:
            try:
                yield waits_for
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:  # noqa: BLE001  for `work`, which may handle it
                waits_for = work.throw(error)
            else:
                waits_for = work.send(None)
    except StopIteration:
        return


def json_response(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
