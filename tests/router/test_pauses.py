"""Pauses of a router by HTTP: what they wait for, and what waits for their end."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.router.calls import assert_error, until
from tests.router.fakes import EchoFleet, Site

pytestmark = pytest.mark.anyio


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
