"""What a large body may hold, and that bodies which wait to be read are few and are not read for nobody."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from common.errors import BadRequest, Overloaded
from router.api import intake
from router.api.bodies import LARGE_BODY_BYTES, MAX_PARTS, MAX_PROMPTS
from router.api.chat import read_chat
from router.api.completions import read_completion
from tests.router.calls import assert_error, chat, completion, post, sent_to_fleet, until
from tests.router.fakes import Site
from tests.router.test_disconnects import RawClient

pytestmark = pytest.mark.anyio
CONTEXT = 1000
LARGE = "x" * LARGE_BODY_BYTES


def body(fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "field",
    [
        {"user": [[]] * MAX_PARTS},
        {"user": [{}] * MAX_PARTS},
        {"user": [""] * MAX_PARTS},
        {"metadata": {str(key): "" for key in range(MAX_PARTS // 3)}},
        {"messages": [{"role": "user", "content": ""}] * (MAX_PARTS // 7 + 1)},
        {"user": [1] * (MAX_PARTS + MAX_PROMPTS * CONTEXT + 2)},
    ],
)
async def test_a_body_that_holds_too_much_is_refused_before_it_is_read(field: dict[str, Any]) -> None:
    for read, fields in ((read_chat, chat()), (read_completion, completion())):
        with pytest.raises(BadRequest, match=r"^the body has more than \d+ \D+: send fewer$"):
            read(body(fields | field), CONTEXT)


@pytest.mark.parametrize("text", ['{"a": [", :', "[" * 50, "\\", '\\"', 'x\\\\"'])
async def test_a_text_may_hold_any_number_of_brackets_quotes_and_commas(text: str) -> None:
    long = text * (2 * MAX_PARTS // len(text) + 1)
    assert read_completion(body(completion(long)), CONTEXT).prompts == (long,)


async def test_many_long_prompts_of_token_ids_are_read_one_by_one_as_they_are() -> None:
    prompts = [list(range(100_000 + number)) for number in range(3)]
    sent = body(completion(prompts, user="me"))
    assert list(read_completion(sent, 2**17).prompts) == [tuple(prompt) for prompt in prompts]
    with pytest.raises(BadRequest) as raised:
        read_completion(body(completion([*prompts, [1, "x"]])), 2**17)
    assert raised.value.field == "prompt[3][1]"
    with pytest.raises(BadRequest, match="holds 65 prompts"):
        read_completion(body(completion([[1] * 5000] * (MAX_PROMPTS + 1))), 2**17)
    with pytest.raises(BadRequest, match="must be a JSON object"):
        read_completion(body(prompts[0]), 2**17)


@pytest.mark.parametrize(
    "fields",
    [
        completion() | {LARGE: 1},
        completion(metadata={"a": [LARGE]}),
        completion(model=LARGE),
        completion(stream_options={LARGE: 1}, stream=True),
        chat() | {"messages": [{"role": LARGE, "content": ""}]},
        chat(chat_template_kwargs={LARGE: 1}),
        chat(tools=[{"type": "function", "function": {"name": LARGE}}]),
        chat(tool_choice={"type": "function", "function": {"name": LARGE}}),
    ],
)
async def test_an_error_repeats_little_of_what_the_client_sent(fields: dict[str, Any]) -> None:
    async with Site(max_body_bytes=10 * len(LARGE)) as site:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        response = await post(site, path, fields)
        assert response.status_code in (400, 404)
        assert len(response.content) < 1000, response.text[:2000]


@contextmanager
def busy(site: Site) -> Iterator[list["asyncio.Task[bytes]"]]:
    """Both threads that read large bodies are kept from it."""
    free = threading.Event()

    def read(body: bytes, context_tokens: int) -> bytes:
        free.wait()
        return body

    reading = [
        asyncio.create_task(site.intake.read_large(read, LARGE.encode() + b"x")) for _ in range(intake.LONG_ENCODING_THREADS)
    ]
    try:
        yield reading
    finally:
        free.set()


async def test_beyond_a_limit_large_bodies_do_not_wait_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING_BODY_BYTES", 3 * len(LARGE))
    async with Site(max_body_bytes=10 * len(LARGE)) as site:
        with busy(site) as reading:
            await asyncio.sleep(0)
            refused = await post(site, "/v1/completions", completion(user=LARGE))
            assert_error(refused, Overloaded.status, Overloaded.kind, None)
            assert (await post(site, "/v1/completions", completion())).status_code == 200, "small ones do not wait there"
        await asyncio.gather(*reading)
        assert (await post(site, "/v1/completions", completion(user=LARGE))).status_code == 200


async def test_a_large_body_is_not_read_for_a_client_that_has_left() -> None:
    async with Site(max_body_bytes=10 * len(LARGE)) as site:
        with busy(site) as reading:
            client = RawClient(site, user=LARGE)
            await until(lambda: len(site.intake._waiting_body_bytes) > (len(reading) + 1) * len(LARGE))
            client.leave()
            await client.gone()
        await asyncio.gather(*reading)
        assert (len(site.intake._waiting_body_bytes), client.sent[0]["status"], sent_to_fleet(site)) == (0, 499, [])
