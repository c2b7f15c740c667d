"""Connections that wait: those on which no HTTP request is in progress, because it has not arrived or was answered.

Owns their number and the time that the head of a request may take, whether its sender sends nothing, single bytes or empty lines.
Counts each connection that the server drops. Connections with a request in progress are bounded elsewhere. Does not know HTTP.

    connected ──► head awaited ──(HEAD_S)──► dropped
                   │  ▲ first byte
                   ▼  │
              in progress ──► answered: rests ──(the server's own keep-alive)──► closed
                                 └─ more wait than may: the one that waits for longest is dropped
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from router.metrics import Dropped

HEAD_S = 10.0
"""How long the head of a request may take, from the connection or from its first byte."""
SEND_TIMEOUT_S = 60.0
"""How long a client may take to read what fills its send buffer."""


class Connection(Protocol):
    def drop(self) -> None:
        """Close it at once, whatever has not been sent."""


class WaitingConnections:
    """Those of one server. most: so many may wait. dropped: called for each that is dropped. Use it on one loop's thread."""

    def __init__(self, most: int, dropped: Callable[[Dropped], object]) -> None:
        self._most = most
        self._dropped = dropped
        self._waiting: dict[Connection, None] = {}
        """The one that waits for longest is first."""
        self._heads: dict[Connection, float] = {}
        """By when each must have sent a head, the earliest first: all get the same time."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def rests(self, connection: Connection) -> None:
        """No request is in progress on it, and none has begun to arrive."""
        self._waiting[connection] = None
        if len(self._waiting) > self._most:
            self.drop(next(iter(self._waiting)), Dropped.TOO_MANY)

    def expects_head(self, connection: Connection) -> None:
        """A request begins to arrive on it, or must do so now. Repeating this gives no more time."""
        if connection in self._waiting and connection not in self._heads:
            loop = asyncio.get_running_loop()
            self._heads[connection] = loop.time() + HEAD_S
            if self._timer is None:
                self._timer = loop.call_later(HEAD_S, self._ring)

    def leaves(self, connection: Connection) -> None:
        """A request is in progress on it, or it is closed. Idempotent."""
        self._waiting.pop(connection, None)
        self._heads.pop(connection, None)

    def drop(self, connection: Connection, why: Dropped) -> None:
        """Close it at once, whether it waits or not."""
        self.count(connection, why)
        connection.drop()

    def count(self, connection: Connection, why: Dropped) -> None:
        """The server closes it for this reason."""
        self.leaves(connection)
        self._dropped(why)

    def _ring(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        for connection, until_s in list(self._heads.items()):
            if until_s > loop.time():
                self._timer = loop.call_at(until_s, self._ring)
                return
            self.drop(connection, Dropped.NO_HEAD)
