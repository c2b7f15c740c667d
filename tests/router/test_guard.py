"""Which key each URL needs, whose requests a key may end, and that keys share the router; also over TLS on a real socket.

Web pages may do nothing without a key, unless --allow-origin names where they are from; then as much as anybody.
"""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.routing import APIRoute

from common.access import Access, KeyRing
from common.config import RouterConfig
from router.api.description import REFUSED, UNSERVED
from tests.router.calls import ALICE, BOB, CONTROL, JSON, assert_error, bearer, certified, chat, completion, keyed, until
from tests.router.fakes import MODEL, EchoFleet, Site, listening

pytestmark = pytest.mark.anyio
NO_KEY_NEEDED = {"/health", "/health_generate", "/ready", "/ping", "/metrics"}
CONTROLLED = (
    *("/cluster", "/flush_cache", "/reset_prefix_cache", "/pause", "/continue_", "/resume", "/is_", "/sleep", "/wake_up"),
    *("/pd_role_switch", "/update_weight", "/weight_", "/get_weight", "/init_weights_", "/destroy_weights_"),
    *("/load_lora", "/unload_lora", "/v1/load_lora", "/v1/unload_lora"),
)


async def test_every_route_refuses_a_request_without_its_key_and_lets_no_other_key_in() -> None:
    async with Site(access=keyed()) as site, site.client() as client:
        for route in [route for route in site.app.routes if isinstance(route, APIRoute)]:
            right = CONTROL if route.path.startswith(CONTROLLED) else ALICE
            wrong = {CONTROL: ALICE, ALICE: "d" * 20 if route.path.startswith("/requests/") else CONTROL}[right]
            for method in route.methods or ():
                answers = [await client.request(method, route.path, headers=headers) for headers in ({}, bearer(wrong))]
                assert all((answer.status_code == 401) is (route.path not in NO_KEY_NEEDED) for answer in answers), route.path
                if route.path != "/cluster/events":  # it has no end: see test_live.py
                    assert (await client.request(method, route.path, headers=bearer(right))).status_code != 401
        for path in REFUSED:
            answers = [await client.post(path, headers=bearer(key)) for key in (ALICE, CONTROL)]
            assert [answer.status_code for answer in answers] == [401, 400], path
        for path in UNSERVED:
            answers = [await client.post(path, headers=bearer(key)) for key in (ALICE, CONTROL)]
            assert [answer.status_code for answer in answers] == [400, 401], path
        assert (await client.get("/no/such/url")).status_code == 401


async def test_a_refusal_looks_as_at_openai_and_shows_no_key() -> None:
    async with Site(access=keyed()) as site, site.client() as client:
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
    async with Site(access=keyed()) as site, site.client() as client:
        for key in (ALICE, BOB):
            asked = await client.post("/v1/completions", json=completion(), headers=bearer(key) | {"X-Request-Id": "mine"})
            assert asked.status_code == 200
        for key, choices in ((ALICE, 1), (BOB, 1), (CONTROL, 2)):
            assert len((await client.get("/requests/mine", headers=bearer(key))).json()["choices"]) == choices
        await client.post("/v1/completions", json=completion(), headers=bearer(ALICE) | {"X-Request-Id": "hers"})
        assert_error(await client.get("/requests/cmpl-hers", headers=bearer(BOB)), 404, "invalid_request_error", None)
        assert (await client.get("/requests/cmpl-hers", headers=bearer(ALICE))).status_code == 200


async def test_a_key_that_floods_leaves_room_for_another_which_cannot_end_its_requests() -> None:
    async with Site(EchoFleet(stall_at=1), RouterConfig(max_requests=10), access=keyed()) as site, site.client() as client:
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
    tls, ring = certified(tmp_path).tls, keyed()
    trusting = ssl.create_default_context(cafile=str(tmp_path / "cert"))
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


PAGE = "http://page.example:3000"
EFFECTS = (
    ("POST", "/v1/chat/completions", chat()),
    ("POST", "/generate", {"text": "hello"}),
    ("POST", "/tokenize", {"prompt": "hello"}),
    ("POST", "/abort_request", {"abort_all": True}),
    ("POST", "/flush_cache", None),
    ("GET", "/flush_cache", None),
    ("POST", "/reset_prefix_cache", None),
    ("POST", "/cluster/d0/drain", None),
    ("POST", "/cluster/d0/role", {"role": "both"}),
    ("POST", "/pd_role_switch", {"new_role": "both", "instance": "d0"}),
    ("POST", "/cluster/trace", None),
    ("DELETE", "/cluster/trace", None),
)


