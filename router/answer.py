"""An open answer: what arrives for one client, for as long as the client is there.

Owns the watch over the client's connection, and the promise that a request is cancelled when its answer is left, however it is
left. Does not know the shapes of answers.
"""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from router.gateway import Gateway
from router.intake import Accepted
from router.outbox import ChoiceDelta, Outbox


class ClientGone(Exception):
    """The client closed its connection: nobody reads the answer."""


class Answer:
    """Use as `async with Answer(...) as answer`: entering dispatches the request, leaving cancels what is still open.

    receive: the ASGI channel of the HTTP request, its body having been read. Entering raises Overloaded, Unavailable, BadRequest.
    """

    def __init__(self, gateway: Gateway, accepted: Accepted, received_at: float, receive: Receive) -> None:
        self._gateway = gateway
        self._accepted = accepted
        self._received_at = received_at
        self._receive = receive
        self._news = asyncio.Event()
        self._outbox = Outbox(self._news.set)
        self._open = len(accepted.specs)
        self._client_gone = False
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._gateway.submit(self._accepted.specs, self._outbox, self._received_at)
        self._watch = asyncio.create_task(self._watch_client())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._open:
            self._gateway.cancel(spec.request_id for spec in self._accepted.specs)

    async def read(self) -> list[ChoiceDelta]:
        """The next deltas, as many as there are; empty when every choice has ended. The core ends each by its deadline, so this
        never waits for ever. Raises ClientGone."""
        deltas: list[ChoiceDelta] = []
        while self._open and not deltas:
            await self._news.wait()
            self._news.clear()
            if self._client_gone:
                raise ClientGone
            deltas = self._outbox.take()
        self._open -= sum(delta.ending is not None for delta in deltas)
        return deltas

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        self._news.set()
