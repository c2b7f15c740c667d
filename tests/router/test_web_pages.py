"""What web pages may do: nothing without a key, unless --allow-origin names where they are from; then as much as anybody."""

import json
import re
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from common.access import Access, KeyRing
from common.config import RouterConfig
from tests.router.calls import JSON, assert_error, chat, completion
from tests.router.fakes import EchoFleet, Site

pytestmark = pytest.mark.anyio
KEY, CONTROL = "a" * 20, "c" * 20
PAGE = "http://page.example:3000"
EFFECTS = (
    ("POST", "/v1/chat/completions", chat()),
    ("POST", "/generate", {"text": "hello"}),
    ("POST", "/tokenize", {"prompt": "hello"}),
    ("POST", "/abort_request", {"abort_all": True}),
    ("POST", "/flush_cache", None),
    ("POST", "/cluster/d0/drain", None),
    ("POST", "/cluster/trace", None),
    ("DELETE", "/cluster/trace", None),
)


def unchanged(site: Site) -> bool:
    """Whether the fleet was asked for nothing."""
    return not any(type(message).__name__ in ("Generate", "Drain", "FlushCache", "Trace") for _, message in site.fleet.sent)


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
    method: str, path: str, body: Any, of_browser: dict[str, str], status: int, says: str
) -> None:
    async with Site() as site, site.client() as client:
        refused = await ask(client, method, path, body, of_browser)
        assert says in assert_error(refused, status, "invalid_request_error", None)
        assert unchanged(site)


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
async def test_a_name_that_leads_here_does_not_make_answers_readable(path: str, host: str) -> None:
    """DNS rebinding: the page's own name is made to lead to this host, so the browser takes the answers for the page's own."""
    async with Site() as site, site.client() as client:
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
    async with Site(access=Access(KeyRing({KEY: "alice"}), KeyRing({CONTROL: "control"}))) as site, site.client() as client:
        assert_error(await ask(client, "POST", "/v1/completions", completion(), headers), 401, "invalid_request_error", None)
        keyed = headers | {"authorization": f"Bearer {KEY}"}
        answer = await ask(client, "POST", "/v1/completions", completion(), keyed)
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
        assert (await client.get("/health", headers=headers)).status_code == 200


async def test_a_control_key_alone_guards_what_it_opens_and_the_rest_is_guarded_without() -> None:
    async with Site(access=Access(None, KeyRing({CONTROL: "control"}))) as site, site.client() as client:
        crossing = {"origin": PAGE} | JSON
        assert_error(await ask(client, "POST", "/v1/completions", completion(), crossing), 403, "invalid_request_error", None)
        assert_error(await ask(client, "POST", "/flush_cache", None, crossing), 401, "invalid_request_error", None)
        keyed = crossing | {"authorization": f"Bearer {CONTROL}"}
        assert (await ask(client, "POST", "/flush_cache", None, keyed)).status_code == 200


PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_page_from_an_allowed_origin_asks_beforehand_without_a_key_and_then_chats(keyed: bool) -> None:
    api, control = (KeyRing({KEY: "alice"}), KeyRing({CONTROL: "control"})) if keyed else (None, None)
    sends = {"origin": PAGE, "sec-fetch-site": "cross-site"} | JSON | ({"authorization": f"Bearer {KEY}"} if keyed else {})
    async with Site(access=Access(api, control, origins=(PAGE,))) as site, site.client() as client:
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
        assert refused.status_code == (200 if keyed else 403) and "access-control-allow-origin" not in refused.headers


async def test_a_page_can_read_why_it_was_refused() -> None:
    access = Access(KeyRing({KEY: "alice"}), KeyRing({CONTROL: "control"}), origins=("*",))
    async with (
        Site(EchoFleet(stall_at=1), RouterConfig(max_requests=1, dead_after_s=60.0), access=access) as site,
        site.client() as client,
    ):
        sends = {"origin": PAGE} | JSON
        keyed = sends | {"authorization": f"Bearer {KEY}"}
        two = completion(["a", "b"])
        for body, headers, status in ((completion(), sends, 401), (completion(n=99), keyed, 400), (two, keyed, 429)):
            refused = await ask(client, "POST", "/v1/completions", body, headers)
            assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (status, "*")
            assert "error" in refused.json()


async def test_a_router_behind_the_name_of_an_allowed_origin_has_that_name_too() -> None:
    behind = {"host": "chat.example", "origin": "https://chat.example", "sec-fetch-site": "same-origin"} | JSON
    async with Site(access=Access(origins=("https://chat.example",))) as site, site.client() as client:
        assert (await ask(client, "POST", "/v1/completions", completion(), behind)).status_code == 200
