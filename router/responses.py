"""The answer to one client: what arrives for it, and the two ways to send it, as a stream of events or as one JSON body.

Owns the watch over the client's connection, the promise that a dispatched request is cancelled however its answer ends, and the
order of what is sent. Nothing is sent before the first news of the request, so an early failure still gets its proper status; a
later one becomes an error event. A stream that is silent for long begins without news, with a comment line, because proxies close
idle connections. Does not know the fleet.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.messages import Ending, Failed
from router.gateway import Gateway
from router.intake import Accepted
from router.openai_answers import AnswerShape, OpenAIFinish, WholeChoice
from router.openai_errors import detail_of_failure, error_json, response_to_failure
from router.outbox import ChoiceDelta, Outbox

SEND_TIMEOUT_S = 60.0
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it (https://html.spec.whatwg.org/multipage/server-sent-events.html#authoring-notes)."""


class ClientGone(Exception):
    """The client closed its connection: nobody reads the answer."""


class Answer:
    """What arrives for one client's request. Whoever dispatches it sees to it that it is closed."""

    def __init__(self, gateway: Gateway, accepted: Accepted) -> None:
        self._gateway = gateway
        self._specs = accepted.specs
        self._news = asyncio.Event()
        self._outbox = Outbox(self._news.set)
        self._unended = 0
        """Choices that have been dispatched and have not ended."""
        self._client_gone = False

    def dispatch(self, received_s: float) -> None:
        """Raises Overloaded, Unavailable, BadRequest."""
        requests, now = self._gateway.core.requests, self._gateway.clock()
        sends = requests.submit(self._specs, self._outbox, received_s, now)
        self._unended = len(self._specs)
        self._gateway.deliver(sends)

    def close(self) -> None:
        """Cancel what is still open. Idempotent."""
        if self._unended:
            self._unended = 0
            ids = [spec.request_id for spec in self._specs]
            self._gateway.deliver(self._gateway.core.requests.cancel(ids, self._gateway.clock()))

    @property
    def ended(self) -> bool:
        """Whether every choice has ended and was read."""
        return self._unended == 0

    def nudge(self) -> None:
        """Make `read` return, though there may be no news."""
        self._news.set()

    async def read(self) -> Sequence[ChoiceDelta]:
        """The next deltas, as many as there are; none after a nudge. Call it until every choice has `ended`: each does by its
        deadline. Raises ClientGone."""
        await self._news.wait()
        self._news.clear()
        if self._client_gone:
            raise ClientGone
        deltas = self._outbox.take()
        for delta in deltas:
            self._unended -= delta.ending is not None
        return deltas

    async def watch_client(self, receive: Receive) -> None:
        """Make `read` raise ClientGone when the client leaves. receive: the ASGI channel; the body has been read from it."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        self._news.set()


class AnswerResponse(Response, ABC):
    """Sends a dispatched answer, and closes it when sending ends."""

    def __init__(self, answer: Answer, shape: AnswerShape) -> None:
        super().__init__()
        self._answer = answer
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(message)
            except TimeoutError as error:
                raise ClientGone from error

        watch = asyncio.create_task(self._answer.watch_client(receive))
        try:
            failed = await self._send(send_in_time)
        except (ClientGone, OSError):
            return  # ASGI servers raise OSError for a send to a client that has gone
        finally:
            watch.cancel()
            self._answer.close()
        if failed is not None:
            await response_to_failure(failed)(scope, receive, send)

    @abstractmethod
    async def _send(self, send: Send) -> Failed | None:
        """Send the answer; or send nothing and return why there is none. Raises ClientGone."""

    def _start(self, *headers: tuple[bytes, bytes]) -> Message:
        headers = ((b"x-request-id", self._shape.id.encode()), *headers)
        return {"type": "http.response.start", "status": 200, "headers": headers}


class WholeResponse(AnswerResponse):
    """One JSON body with every choice."""

    async def _send(self, send: Send) -> Failed | None:
        choices = [WholeChoice() for _ in range(self._shape.choices)]
        while not self._answer.ended:
            for delta in await self._answer.read():
                choice = choices[delta.index]
                choice.texts.append(delta.text)
                choice.token_ids += delta.token_ids
                if delta.ending is not None:
                    outcome = _outcome(delta.ending)
                    if isinstance(outcome, Failed):
                        return outcome
                    choice.finish_reason = outcome
        body = self._shape.whole(choices)
        await send(self._start((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())))
        await send({"type": "http.response.body", "body": body})
        return None


class StreamResponse(AnswerResponse):
    """A chunk for each piece of text. Pieces that wait for a slow client are sent as one. keep_alive_s: a comment is sent after
    so long a silence; 0: never."""

    def __init__(self, answer: Answer, shape: AnswerShape, keep_alive_s: float) -> None:
        super().__init__(answer, shape)
        self._keep_alive_s = keep_alive_s

    async def _send(self, send: Send) -> Failed | None:
        silence = Silence(self._keep_alive_s, self._answer.nudge)
        try:
            return await self._send_events(send, silence)
        finally:
            silence.close()

    async def _send_events(self, send: Send, silence: "Silence") -> Failed | None:
        shape, seen = self._shape, set[int]()
        tokens, started = 0, False
        while not self._answer.ended:
            deltas = await self._answer.read()
            events: list[bytes] = [] if deltas else [KEEP_ALIVE]
            failed: Failed | None = None
            for delta in deltas if len(deltas) == 1 else joined(deltas):
                outcome = None if delta.ending is None else _outcome(delta.ending)
                finish = None if isinstance(outcome, Failed) else outcome
                failed = failed or (outcome if isinstance(outcome, Failed) else None)
                tokens += len(delta.token_ids)
                events += shape.events(delta.index, delta.text, delta.token_ids, finish, opens=delta.index not in seen)
                seen.add(delta.index)
            if failed is not None and not started:
                return failed
            if failed is not None:
                events.append(b"data: " + error_json(detail_of_failure(failed)) + b"\n\n")
            if events and not started:
                no_buffers = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
                await send(self._start((b"content-type", b"text/event-stream; charset=utf-8"), *no_buffers))
                started = True
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                silence.broken()
            if failed is not None:
                await send({"type": "http.response.body", "body": b""})
                return None
        usage = shape.usage_event(tokens) if shape.include_usage else b""
        await send({"type": "http.response.body", "body": usage + b"data: [DONE]\n\n"})
        return None


class Silence:
    """How long a stream has sent nothing. alarm: called after every `limit_s` of silence, until `close`; never when that is 0.

    The timer is not moved when something is sent: it looks when it rings, so that a piece of text costs no timer.
    """

    def __init__(self, limit_s: float, alarm: Callable[[], object]) -> None:
        self._limit_s = limit_s
        self._alarm = alarm
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._timer = self._loop.call_later(limit_s, self._ring) if limit_s else None

    def broken(self) -> None:
        """Something was sent."""
        self._since_s = self._loop.time()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        left_s = self._since_s + self._limit_s - self._loop.time()
        if left_s <= 0:
            self._alarm()
        self._timer = self._loop.call_later(left_s if left_s > 0 else self._limit_s, self._ring)


def joined(deltas: Sequence[ChoiceDelta]) -> Sequence[ChoiceDelta]:
    """One delta for each choice that has news."""
    pieces: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        pieces.setdefault(delta.index, []).append(delta)
    return [
        ChoiceDelta(
            index, "".join(piece.text for piece in of), tuple(chain.from_iterable(piece.token_ids for piece in of)), of[-1].ending
        )
        for index, of in pieces.items()
    ]


def _outcome(ending: Ending) -> OpenAIFinish | Failed:
    """The ending as clients see it. A cancel by an instance is a failure: the client did not ask for it."""
    if isinstance(ending, Failed):
        return ending
    if ending.reason == "cancelled":
        return Failed(message="the request was cancelled by the instance that served it")
    return "length" if ending.reason == "length" else "stop"
