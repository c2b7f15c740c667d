"""The drain of a router: it takes no more requests, and lets those that are open end.

    told to stop ── new requests are refused, open ones go on ──► none is open, or the time is over ── the rest is ended ──► over

Owns the count of open requests, from their first byte to the end of their response, and the order of a drain. Does not know
signals, sockets or processes. The pages, such as /ready, are served throughout.
"""

import asyncio
import logging

from common.errors import Unavailable
from common.messages import Failed
from router.core import RouterCore
from router.gateway import Gateway

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
