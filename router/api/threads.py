"""What the clients share by turns, threads above all: each owner of work gets its turn, however much work others have waiting.

Owns the turns. Does not know what the work is.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

R = TypeVar("R")


class Turns:
    """So much work at a time. An owner is a key's name; "" is everybody without a key. Owners with waiting work take turns, one
    piece of work each; the work of one owner is done in order. Work that waits is held by its caller only, so nothing is left of
    it when the caller is cancelled."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By owner, the owner whose turn is next first."""

    async def take(self, owner: str) -> None:
        """Wait for this owner's turn. Whoever has taken one must `pass_on`."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came, and nobody is left to take it
                self.pass_on()
            raise

    @asynccontextmanager
    async def held(self, owner: str) -> AsyncIterator[None]:
        """Do a piece of work when it is this owner's turn."""
        await self.take(owner)
        try:
            yield
        finally:
            self.pass_on()

    def pass_on(self) -> None:
        """A piece of work is done."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class SharedThreads:
    """So many threads, which owners of work take in turns."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)
        self._turns = Turns(count)

    async def run(self, owner: str, work: Callable[[], R]) -> R:
        """What the work returns. Raises what it raises."""
        await self._turns.take(owner)
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        working.add_done_callback(self._done)
        return await asyncio.shield(working)  # a thread cannot be stopped, and it is not free before it is done

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, working: "asyncio.Future[R]") -> None:
        if not working.cancelled():
            working.exception()  # nobody else asks for it when the caller is cancelled, and asyncio would log it as lost
        self._turns.pass_on()
