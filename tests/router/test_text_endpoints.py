"""/tokenize, /detokenize and /v1/embeddings: what clients get, and what is refused; and the API through the `openai` client."""

import asyncio

import openai
import pytest

from common.text.embedding import EmbeddingMode
from router.api.fields import MAX_CHOICES_PER_PROMPT
from tests.router.calls import assert_error, openai_client, post, sent_to_fleet, until
from tests.router.fakes import CONTEXT, MODEL, EchoFleet, Site

pytestmark = pytest.mark.anyio


async def test_a_text_becomes_ids_and_ids_become_the_text(site: Site) -> None:
    tokenized = (await post(site, "/tokenize", {"prompt": "ab", "return_token_strs": True})).json()
    assert tokenized == {"count": 2, "max_model_len": CONTEXT, "tokens": [97, 98], "token_strs": ["a", "b"]}
    long = "x" * 5_000
    ids = (await post(site, "/tokenize", {"prompt": long, "model": MODEL})).json()["tokens"]
    assert (await post(site, "/detokenize", {"tokens": ids})).json() == {"prompt": long, "text": long}


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


SCALED, RAW = EmbeddingMode("mean", normalize=True, size=2), EmbeddingMode("last", normalize=False, size=2)


async def test_each_prompt_gets_its_embedding_scaled_as_the_model_wants() -> None:
    async with Site(embedding=SCALED) as site:
        answer = (await post(site, "/v1/embeddings", {"model": MODEL, "input": ["abcd", "x"]})).json()
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert answer["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    assert answer["data"][1]["embedding"] == pytest.approx([3 / 10**0.5, 1 / 10**0.5])
    assert (answer["object"], answer["model"]) == ("list", MODEL)
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert {(sent.sampling.pooling, sent.sampling.max_new_tokens, sent.decodes) for sent in sent_to_fleet(site)} == {
        ("mean", 1, ())
    }
    async with Site(embedding=RAW) as site:
        for prompt in ([97, 98], [[97, 98]], "ab"):
            answer = (await post(site, "/v1/embeddings", {"input": prompt, "dimensions": 2})).json()
            assert [one["embedding"] for one in answer["data"]] == [[3.0, 2.0]]
        assert (await post(site, "/v1/completions", {"model": MODEL, "prompt": "ab"})).status_code == 200


async def test_the_openai_client_reads_both_encodings() -> None:
    async with openai_client(embedding=RAW) as client:
        as_base64 = await client.embeddings.create(model=MODEL, input="ab", user="u")
        as_floats = await client.embeddings.create(model=MODEL, input="ab", encoding_format="float")
    assert as_base64.data[0].embedding == as_floats.data[0].embedding == [3.0, 2.0]


async def test_a_model_that_is_not_served_for_embeddings_is_refused_with_the_flag_that_serves_it(site: Site) -> None:
    message = assert_error(await post(site, "/v1/embeddings", {"input": "x"}), 400, "invalid_request_error", "model")
    assert "--pooling" in message and MODEL in message


async def test_an_aborted_request_fails_because_it_has_no_embedding() -> None:
    async with Site(EchoFleet(stall_at=0), embedding=RAW) as site:
        asked = asyncio.create_task(post(site, "/v1/embeddings", {"input": "x"}))
        await until(lambda: sent_to_fleet(site))
        assert (await post(site, "/abort_request", {"rid": "", "abort_all": True})).json() == {"aborted": 1}
        assert "aborted" in assert_error(await asked, 409, "aborted", None)


async def test_errors_are_the_clients_own_classes_and_name_the_field() -> None:
    async with openai_client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="x", n=MAX_CHOICES_PER_PROMPT + 1)
        assert bad.value.param == "n"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="gpt-9", prompt="x")
        assert unknown.value.code == "model_not_found"


async def test_a_failure_in_mid_stream_is_raised_by_the_client_after_the_text_before_it() -> None:
    async with openai_client(EchoFleet(fail_at=2)) as client:
        stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=5, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="the step failed"):
            async for chunk in stream:
                text += chunk.choices[0].text
    assert text == "he"
