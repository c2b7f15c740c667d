"""Connections that wait for their clients: for a request, because none has arrived or the last was answered, or for its body.

Owns their number, the bytes that are held of bodies, and the time that the head of a request may take, whether its sender sends
nothing, single bytes or empty lines. Counts each connection that the server drops. Connections whose request is here are bounded
elsewhere. Does not know HTTP.

    connected ──► head awaited ──(HEAD_S)──► dropped
                   │  ▲ first byte
                   ▼  │
              in progress ──► answered: rests ──(the server's own keep-alive)──► closed
                   │             └─ more rest than may: the one that rests for longest is dropped
                   └─ body awaited: of too many, the oldest of the key with the most is dropped;
                      of too many bytes, those that are held for longest
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.metrics import Dropped

HEAD_S = 10.0
"""How long the head of a request may take, from the connection or from its first byte."""
SEND_TIMEOUT_S = 60.0
"""How long a client may take to read what fills its send buffer."""

MAX_BODY_BYTES = 256 * 2**20
"""What may be held of bodies that have not arrived whole."""


class Connection(Protocol):
    @property
    def owner(self) -> str:
        """Name of the API key of the request whose body it awaits; "" before that is known."""

    def drop(self) -> None:
        """Close it at once, whatever has not been sent."""


@dataclass(slots=True)
class _Body:
    """A body that has not arrived whole. since_s: when its first part came."""

    since_s: float
    bytes: int


class WaitingConnections:
    """Those of one server. most: so many may wait for a request, and so many for a body. dropped: called for each that is
    dropped. most_body_bytes: of bodies that have not arrived whole. Use it on one loop's thread."""

    def __init__(self, most: int, dropped: Callable[[Dropped], object], most_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._most = most
        self._most_body_bytes = most_body_bytes
        self._bodies: dict[Connection, _Body] = {}
        """The oldest is first."""
        self._body_bytes = 0
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
        self.expects_no_body(connection)
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

    def expects_body(self, connection: Connection, body_bytes: int) -> None:
        """So many bytes of a request's body are here, and the rest must come."""
        now = asyncio.get_running_loop().time()
        body = self._bodies.setdefault(connection, _Body(now, 0))
        self._body_bytes += body_bytes - body.bytes
        body.bytes = body_bytes
        if len(self._bodies) > self._most:
            of_keys = Counter(each.owner for each in self._bodies)
            oldest = max(self._bodies, key=lambda each: of_keys[each.owner])  # the first of several
            self.drop(oldest, Dropped.MANY_BODIES)
        while self._body_bytes > self._most_body_bytes:
            costliest = max(self._bodies.items(), key=lambda item: item[1].bytes * (now - item[1].since_s))
            self.drop(costliest[0], Dropped.LARGE_BODIES)

    def expects_no_body(self, connection: Connection) -> None:
        """The body is here, or nobody wants it. Idempotent."""
        if (body := self._bodies.pop(connection, None)) is not None:
            self._body_bytes -= body.bytes

    def leaves(self, connection: Connection) -> None:
        """A request is in progress on it, or it is closed. Idempotent."""
        self.expects_no_body(connection)
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
