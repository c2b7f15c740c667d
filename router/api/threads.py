"""What the clients share by turns, threads above all: each owner of work gets its turn, however much work others have waiting.

Owns the turns. Does not know what the work is.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from common.instance.waiting_line import has_place

R = TypeVar("R")


class Turns:
    """So much work at a time. An owner is a key's name; "" is everybody without a key. Owners with waiting work take turns, one
    piece of work each; the work of one owner is done in order. However slow the work of one key is, of six turns or more some
    stay free for others (`has_place`). Work that waits is held by its caller only, so nothing is left of it when the caller is
    cancelled."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By owner, the owner whose turn is next first."""

    async def take(self, owner: str) -> None:
        """Wait for this owner's turn. Whoever has taken one must `pass_on`."""
        if self._may(owner):
            self._give(owner)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except BaseException:  # GeneratorExit too: a coroutine may be closed where it waits
            if not turn.cancel() and not turn.cancelled():
                # The turn came, and nobody is left to take it.
                self.pass_on(owner)
            raise

    @asynccontextmanager
    async def held(self, owner: str) -> AsyncIterator[None]:
        """Do a piece of work when it is this owner's turn."""
        await self.take(owner)
        try:
            yield
        finally:
            self.pass_on(owner)

    def pass_on(self, owner: str) -> None:
        """A piece of this owner's work is done."""
        self._free += 1
        self._held[owner] -= 1
        while (following := next(filter(self._may, self._waiting), None)) is not None:
            turns = self._waiting.pop(following)
            turn = turns.popleft()
            if turns:
                self._waiting[following] = turns
            if not turn.done():
                self._give(following)
                turn.set_result(None)

    def _may(self, owner: str) -> bool:
        return self._free > 0 and (not owner or has_place(self._free, self._held[owner]))

    def _give(self, owner: str) -> None:
        self._free -= 1
        self._held[owner] += 1


class SharedThreads:
    """So many threads, which owners of work take in turns."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)
        self._turns = Turns(count)

    async def run(self, owner: str, work: Callable[[], R]) -> R:
        """What the work returns. Raises what it raises."""
        await self._turns.take(owner)
        try:
            working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError:  # the threads are closed: those who wait are told so too
            self._turns.pass_on(owner)
            raise
        working.add_done_callback(partial(self._done, owner))
        return await asyncio.shield(working)  # a thread cannot be stopped, and it is not free before it is done

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, owner: str, working: "asyncio.Future[R]") -> None:
        if not working.cancelled():
            working.exception()  # nobody else asks for it when the caller is cancelled, and asyncio would log it as lost
        self._turns.pass_on(owner)
