"""However a piece of work ends, what it has taken is free again: turns, places, bytes and threads.

Each kind of work is run to each of its awaits, and is ended there in each way that asyncio knows.
It begins as a task, or by hand as the sends of a stream do (`begin`).
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from types import coroutine
from typing import Any

import msgspec
import pytest

from common.config import RouterConfig
from router.api.sending import begin
from router.api.store import Store
from router.api.threads import SharedThreads, Turns
from tests.router.calls import until
from tests.router.fakes import MODEL, EchoFleet, Site

pytestmark = pytest.mark.anyio
Work = Callable[[], Coroutine[Any, Any, object]]
Occupied = Callable[[], AbstractAsyncContextManager[None]]
WAYS = ("closed", "failed", "cancelled", "cancelled as it comes", "timed out")


class _Ending:
    """Ends a piece of work in this way, at its await of this number."""

    def __init__(self, way: str, number: int) -> None:
        self._way, self._number = way, number
        self.is_reached = False
        self._task: asyncio.Task[None] | None = None
        self._deadline = asyncio.timeout(None)

    def start(self, work: Coroutine[Any, Any, object], by_hand: bool) -> None:
        running = self._drive(work)
        if not by_hand:
            self._task = asyncio.create_task(self._within_deadline(running))
            return
        with suppress(OSError):  # thrown in before anything waited
            self._task = begin(running)

    async def wait(self) -> None:
        """Until the work has ended."""
        if self._task is None:
            return
        await asyncio.wait({self._task})
        if self._task.cancelled():
            assert self._way.startswith("cancelled")
        elif (error := self._task.exception()) is not None:
            assert isinstance(error, OSError if self._way == "failed" else TimeoutError)

    async def _within_deadline(self, running: Coroutine[Any, Any, None]) -> None:
        async with self._deadline:
            await running

    async def _drive(self, work: Coroutine[Any, Any, object]) -> None:
        await self._step_by_step(work)

    @coroutine
    def _step_by_step(self, work: Coroutine[Any, Any, object]) -> Generator[Any, Any, None]:
        error: BaseException | None = None
        for number in count():
            try:
                waits_for = work.send(None) if error is None else work.throw(error)
                if number == self._number:
                    self.is_reached = True
                    if self._way == "closed":
                        work.close()
                        return
                    if self._way == "failed":
                        work.throw(OSError("thrown in"))
                    self._end_soon(waits_for)
            except StopIteration:
                return
            try:
                yield waits_for
                error = None
            except BaseException as thrown:  # noqa: BLE001  for the work
                error = thrown

    def _end_soon(self, waits_for: Any) -> None:
        loop = asyncio.get_running_loop()
        if self._way == "timed out":
            loop.call_soon(self._deadline.reschedule, loop.time())
        elif self._way == "cancelled" or waits_for is None:
            loop.call_soon(self._cancel)
        else:
            waits_for.add_done_callback(lambda _: self._cancel())

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()


async def end_everywhere(occupied: Occupied, work: Work) -> None:
    """Begin the work in both ways, and end it in every way at each of its awaits.

    occupied: others have what the work needs. They let go when this is left, which then checks that
    everything is home.
    """
    for by_hand in (False, True):
        for way in WAYS[: -1 if by_hand else None]:  # nothing that is begun by hand has a deadline: see `begin`
            for number in count():
                ending = _Ending(way, number)
                async with asyncio.timeout(20):
                    async with occupied():
                        ending.start(work(), by_hand)
                        await asyncio.sleep(0)
                    await ending.wait()
                if not ending.is_reached:
                    break
            assert number > 0, "the work never waited"


async def test_what_began_by_hand_finishes_its_clean_up_when_it_is_cancelled_before_its_task_begins() -> None:
    comes = asyncio.get_running_loop().create_future()
    done: list[str] = []

    async def work() -> None:
        try:
            await comes
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            done.append("cleaned up")
            raise

    task = begin(work())
    assert task is not None
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and comes.cancelled() and done == ["cleaned up"]


def on_busy(threads: SharedThreads, is_home: Callable[[], bool] = lambda: True) -> Occupied:
    """Others have all threads, so that whoever comes waits for a turn first."""
    turns = threads._turns
    most = turns._free

    @asynccontextmanager
    async def occupied() -> AsyncIterator[None]:
        may_end = threading.Event()
        others = [asyncio.create_task(threads.run("", may_end.wait)) for _ in range(most)]
        await until(lambda: turns._free == 0)
        yield
        may_end.set()
        await asyncio.gather(*others)
        assert await threads.run("owner", lambda: 7) == 7, "the thread takes work"
        await until(lambda: turns._free == most and not turns._held.total() and is_home())

    return occupied


async def test_a_turn_is_free_again_however_whoever_waits_for_it_or_has_it_ends() -> None:
    turns = Turns(1)

    @asynccontextmanager
    async def occupied() -> AsyncIterator[None]:
        await turns.take("other")
        yield
        turns.pass_on("other")
        async with turns.held("owner"):
            pass
        await until(lambda: turns._free == 1 and not turns._held.total())

    async def work() -> None:
        await turns.take("owner")
        try:
            await asyncio.sleep(0)
        finally:
            turns.pass_on("owner")

    await end_everywhere(occupied, work)


async def test_a_thread_is_free_again_however_whoever_waits_for_it_ends() -> None:
    threads = SharedThreads(1, "shared")
    await end_everywhere(on_busy(threads), lambda: threads.run("owner", lambda: None))
    threads.close()
    for _ in range(2):  # the second one would wait for the turn of the first
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(threads.run("owner", lambda: None), 20)


async def test_the_store_is_free_again_however_its_caller_ends(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), 2**20, 60.0, "router-a")
    await end_everywhere(on_busy(store._threads, lambda: not len(store._places)), lambda: store.do(store.sweep, "owner"))
    await store.close(20.0)


async def test_the_bytes_of_a_large_body_are_free_again_however_its_reading_ends(site: Site) -> None:
    intake = site.intake
    occupied = on_busy(intake._long_threads, lambda: not len(intake._waiting_body_bytes))
    await end_everywhere(occupied, lambda: intake.read_large(lambda body, _: body, b"x" * 1000, "owner"))


@asynccontextmanager
async def _storing(folder: Path) -> AsyncIterator[Site]:
    async with Site(EchoFleet(context_tokens=2**20), RouterConfig(store=str(folder / "store"), dead_after_s=60.0)) as site:
        yield site


async def _keep_busy(store: Store) -> None:
    while True:
        await store.do(lambda: time.sleep(0.0005))


STREAMED = {"input": "hello", "max_output_tokens": 2, "stream": True}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "a stored stream": ("/v1/responses", STREAMED),
    "a stored response": ("/v1/responses", {**STREAMED, "stream": False}),
    "a background stream": ("/v1/responses", {**STREAMED, "background": True}),
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 300_000}], "max_tokens": 2}),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_client_may_leave_at_any_moment_of_its_request(tmp_path: Path, call: str) -> None:
    """After more and more turns of the loop, until its answer is whole; the store is always busy."""
    path, fields = CALLS[call]
    body = msgspec.json.encode({"model": MODEL, **fields})
    async with _storing(tmp_path) as site:
        site.api.admission.max_body_bytes = None
        store = site.api._store
        assert store is not None
        turns = store._threads._turns
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        others = asyncio.create_task(_keep_busy(store))
        leaves_after, is_over = 0, False
        while not is_over:
            left = asyncio.Event()
            unread: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive(left: asyncio.Event = left, unread: list[dict[str, Any]] = unread) -> dict[str, Any]:
                if unread:
                    return unread.pop()
                await left.wait()
                return {"type": "http.disconnect"}

            sent: list[dict[str, Any]] = []

            async def send(message: Any, sent: list[dict[str, Any]] = sent) -> None:
                sent.append(message)

            answering = asyncio.create_task(site.app(dict(scope), receive, send))
            for _ in range(leaves_after):
                await asyncio.sleep(0)
            is_over = answering.done()
            left.set()
            async with asyncio.timeout(20):
                await answering
                await until(lambda: not len(site.api.admission.places) and not len(site.core.requests.places))
                await store.do(store.sweep, "alice")
            assert turns._free + turns._held.total() == 1
            assert len(store._places) == 0 and len(site.intake._waiting_body_bytes) == 0
            leaves_after += 1 + leaves_after // 4
        others.cancel()
        assert sent[0]["status"] == 200, sent


_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
STREAMS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "chat": ("/v1/chat/completions", _CHAT, "data: [DONE]", 'data: {"error":'),
    "completion": ("/v1/completions", {"prompt": "hello", "max_tokens": 5}, "data: [DONE]", 'data: {"error":'),
    "message": ("/v1/messages", _CHAT, "event: message_stop", "event: error"),
    "response": ("/v1/responses", {**STREAMED, "store": False}, "event: response.incomplete", 'data: {"error":'),
    "stored response": ("/v1/responses", STREAMED, "event: response.incomplete", 'data: {"error":'),
    "background response": (
        "/v1/responses",
        {**STREAMED, "background": True},
        "event: response.incomplete",
        "event: response.failed",
    ),
    "generate": (
        "/generate",
        {"text": "hello", "sampling_params": {"max_new_tokens": 5}},
        "data: [DONE]",
        'data: {"error":',
    ),
}
"""The streams of each API: the path, a body, and how the last event begins, with and without an answer."""


@pytest.mark.parametrize("end", ["well", "with a failure", "with the router"])
@pytest.mark.parametrize("stream", STREAMS)
async def test_every_stream_ends_with_the_last_event_of_its_api(tmp_path: Path, stream: str, end: str) -> None:
    path, body, if_well, if_not = STREAMS[stream]
    fleet = {"well": EchoFleet(), "with a failure": EchoFleet(fail_at=1), "with the router": EchoFleet(stall_at=1)}[end]
    async with Site(fleet, RouterConfig(store=str(tmp_path / "store"), dead_after_s=60.0)) as site, site.client() as client:
        named = {} if path == "/generate" else {"model": MODEL}
        reading = asyncio.create_task(client.post(path, json={**named, **body, "stream": True}))
        if end == "with the router":
            await until(lambda: any(record.token_ids for record in site.core.requests.records()))
            told = asyncio.Event()
            told.set()
            await site.gateway.drain(600.0, told, told)
        response = await asyncio.wait_for(reading, 20)
        assert response.status_code == 200
        last = response.text.strip().split("\n\n")[-1]
        assert last.startswith(if_well if end == "well" else if_not)
