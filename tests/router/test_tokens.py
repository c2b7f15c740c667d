"""/tokenize and /detokenize."""

from typing import Any

import pytest

from tests.router.calls import assert_error, post
from tests.router.fakes import CONTEXT, MODEL, Site

pytestmark = pytest.mark.anyio


async def test_a_text_becomes_ids_and_ids_become_the_text(site: Site) -> None:
    tokenized = (await post(site, "/tokenize", {"prompt": "ab", "return_token_strs": True})).json()
    assert tokenized == {"count": 2, "max_model_len": CONTEXT, "tokens": [97, 98], "token_strs": ["a", "b"]}
    long = "x" * 5_000
    ids = (await post(site, "/tokenize", {"prompt": long, "model": MODEL})).json()["tokens"]
    assert (await post(site, "/detokenize", {"tokens": ids})).json() == {"prompt": long}


async def test_a_conversation_is_tokenized_as_a_chat_would_be(site: Site) -> None:
    messages = [{"role": "user", "content": "ab", "refusal": None}]
    assert (await post(site, "/tokenize", {"messages": messages})).json()["tokens"] == [97, 98]


async def test_tools_are_tokenized_where_the_template_shows_them_also_if_the_format_of_calls_is_not_known() -> None:
    asked = {"messages": [{"role": "user", "content": "ab"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    async with Site(chat_template="tools") as site:
        assert (await post(site, "/tokenize", asked)).json()["count"] == 2
        response = await post(site, "/v1/chat/completions", asked | {"model": MODEL})
        assert "--tool-parser" in assert_error(response, 400, "invalid_request_error", "tools")
    async with Site() as site:
        assert "--chat-template" in assert_error(await post(site, "/tokenize", asked), 400, "invalid_request_error", "tools")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "colour": 1}, 400, "colour"),
        ("/tokenize", {"prompt": "x" * (2**20 + 1)}, 400, "prompt"),
        ("/detokenize", {"tokens": [1000]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ],
)
async def test_a_bad_request_is_refused_by_field(path: str, body: dict[str, Any], status: int, param: str) -> None:
    async with Site(max_body_bytes=2**22) as site:
        assert_error(await post(site, path, body), status, "invalid_request_error", param)
