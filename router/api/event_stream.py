"""One answer as a stream of server-sent events: what arrives is passed on, and a slow client is waited for.

Owns the order of what is sent, and the silence that a comment line breaks. Does not know the fleet, and nothing of a request but
its deltas.

    news ─► take what is unread ─► encode ─► send ── done at once ──► nothing waits
             ▲                                └─ the client is slow ─► a task waits, then takes
             └─────────────────────────────────────────────────────── what has arrived meanwhile

No task waits for news: waking one costs more than everything else that a token costs here. The first news of a turn of mail is
sent while it is handled. More of it in the same turn is sent together, when the turn is over: mail that had to wait costs less.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Generator, Sequence
from types import coroutine
from typing import Any, Protocol

from starlette.types import Message, Send

from common.messages import Failed
from router.api.answers import AnswerShape
from router.api.errors import detail_of_failure, error_json
from router.outbox import ChoiceDelta, joined

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
