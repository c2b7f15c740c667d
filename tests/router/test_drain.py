"""A router that is told to stop refuses new requests, and lets the open ones end. Pauses by HTTP: what they wait for, and what
waits for their end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

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


# --- pauses ---------------------------------------------------------------------------------------------------------------------


def generate(rid: str, tokens: int) -> dict[str, Any]:
    return {"text": "hello", "rid": rid, "sampling_params": {"max_new_tokens": tokens}}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/pause?mode=wait", None, {"status": "paused"}),
        ("/pause?wait_for_inflight_requests=True", None, {"status": "paused"}),
        ("/sleep?level=0&mode=wait", None, {"status": "sleeping", "level": 0}),
        ("/pause_generation", {"mode": "finish"}, {"status": "ok", "message": "Generation paused successfully."}),
    ],
)
async def test_a_pause_that_lets_requests_end_answers_when_the_last_has_and_new_ones_wait(
    path: str, body: Any, says: Any
) -> None:
    async with Site(EchoFleet(stall_at=2)) as site, site.client() as client:
        running = asyncio.create_task(client.post("/generate", json=generate("running", 5)))
        await until(lambda: site.core.requests.has_attempts)
        pause = asyncio.create_task(client.post(path, json=body))
        await until(lambda: site.core.fleet.weights.is_paused)
        late = asyncio.create_task(client.post("/generate", json=generate("late", 1)))
        await until(lambda: len(site.core.requests) == 2)
        assert (await client.get("/v1/loads?include=core")).json() == {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 1}]}
        assert not pause.done()
        await client.post("/abort_request", json={"rid": "running"})
        assert (await pause).json() == says and (await running).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert not late.done() and not site.core.requests.has_attempts
        assert (await client.post("/resume")).json() == {"status": "resumed"}
        assert (await late).json()["text"] == "h"
        assert (await client.get("/is_paused")).json() == {"is_paused": False}


async def test_a_pause_that_is_ended_before_the_requests_have_says_so() -> None:
    async with Site(EchoFleet(stall_at=2)) as site, site.client() as client:
        running = asyncio.create_task(client.post("/generate", json=generate("running", 5)))
        await until(lambda: site.core.requests.has_attempts)
        pause = asyncio.create_task(client.post("/pause?mode=wait"))
        await until(lambda: site.core.fleet.weights.is_paused)
        await client.post("/continue_generation", json={})
        assert "ended before" in assert_error(await pause, 503, "unavailable_error", None)
        await client.post("/abort_request", json={"abort_all": True})
        assert (await running).status_code == 200


@pytest.mark.parametrize("query", ["mode=stop", "clear_cache=maybe", "wait_for_inflight_requests=2", "level=1"])
async def test_a_parameter_of_a_pause_that_means_nothing_is_refused_by_name(
    client: httpx.AsyncClient, site: Site, query: str
) -> None:
    refused = await client.post(f"/pause?{query}")
    assert refused.status_code == 400 and query.partition("=")[0] in refused.json()["error"]["message"]
    assert not site.core.fleet.weights.is_paused


async def test_requests_end_by_a_list_of_ids_and_all_without_one() -> None:
    async with Site(EchoFleet(stall_at=2)) as site, site.client() as client:
        asked = [asyncio.create_task(client.post("/generate", json=generate(rid, 5))) for rid in "abc"]
        await until(lambda: len(site.core.requests) == 3)
        some = await client.post("/abort_requests", json={"request_ids": ["a", "c", "unknown"]})
        assert some.json() == {"status": "aborted", "aborted": 2} and len(site.core.requests) == 1
        assert (await client.post("/abort_requests", json={})).json() == {"status": "aborted", "aborted": 1}
        assert {(await one).json()["meta_info"]["finish_reason"]["type"] for one in asked} == {"abort"}
