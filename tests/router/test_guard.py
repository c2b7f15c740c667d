"""Which key each URL needs, whose requests a key may end, and that keys share the router; also over TLS on a real socket."""

import asyncio
import ssl
import subprocess
from pathlib import Path

import httpx
import openai
import pytest
from fastapi.routing import APIRoute

from common.access import Access, KeyRing, read_access
from common.config import AccessConfig, RouterConfig
from tests.router.calls import assert_error, chat, completion, until
from tests.router.fakes import MODEL, EchoFleet, Site, listening

pytestmark = pytest.mark.anyio
ALICE, BOB, CONTROL = "a" * 20, "b" * 20, "c" * 20


def access() -> Access:
    return Access(KeyRing({ALICE: "alice", BOB: "bob"}), KeyRing({CONTROL: "control"}))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


NO_KEY_NEEDED = {"/health", "/ready", "/metrics"}


async def test_every_route_refuses_a_request_without_its_key_and_lets_no_other_key_in() -> None:
    async with Site(access=access()) as site, site.client() as client:
        for route in [route for route in site.app.routes if isinstance(route, APIRoute)]:
            right = CONTROL if route.path.startswith(("/cluster", "/flush_cache")) else ALICE
            wrong = {CONTROL: ALICE, ALICE: "d" * 20 if route.path.startswith("/requests/") else CONTROL}[right]
            for method in route.methods or ():
                answers = [await client.request(method, route.path, headers=headers) for headers in ({}, bearer(wrong))]
                assert all((answer.status_code == 401) is (route.path not in NO_KEY_NEEDED) for answer in answers), route.path
                assert (await client.request(method, route.path, headers=bearer(right))).status_code != 401
        assert (await client.get("/no/such/url")).status_code == 401


async def test_a_refusal_looks_as_at_openai_and_shows_no_key() -> None:
    async with Site(access=access()) as site, site.client() as client:
        wrong = await client.post("/v1/completions", json=completion(), headers=bearer(ALICE[:-1] + "x"))
        assert_error(wrong, 401, "invalid_request_error", None)
        assert wrong.json()["error"]["code"] == "invalid_api_key" and wrong.headers["www-authenticate"] == "Bearer"
        assert (await client.post("/v1/completions", json=completion(), headers={"x-api-key": ALICE})).status_code == 200
        pages = [wrong.text, (await client.get("/metrics")).text, (await client.get("/cluster", headers=bearer(CONTROL))).text]
        assert not any(key in page for key in (ALICE, ALICE[:-1], BOB, CONTROL) for page in pages)
        assert 'tandem_key_tokens_total{key="alice",of="answer"} 5.0' in pages[1]
        page = (await client.get("/openapi.json")).json()
        assert page["paths"]["/cluster"]["get"]["security"][0].keys() <= page["components"]["securitySchemes"].keys()


async def test_a_key_sees_the_timelines_of_its_own_requests_and_the_control_key_those_of_all() -> None:
    async with Site(access=access()) as site, site.client() as client:
        for key in (ALICE, BOB):
            asked = await client.post("/v1/completions", json=completion(), headers=bearer(key) | {"X-Request-Id": "mine"})
            assert asked.status_code == 200
        for key, choices in ((ALICE, 1), (BOB, 1), (CONTROL, 2)):
            assert len((await client.get("/requests/mine", headers=bearer(key))).json()["choices"]) == choices
        await client.post("/v1/completions", json=completion(), headers=bearer(ALICE) | {"X-Request-Id": "hers"})
        assert_error(await client.get("/requests/cmpl-hers", headers=bearer(BOB)), 404, "invalid_request_error", None)
        assert (await client.get("/requests/cmpl-hers", headers=bearer(ALICE))).status_code == 200


async def test_a_key_that_floods_leaves_room_for_another_which_cannot_end_its_requests() -> None:
    async with Site(EchoFleet(stall_at=1), RouterConfig(max_requests=10), access=access()) as site, site.client() as client:
        flood = [asyncio.create_task(client.post("/v1/completions", json=completion(), headers=bearer(ALICE))) for _ in range(30)]
        await until(lambda: sum(task.done() for task in flood) == 30 - len(site.core.requests) > 0)
        assert 0 < len(site.core.requests) < 10
        assert {task.result().status_code for task in flood if task.done()} == {429}
        of_bob = asyncio.create_task(client.post("/v1/completions", json=completion(), headers=bearer(BOB)))
        await until(lambda: any(record.spec.owner == "bob" for record in site.core.requests.records()))
        aborted = await client.post("/abort_request", json={"abort_all": True}, headers=bearer(BOB))
        assert aborted.json() == {"aborted": 1} and (await of_bob).status_code == 200
        early = await client.post("/v1/completions", json=completion(priority=-1), headers=bearer(BOB))
        assert_error(early, 400, "invalid_request_error", "priority")
        await client.post("/abort_request", json={"abort_all": True}, headers=bearer(ALICE))
        await asyncio.gather(*flood)


async def test_the_openai_client_streams_over_tls_and_the_head_of_a_request_is_bounded_there_too(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert"), str(tmp_path / "key")
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*new, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    tls = read_access(AccessConfig(tls_cert=cert, tls_key=key)).tls
    trusting = ssl.create_default_context(cafile=cert)
    ring = access()
    async with (
        Site(access=Access(ring.api_keys, ring.control_key, tls)) as site,
        listening(site) as port,
        httpx.AsyncClient(verify=trusting) as http,
        openai.DefaultAsyncHttpxClient(verify=trusting) as carrier,
        openai.AsyncOpenAI(base_url=f"https://127.0.0.1:{port}/v1", api_key=ALICE, http_client=carrier, max_retries=0) as client,
    ):
        stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=5, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(**chat())
        long = await http.get(f"https://127.0.0.1:{port}/health", headers={"x-long": "x" * 70_000})
        assert long.status_code == 431
