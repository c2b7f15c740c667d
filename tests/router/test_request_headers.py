"""Headers of requests and answers: the id that every response carries, and the session of a request."""

import asyncio

import httpx
import pytest

from common.config import RouterConfig
from common.errors import ConfigError
from tests.router.calls import assert_error, completion, sent_to_fleet
from tests.router.fakes import Site

pytestmark = pytest.mark.anyio


async def post(site: Site, request_id: str, path: str = "/v1/completions") -> httpx.Response:
    async with site.client() as client:
        return await client.post(path, json=completion(), headers={"x-request-id": request_id})


async def test_a_clients_id_comes_back_in_the_header_and_in_the_answers_id(site: Site) -> None:
    answer = await post(site, "mine-1")
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine-1", "cmpl-mine-1")
    for path, status in (("/v1/nothing", 404), ("/v1/chat/completions", 400), ("/health", 405)):
        refused = await post(site, "mine-2", path)
        assert (refused.status_code, refused.headers["x-request-id"]) == (status, "mine-2")


async def test_without_an_id_one_is_made_for_each_request(client: httpx.AsyncClient, site: Site) -> None:
    made = [(await client.get(path)).headers["x-request-id"] for path in ("/health", "/health", "/nothing")]
    assert len(set(made)) == 3 and all(made)


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "\x7f", "\u00e9"])
async def test_an_id_that_is_none_is_refused(client: httpx.AsyncClient, site: Site, request_id: str) -> None:
    response = await client.post("/v1/completions", json=completion(), headers=[(b"x-request-id", request_id.encode("latin-1"))])
    assert "visible ASCII" in assert_error(response, 400, "invalid_request_error", "X-Request-Id")
    assert response.headers["x-request-id"] != request_id
    assert (await post(site, "x" * 128)).status_code == 200


async def test_requests_of_the_same_id_are_served_apart(site: Site) -> None:
    answers = await asyncio.gather(*(post(site, "same") for _ in range(3)))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["hello"] * 3
    assert len({message.key.request_id for message in sent_to_fleet(site)}) == 3


async def asked(config: RouterConfig, path: str = "/v1/completions", **headers: str) -> tuple[int, set[str]]:
    """The status, and the sessions of the requests that were placed."""
    sessions = set[str]()
    async with Site(config=config) as site:
        choose = site.core.requests.placer.choose
        site.core.requests.placer.choose = lambda demand: sessions.add(demand.session) or choose(demand)  # type: ignore[method-assign, func-returns-value]
        async with site.client() as client:
            body = {"text": "hello"} if path == "/generate" else completion(n=2)
            response = await client.post(path, json=body, headers=headers)
    if response.status_code == 400:
        assert "visible ASCII" in assert_error(response, 400, "invalid_request_error", next(iter(headers)))
    return response.status_code, sessions


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_the_header_names_the_session_of_every_choice(path: str) -> None:
    config = RouterConfig(decode_policy="session", dead_after_s=60.0)
    assert await asked(config, path, **{"x-session-id": "mine"}) == (200, {"mine"})
    assert await asked(config, path) == (200, {""})


async def test_the_flag_says_which_header_and_a_value_that_is_no_id_is_refused() -> None:
    config = RouterConfig(prefill_policy="session", session_header="X-Chat", dead_after_s=60.0)
    assert await asked(config, **{"X-Chat": "mine", "X-Session-Id": "other"}) == (200, {"mine"})
    assert await asked(config, **{"X-Chat": "two words"}) == (400, set())


async def test_without_a_policy_that_asks_for_it_the_header_means_nothing() -> None:
    assert await asked(RouterConfig(dead_after_s=60.0), **{"X-Session-Id": "two words"}) == (200, {""})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"session_header": "X-Chat"}, "--session-header"),
        ({"session_header": "a b", "decode_policy": "session"}, "--session-header"),
        ({"dispatch": "colocated", "prefill_policy": "round_robin"}, "--prefill-policy"),
        ({"decode_policy": "best"}, "--decode-policy"),
    ],
)
async def test_flags_that_mean_nothing_are_refused(flags: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RouterConfig(**flags)  # type: ignore[arg-type]
