"""One answer as a stream of server-sent events: what arrives is passed on, and a slow client is waited for.

Owns the order of what is sent, and the silence that a comment line breaks. Does not know the fleet, and nothing of a request but
its deltas.

    news ─► (once per turn of the loop) take what is unread ─► encode ─► send ── done at once ──► nothing waits
                       ▲                                                  └─ the client is slow ─► a task waits, and then takes
                       └──────────────────────────────────────────────────────────────────────── what has arrived meanwhile

No task waits for news: waking one costs more than everything else that a token costs here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from itertools import chain
from types import coroutine
from typing import Any, Protocol

from starlette.types import Message, Send

from common.messages import Ending, Failed
from router.openai_answers import AnswerShape, OpenAIFinish
from router.openai_errors import detail_of_failure, error_json
from router.outbox import ChoiceDelta

SEND_TIMEOUT_S = 60.0
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it (https://html.spec.whatwg.org/multipage/server-sent-events.html#authoring-notes)."""


class ClientGone(Exception):
    """The client closed its connection, or takes nothing: nobody reads the answer."""


class Source(Protocol):
    """Where the stream's deltas come from."""

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

    def __init__(
        self,
        source: Source,
        shape: AnswerShape,
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
        self._waiting: asyncio.Task[None] | None = None
        """Waits for a slow client."""
        self._opened: set[int] = set()
        self._tokens = 0
        self._silent_since_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def keep_alive(self, limit_s: float) -> None:
        """From now on send a comment after so long a silence.

        The timer is not moved when something is sent: it looks when it rings, so that a piece of text costs no timer.
        """
        left_s = self._silent_since_s + limit_s - self._loop.time()
        if left_s <= 0:
            if self._waiting is None and not self._woken:
                self._attempt(lambda: self._pass_on(KEEP_ALIVE, None))
            left_s = limit_s
        self._timer = self._loop.call_later(left_s, self.keep_alive, limit_s)

    def wake(self) -> None:
        """There is news: it is passed on in the loop's next turn, together with all that comes in this one."""
        if not self._woken and self._waiting is None:
            self._woken = True
            self._loop.call_soon(self._attempt, self._take)

    def close(self) -> None:
        for waits in (self._timer, self._waiting):
            if waits is not None:
                waits.cancel()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _attempt(self, act: Callable[[], object]) -> None:
        """Act in a callback of the loop: whoever waits for the end of the stream learns of errors."""
        if self._over.done():
            return
        try:
            act()
        except OSError as error:  # servers raise it for a send to a client that has gone
            self._over.set_exception(error)
        except Exception as error:
            self._over.set_exception(error)
            raise

    def _take(self) -> None:
        """Encode and send what is unread."""
        self._woken = False
        deltas = self._source.take()
        shape, opened = self._shape, self._opened
        events: list[bytes] = []
        failed: Failed | None = None
        for delta in deltas if len(deltas) == 1 else joined(deltas):
            finish: OpenAIFinish | None = None
            if delta.ending is not None:
                outcome = outcome_of(delta.ending)
                if isinstance(outcome, Failed):
                    failed = failed or outcome
                else:
                    finish = outcome
            self._tokens += len(delta.token_ids)
            opens = delta.index not in opened
            events.append(shape.events(delta.index, delta.text, delta.token_ids, finish, opens=opens))
            if opens:
                opened.add(delta.index)
        self._pass_on(b"".join(events), failed)

    def _pass_on(self, events: bytes, failed: Failed | None) -> None:
        """Send these events, and what follows them if they are the last."""
        if failed is not None and self._start is not None:
            self._over.set_result(failed)
            return
        last: bytes | None = None
        if failed is not None:
            events, last = events + b"data: " + error_json(detail_of_failure(failed)) + b"\n\n", b""
        elif self._source.ended:
            last = (self._shape.usage_event(self._tokens) if self._shape.include_usage else b"") + b"data: [DONE]\n\n"
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
        """Wait for a slow client, send the rest, and take what has arrived meanwhile."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await rest
            for message in messages:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._sending(message)
        except OSError as error:  # TimeoutError is one
            if not self._over.done():
                self._over.set_exception(ClientGone() if isinstance(error, TimeoutError) else error)
            return
        except Exception as error:
            if not self._over.done():
                self._over.set_exception(error)
            raise
        self._waiting = None
        self._silent_since_s = self._loop.time()
        if self._over.done():
            return
        if is_last:
            self._over.set_result(None)
        else:
            self.wake()


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


def outcome_of(ending: Ending) -> OpenAIFinish | Failed:
    """The ending as clients see it. A cancel by an instance is a failure: the client did not ask for it."""
    if isinstance(ending, Failed):
        return ending
    if ending.reason == "cancelled":
        return Failed(message="the request was cancelled by the instance that served it")
    return "length" if ending.reason == "length" else "stop"