@pytest.fixture(scope="module")
async def untouched() -> AsyncIterator[Site]:
    """A router from which nobody may get anything."""
    async with Site() as made:
        yield made


def unchanged(site: Site) -> bool:
    """Whether the fleet was asked for nothing."""
    return not any(
        type(message).__name__ in ("Generate", "Drain", "TakeRole", "FlushCache", "Trace") for _, message in site.fleet.sent
    )


async def ask(client: httpx.AsyncClient, method: str, path: str, body: Any, headers: Mapping[str, str]) -> httpx.Response:
    content = None if body is None else json.dumps(body).encode()
    return await client.request(method, path, headers=headers, content=content)


@pytest.mark.parametrize(("method", "path", "body"), EFFECTS)
@pytest.mark.parametrize(
    ("of_browser", "status", "says"),
    [
        ({"origin": PAGE} | JSON, 403, "--allow-origin"),
        ({"origin": "http://127.0.0.1:9"} | JSON, 403, "--allow-origin"),
        ({"origin": "null"} | JSON, 403, "--api-keys"),
        ({"sec-fetch-site": "cross-site"} | JSON, 403, "--api-keys"),
        ({"sec-fetch-site": "same-site"} | JSON, 403, "--api-keys"),
        ({"content-type": "text/plain;charset=UTF-8"}, 415, "Content-Type: application/json"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "Content-Type: application/json"),
        ({"content-type": "multipart/form-data; boundary=x"}, 415, "Content-Type: application/json"),
        ({"host": "evil.example"} | JSON, 403, "127.0.0.1"),
        ({"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"} | JSON, 403, "127.0.0.1"),
    ],
    ids=str,
)
async def test_a_web_page_changes_nothing(
    untouched: Site, method: str, path: str, body: Any, of_browser: dict[str, str], status: int, says: str
) -> None:
    async with untouched.client() as client:
        refused = await ask(client, method, path, body, of_browser)
        assert says in assert_error(refused, status, "invalid_request_error", None)
        assert unchanged(untouched)


async def test_a_body_needs_a_type_and_what_has_none_needs_no_type() -> None:
    async with Site() as site, site.client() as client:
        untyped = await client.post("/v1/completions", content=b"{}")
        assert_error(untyped, 415, "invalid_request_error", None)
        assert (await client.post("/cluster/trace")).status_code == 202
        typed = {"content-type": "application/json; charset=utf-8"}
        assert (await ask(client, "POST", "/v1/completions", completion(), typed)).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "app.localhost:80"])
async def test_the_page_that_the_router_itself_serves_may_do_everything(host: str) -> None:
    own = {"host": host, "origin": f"http://{host.lower()}", "sec-fetch-site": "same-origin"} | JSON
    async with Site() as site, site.client() as client:
        assert (await ask(client, "POST", "/v1/completions", completion(), own)).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0"]
)
@pytest.mark.parametrize("path", ["/cluster", "/v1/models", "/metrics", "/docs", "/openapi.json", "/requests/x"])
async def test_a_name_that_leads_here_does_not_make_answers_readable(untouched: Site, path: str, host: str) -> None:
    """DNS rebinding: the page's own name is made to lead to this host, so the browser takes the answers for the page's own."""
    async with untouched.client() as client:
        message = assert_error(await client.get(path, headers={"host": host}), 403, "invalid_request_error", None)
        assert re.search(r"localhost.*127\.0\.0\.1.*--host", message)


async def test_load_balancers_ask_for_health_by_any_name() -> None:
    async with Site() as site, site.client() as client:
        for path in ("/health", "/ready"):
            assert (await client.get(path, headers={"host": "10.1.2.3:8000"})).status_code == 200
        refused = await client.post("/health", headers={"host": "10.1.2.3:8000", "origin": PAGE})
        assert_error(refused, 403, "invalid_request_error", None)


