"""The other routers behind this one's HTTP port: they are asked for a request that this one does not know.

Owns who they are and how they are asked. Routers share no state, and the kernel deals out connections, so a client that asks
for a request may meet a router that never had it. The question carries the client's own key. Who is asked obeys its own rules,
and asks nobody else. It is bounded: so many threads, which keys take in turns, and so long.
"""

import asyncio
import ssl
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from common.processes.router_client import RequestFailed, RouterClient
from router.api.guard import REQUESTS_PREFIX
from router.api.threads import SharedThreads

ASK_S = 2.0
"""For all of them together: they are on this host, and look in a dictionary."""
WAIT_S = 5.0
"""With the wait for a thread."""
_AT_ONCE = 2


class OtherRouters:
    """urls: of their own HTTP ports. tls: whom to trust there."""

    def __init__(self) -> None:
        self._urls: Sequence[str] = ()
        self._tls: ssl.SSLContext | None = None
        self._threads = SharedThreads(_AT_ONCE, "other routers")

    def meet(self, urls: Sequence[str], tls: ssl.SSLContext | None = None) -> None:
        """From now on these are the others."""
        self._urls, self._tls = tuple(urls), tls

    async def find(self, name: str, owner: str, key: bytes | None) -> Any:
        """The timeline, as JSON, that one of them has for a client with this key; None when none has it, or not in time."""
        if not self._urls:
            return None
        try:
            async with asyncio.timeout(WAIT_S):
                return await self._threads.run(owner, partial(self._ask, name, (key or b"").decode("latin-1")))
        except TimeoutError:
            return None

    def close(self) -> None:
        self._threads.close()

    def _ask(self, name: str, key: str) -> Any:
        until = time.monotonic() + ASK_S
        path = f"{REQUESTS_PREFIX}/{quote(name, safe='')}?here=true"
        for url in self._urls:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            try:
                return RouterClient(url, key, left_s, self._tls).get(path)
            except RequestFailed:  # it does not know it, or is not there
                continue
        return None
