"""A router that is told to stop refuses new requests, and lets the open ones end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from common.messages import Finished, TextBatch, TextDelta
from tests.router.calls import assert_error, chat, completion, events, get, post, until
from tests.router.fakes import EchoFleet, Site

pytestmark = pytest.mark.anyio
LONG_S = 600.0
PATHS = ("/v1/chat/completions", "/v1/completions")


@dataclass
class Draining:
    """A site whose fleet falls silent after three tokens, with one open request, and the task that drains it."""

    site: Site
    answer: "asyncio.Task[httpx.Response]"
    stop: asyncio.Event
    at_once: asyncio.Event
    over: "asyncio.Task[None]" = field(repr=False)

    def finish_the_answer(self) -> None:
        """The fleet sends what is left of `hello`."""
        (record,) = self.site.core.requests.records()
        assert record.attempt is not None
        ids = tuple(ord(char) for char in "lo")
        self.site.fleet.say(TextBatch(deltas=(TextDelta(record.attempt.key, 3, ids, "lo", Finished(reason="length")),)))


@asynccontextmanager
async def draining(timeout_s: float, *, stream: bool = True) -> AsyncIterator[Draining]:
    async with Site(EchoFleet(stall_at=3)) as site:
        stop, at_once = asyncio.Event(), asyncio.Event()
        over = asyncio.create_task(site.gateway.drain(timeout_s, stop, at_once))
        answer = asyncio.create_task(post(site, "/v1/completions", completion(stream=stream)))
        await until(lambda: any(len(record.token_ids) == 3 for record in site.core.requests.records()))
        ready = await get(site, "/ready")
        assert ready.status_code == 200 and "connection" not in ready.headers
        stop.set()
        await until(lambda: site.gateway.core.requests.is_draining)
        yield Draining(site, answer, stop, at_once, over)
        await asyncio.wait_for(over, 5)


async def test_a_draining_router_refuses_new_requests_says_so_and_lets_the_open_ones_finish() -> None:
    async with draining(LONG_S) as it:
        for path, body in zip(PATHS, (chat(), completion(stream=True)), strict=True):
            response = await post(it.site, path, body)
            assert "draining" in assert_error(response, 503, "unavailable_error", None)
            assert int(response.headers["retry-after"]) > 0 and response.headers["connection"] == "close"
        ready, health = await get(it.site, "/ready"), await get(it.site, "/health")
        assert (ready.status_code, health.status_code) == (503, 200)
        assert ready.json()["reasons"] == ["the router is draining: it takes no more requests"]
        assert not it.over.done() and not it.answer.done()
        it.finish_the_answer()
        assert "".join(chunk["choices"][0]["text"] for chunk in events(await it.answer)) == "hello"
        assert it.site.fleet.cancelled() == set()


@pytest.mark.parametrize("told", ["by the clock", "again"])
async def test_a_request_that_is_open_when_the_drain_ends_is_cancelled_and_its_client_told(told: str) -> None:
    async with draining(0.0 if told == "by the clock" else LONG_S) as it:
        if told == "again":
            it.at_once.set()
        text = (await it.answer).text
        assert '"text":"l"' in text and "[DONE]" not in text
        assert "the router was stopped before the request had ended" in text and "unavailable_error" in text
        assert len(it.site.fleet.cancelled()) == 1


async def test_an_answer_in_one_body_that_a_drain_ends_is_a_503() -> None:
    async with draining(0.0, stream=False) as it:
        response = await it.answer
        assert_error(response, 503, "unavailable_error", None)
        assert int(response.headers["retry-after"]) > 0


async def test_a_router_without_requests_drains_at_once(site: Site) -> None:
    stop = asyncio.Event()
    stop.set()
    await asyncio.wait_for(site.gateway.drain(LONG_S, stop, asyncio.Event()), 5)
