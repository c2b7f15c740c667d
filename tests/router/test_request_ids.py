"""Every response carries its request's id: the client's own, or one that is made."""

import asyncio

import httpx
import pytest

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


async def test_without_an_id_one_is_made_for_each_request(site: Site) -> None:
    async with site.client() as client:
        made = [(await client.get(path)).headers["x-request-id"] for path in ("/health", "/health", "/nothing")]
    assert len(set(made)) == 3 and all(made)


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "\x7f", "\u00e9"])
async def test_an_id_that_is_none_is_refused(site: Site, request_id: str) -> None:
    async with site.client() as client:
        response = await client.post(
            "/v1/completions", json=completion(), headers=[(b"x-request-id", request_id.encode("latin-1"))]
        )
    assert "visible ASCII" in assert_error(response, 400, "invalid_request_error", "X-Request-Id")
    assert response.headers["x-request-id"] != request_id
    assert (await post(site, "x" * 128)).status_code == 200


async def test_requests_of_the_same_id_are_served_apart(site: Site) -> None:
    answers = await asyncio.gather(*(post(site, "same") for _ in range(3)))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["hello"] * 3
    assert len({message.key.request_id for message in sent_to_fleet(site)}) == 3