async def test_with_host_its_name_is_served_and_where_every_address_is_served_every_name() -> None:
    config = RouterConfig(host="127.0.0.5", dead_after_s=60.0)
    for bound, host, status in (
        ("127.0.0.5", "127.0.0.5:80", 200),
        ("127.0.0.5", "a.example", 403),
        ("0.0.0.0", "a.example", 200),
    ):
        async with Site(config=RouterConfig(host=bound, dead_after_s=config.dead_after_s)) as site, site.client() as client:
            assert (await client.get("/v1/models", headers={"host": host})).status_code == status
            crossing = {"host": host, "origin": PAGE} | JSON
            assert (await ask(client, "POST", "/v1/completions", completion(), crossing)).status_code == 403


async def test_with_keys_the_key_is_the_guard() -> None:
    headers = {"host": "llm.example", "origin": PAGE, "sec-fetch-site": "cross-site", "content-type": "text/plain"}
    async with Site(access=keyed()) as site, site.client() as client:
        assert_error(await ask(client, "POST", "/v1/completions", completion(), headers), 401, "invalid_request_error", None)
        answer = await ask(client, "POST", "/v1/completions", completion(), headers | bearer(ALICE))
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
        assert (await client.get("/health", headers=headers)).status_code == 200


async def test_a_control_key_alone_guards_what_it_opens_and_the_rest_is_guarded_without() -> None:
    async with Site(access=Access(None, KeyRing({CONTROL: "control"}))) as site, site.client() as client:
        crossing = {"origin": PAGE} | JSON
        assert_error(await ask(client, "POST", "/v1/completions", completion(), crossing), 403, "invalid_request_error", None)
        assert_error(await ask(client, "POST", "/flush_cache", None, crossing), 401, "invalid_request_error", None)
        assert (await ask(client, "POST", "/flush_cache", None, crossing | bearer(CONTROL))).status_code == 200


PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_page_from_an_allowed_origin_asks_beforehand_without_a_key_and_then_chats(has_keys: bool) -> None:
    sends = {"origin": PAGE, "sec-fetch-site": "cross-site"} | JSON | (bearer(ALICE) if has_keys else {})
    async with Site(access=keyed(PAGE) if has_keys else Access(origins=(PAGE,))) as site, site.client() as client:
        before = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, PAGE)
        assert before.headers["access-control-allow-headers"] == "authorization, content-type"
        answers = [await ask(client, "POST", "/v1/chat/completions", body, sends) for body in (chat(), chat(stream=True))]
        for answer in answers:
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
            assert {"x-request-id", "retry-after"} <= set(answer.headers["access-control-expose-headers"].split(", "))
        deleted = await client.options("/cluster/trace", headers=PREFLIGHT | {"access-control-request-method": "DELETE"})
        assert deleted.status_code == 200
        other = await client.options("/v1/chat/completions", headers=PREFLIGHT | {"origin": "http://evil.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        crossing = sends | {"origin": "http://evil.example"}
        refused = await ask(client, "POST", "/v1/chat/completions", chat(), crossing)
        assert refused.status_code == (200 if has_keys else 403) and "access-control-allow-origin" not in refused.headers


async def test_a_page_can_read_why_it_was_refused() -> None:
    config = RouterConfig(max_requests=1, dead_after_s=60.0)
    async with Site(EchoFleet(stall_at=1), config, access=keyed("*")) as site, site.client() as client:
        sends = {"origin": PAGE} | JSON
        with_key = sends | bearer(ALICE)
        for body, headers, status in (
            (completion(), sends, 401),
            (completion(n=99), with_key, 400),
            (completion(), with_key, 429),
        ):
            with site.core.requests.places.held("", 1):
                refused = await ask(client, "POST", "/v1/completions", body, headers)
            assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (status, "*")
            assert "error" in refused.json()


async def test_a_router_behind_the_name_of_an_allowed_origin_has_that_name_too() -> None:
    behind = {"host": "chat.example", "origin": "https://chat.example", "sec-fetch-site": "same-origin"} | JSON
    async with Site(access=Access(origins=("https://chat.example",))) as site, site.client() as client:
        assert (await ask(client, "POST", "/v1/completions", completion(), behind)).status_code == 200
