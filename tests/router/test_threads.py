"""Owners of work take turns on the threads that they share."""

import asyncio
import gc
import threading
from contextlib import closing
from functools import partial

import pytest

from router.api.threads import SharedThreads

pytestmark = pytest.mark.anyio


async def test_an_owner_waits_for_one_piece_of_work_of_each_other_owner() -> None:
    free, done = threading.Event(), list[str]()
    with closing(SharedThreads(1, "test")) as threads:

        async def work(owner: str, name: str) -> None:
            def job() -> None:
                free.wait(60)
                done.append(name)

            await threads.run(owner, job)

        waiting = [asyncio.create_task(work("alice", f"a{number}")) for number in range(4)]
        await asyncio.sleep(0)
        waiting += [asyncio.create_task(work("bob", "b0")), asyncio.create_task(work("carol", "c0"))]
        waiting.append(asyncio.create_task(work("bob", "b1")))
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*waiting)
    assert done == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


async def test_who_is_cancelled_gives_the_turn_to_the_next_one_but_no_thread_that_works() -> None:
    free, working, done = threading.Event(), threading.Semaphore(0), list[str]()
    with closing(SharedThreads(1, "test")) as threads:

        def work(name: str) -> None:
            working.release()
            free.wait(60)
            done.append(name)

        first, second, third = (asyncio.create_task(threads.run("", partial(work, name))) for name in "abc")
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        await asyncio.wait((first, second))
        assert working.acquire() and not working.acquire(blocking=False), "the first one still has the thread"
        free.set()
        await third
    assert done == ["a", "c"]


async def test_an_error_of_work_whose_caller_has_left_is_not_logged_as_lost() -> None:
    logged, free = list[str](), threading.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
    with closing(SharedThreads(1, "test")) as threads:

        def work() -> None:
            free.wait(60)
            raise ValueError

        left = asyncio.create_task(threads.run("", work))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait((left,))
        del left
        free.set()
        await threads.run("", int)
        gc.collect()
    assert not logged
