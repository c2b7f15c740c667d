"""What clients ask for besides answers: tokens, embeddings, reranking, scores, other names of embeddings, SageMaker's way in.

The fleet's embedding of a text is 3 and its length. The likelihood of a token beside the one that is sampled, which is the first
of the prompt, falls by e^-0.1 with each step between their ids.
"""

import asyncio
import math
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fastapi.routing import APIRoute
from msgspec.structs import replace
from starlette.routing import Route

from common.messages import Generate
from common.text.embedding import EmbeddingMode
from router.api.description import HINTS, UNSERVED
from router.api.fields import MAX_CHOICES_PER_PROMPT
from tests.router.calls import (
    ALICE,
    BOB,
    assert_error,
    bearer,
    chat,
    completion,
    get,
    keyed,
    openai_client,
    post,
    sent_to_fleet,
    until,
)
from tests.router.fakes import CONTEXT, MODEL, EchoFleet, Site

pytestmark = pytest.mark.anyio
EMBEDS = EmbeddingMode("mean", normalize=True, size=2)
RERANKER = 'The answer can only be "yes" or "no". {{ instruct }} {{ messages }}'


def cosine(first: str, second: str) -> float:
    one, other = np.array([3.0, len(first)]), np.array([3.0, len(second)])
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def likelihood(first: str, label: int) -> float:
    return math.exp(-abs(label - ord(first[0])) / 10)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ordered_by_their_cosine_with_the_query(path: str) -> None:
    documents = ["x" * 30, "abc", {"text": "x" * 6}, "abc"]
    async with Site(embedding=EMBEDS) as site:
        answer = (await post(site, path, {"model": MODEL, "query": "abcd", "documents": documents})).json()
        asked = {"query": "abcd", "documents": documents, "top_n": 2, "return_documents": False}
        best = (await post(site, path, asked)).json()
    texts = ["x" * 30, "abc", "x" * 6, "abc"]
    expected = sorted(range(4), key=lambda index: -cosine("abcd", texts[index]))
    assert [one["index"] for one in answer["results"]] == expected
    for one in answer["results"]:
        assert one["document"] == {"text": texts[one["index"]]}
        assert one["relevance_score"] == pytest.approx(cosine("abcd", texts[one["index"]]), abs=1e-7)
    assert answer["usage"] == {"prompt_tokens": 4 + 30 + 3 + 6, "total_tokens": 43}, "each text is computed once"
    assert [one.keys() for one in best["results"]] == [{"index", "relevance_score"}] * 2
    assert [one["index"] for one in best["results"]] == expected[:2]


async def test_a_rerankers_template_makes_a_score_of_how_likely_yes_is_beside_no() -> None:
    """As Qwen3-Reranker's card computes it: the softmax of the two tokens. Its templates for vLLM and SGLang say so."""
    yes, no = ord("y"), ord("n")
    fields = {"query": "quest", "documents": ["abc", "zzz"]}
    async with Site(chat_template=RERANKER) as site:
        answer = (await post(site, "/rerank", fields | {"instruction": "be strict"})).json()
        scored = (await post(site, "/score", {"queries": "quest", "documents": ["abc"]})).json()
        sent = sent_to_fleet(site)
    expected = likelihood("q", yes) / (likelihood("q", yes) + likelihood("q", no))
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([expected] * 2)
    assert scored["data"][0] == {"index": 0, "object": "score", "score": pytest.approx(expected)}
    assert [one.sampling.logprob_ids for one in sent] == [(yes, no)] * 3
    async with Site(embedding=EMBEDS) as site:
        refused = await post(site, "/rerank", fields | {"instruct": "be strict"})
        assert_error(refused, 400, "invalid_request_error", "instruction")


@pytest.mark.parametrize(
    "fields",
    [
        {"text_1": "abcd", "text_2": ["x", "xx"]},
        {"text_1": ["abcd", "abcd"], "text_2": ["x", "xx"]},
        {"queries": "abcd", "documents": ["x", "xx"]},
        {"queries": ["abcd"], "items": ["x", "xx"]},
    ],
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_pairs_are_scored_one_with_all_or_one_with_one(path: str, fields: dict[str, Any]) -> None:
    async with Site(embedding=EMBEDS) as site:
        answer = (await post(site, path, fields | {"model": MODEL})).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx([cosine("abcd", "x"), cosine("abcd", "xx")], abs=1e-7)
    assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", MODEL, "score-")


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({"query": "abc", "items": ["d", "ee"]}, ["abcd", "abcee"]),
        ({"query": "abc", "items": "d", "item_first": True}, ["dabc"]),
        ({"query": [97, 98], "items": [[99], [100]]}, ["abc", "abd"]),
        ({"query": [97, 98], "items": [[99], [100]], "item_first": True, "apply_softmax": True}, ["cab", "dab"]),
    ],
)
async def test_labels_get_their_probabilities_behind_each_item(site: Site, fields: dict[str, Any], prompts: list[str]) -> None:
    """As SGLang's POST /v1/score: not renormalized, unless apply_softmax asks for that."""
    labels = [120, 97, 101]
    answer = (await post(site, "/v1/score", fields | {"label_token_ids": labels})).json()
    sent = sent_to_fleet(site)
    assert [bytes(np.frombuffer(one.prompt, dtype="<i4").astype(np.uint8)).decode() for one in sent] == prompts
    assert all(one.sampling.max_new_tokens == 1 and not one.decodes for one in sent), "prefill is enough"
    for prompt, got in zip(prompts, answer["scores"], strict=True):
        alone = [likelihood(prompt, label) for label in labels]
        total = sum(alone) if fields.get("apply_softmax") else 1.0
        assert got == pytest.approx([each / total for each in alone])
    assert answer["object"] == "scoring" and answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


LABELS = {"query": "a", "items": ["b"], "label_token_ids": [1]}


async def test_a_model_that_judges_no_pairs_says_what_would_and_scores_labels_all_the_same(site: Site) -> None:
    for path, fields in (("/rerank", {"query": "a", "documents": ["b"]}), ("/score", {"text_1": "a", "text_2": "b"})):
        message = assert_error(await post(site, path, fields), 400, "invalid_request_error", "model")
        assert "--pooling" in message and "label_token_ids" in message
    assert (await post(site, "/score", LABELS)).status_code == 200


async def test_an_instance_that_knows_no_scores_is_named_as_the_cause() -> None:
    class OlderFleet(EchoFleet):
        def _answer(self, message: Generate) -> Any:
            return super()._answer(replace(message, sampling=replace(message.sampling, logprob_ids=())))

    async with Site(OlderFleet()) as site:
        assert "older release" in assert_error(await post(site, "/score", LABELS), 409, "invalid_request_error", None)


async def test_scores_are_made_with_the_key_of_who_asks_and_aborted_by_nobody_else() -> None:
    async with Site(EchoFleet(stall_at=0), embedding=EMBEDS, access=keyed()) as site, site.client() as client:

        async def ask(path: str, fields: dict[str, Any], key: str = ALICE) -> httpx.Response:
            return await client.post(path, json=fields, headers=bearer(key))

        ways: list[tuple[str, dict[str, Any]]] = [("/rerank", {"query": "a", "documents": ["b"]}), ("/score", LABELS)]
        asked = [asyncio.create_task(ask(*way)) for way in ways]
        await until(lambda: len(sent_to_fleet(site)) == 3)
        assert {record.spec.owner for record in site.core.requests.records()} == {"alice"}
        for key, aborted in ((BOB, 0), (ALICE, 3)):
            assert (await ask("/abort_request", {"abort_all": True}, key)).json() == {"aborted": aborted}
        for response in await asyncio.gather(*asked):
            assert response.status_code == 409
        assert (await client.post("/rerank", json=ways[0][1])).status_code == 401


async def test_embeddings_have_vllms_and_sglangs_own_names_too() -> None:
    length = math.hypot(3, 2)
    vector = pytest.approx([3 / length, 2 / length])
    async with Site(embedding=EMBEDS) as site:
        pooled = (await post(site, "/pooling", {"input": "ab", "task": "embed"})).json()
        one = (await post(site, "/encode", {"text": "ab"})).json()
        several = (await post(site, "/encode", {"input_ids": [[97, 98], [97]]})).json()
    assert pooled["data"] == [{"object": "pooling", "index": 0, "data": vector}]
    assert one["embedding"] == vector and one["meta_info"]["prompt_tokens"] == 2
    assert [each["meta_info"]["prompt_tokens"] for each in several] == [2, 1] and several[0]["embedding"] == vector


@pytest.mark.parametrize(
    ("mode", "size", "is_served"),
    [
        (EmbeddingMode("last", normalize=True, size=2), 1, False),
        (EmbeddingMode("last", normalize=True, size=2, is_matryoshka=True), 1, True),
        (EmbeddingMode("last", normalize=True, size=2, is_matryoshka=True), 3, False),
        (EmbeddingMode("last", normalize=True, size=2, is_matryoshka=True, shorter_sizes=(1,)), 1, True),
        (EmbeddingMode("last", normalize=True, size=9, is_matryoshka=True, shorter_sizes=(4,)), 1, False),
        (EmbeddingMode("last", normalize=True, size=2, is_matryoshka=True, shorter_sizes=(1,)), 2, True),
    ],
)
async def test_embeddings_are_shortened_where_the_model_was_trained_for_it(
    mode: EmbeddingMode, size: int, is_served: bool
) -> None:
    async with Site(embedding=mode) as site:
        response = await post(site, "/v1/embeddings", {"input": "abcd", "dimensions": size})
    if is_served:
        assert response.json()["data"][0]["embedding"] == pytest.approx([1.0] if size == 1 else [0.6, 0.8])
    else:
        assert_error(response, 400, "invalid_request_error", "dimensions")


async def test_sagemakers_way_in_leads_to_chats_completions_and_embeddings() -> None:
    async with Site(embedding=EMBEDS) as site:
        answers = [(await post(site, "/invocations", body)).json() for body in (chat(), completion(), {"input": "ab"})]
        stream = await post(site, "/invocations", completion(stream=True))
        bad: list[Any] = [{}, {"prompt": "x", "input": "y"}, []]
        wrong = [await post(site, "/invocations", body) for body in bad]
        async with site.client() as client:
            pings = [await client.request(method, "/ping") for method in ("GET", "POST")]
    assert [answer["object"] for answer in answers] == ["chat.completion", "text_completion", "list"]
    assert answers[0]["choices"][0]["message"]["content"] == answers[1]["choices"][0]["text"] == "hello"
    assert stream.text.endswith("data: [DONE]\n\n")
    assert [response.status_code for response in wrong] == [400] * 3 and [ping.status_code for ping in pings] == [200] * 2


async def test_the_requests_of_lm_evals_remote_tokenizer_are_served() -> None:
    """RemoteTokenizer of lm_eval/utils.py reads these fields of these answers."""
    async with Site(chat_template="{{ messages }}") as site:
        info = (await get(site, "/tokenizer_info")).json()
        ids = (await post(site, "/tokenize", {"prompt": "test", "add_special_tokens": False})).json()["tokens"]
        texts = [(await post(site, path, {"tokens": ids})).json() for path in ("/detokenize", "/v1/detokenize")]
    assert (info["eos_token"], info["chat_template"]) == ("</s>", "{{ messages }}")
    assert texts == [{"prompt": "test", "text": "test"}] * 2


async def test_load_and_version_are_told_as_peers_do() -> None:
    async with Site(EchoFleet(stall_at=1)) as site:
        asked = asyncio.create_task(post(site, "/v1/completions", completion(n=2)))
        await until(lambda: len(site.core.requests) == 2)
        assert (await get(site, "/load")).json() == {"server_load": 2}
        (load,) = (await get(site, "/get_load")).json()
        assert (load["dp_rank"], load["num_reqs"]) == (0, 2)
        assert (await get(site, "/version")).json()["version"]
        await post(site, "/abort_request", {"abort_all": True})
        await asked


async def test_an_endpoint_of_another_server_leads_to_what_there_is(site: Site) -> None:
    known = {route.path for route in site.app.routes if isinstance(route, Route)} | {
        route.path for route in site.app.routes if isinstance(route, APIRoute)
    }
    for path, hint in HINTS.items():
        assert path not in known
        message = assert_error(await post(site, path, {}), 404, "invalid_request_error", None)
        assert hint in message
        for word in hint.replace(",", "").split():
            assert not word.startswith("/") or word.partition("?")[0] in {"/v1", *known}, hint
    for path, hint in (("/v1/v1/messages", "twice"), ("/chat/completions", "add /v1 to the base URL")):
        assert hint in assert_error(await post(site, path, {}), 404, "invalid_request_error", None)
    for path, (field, _) in UNSERVED.items():
        assert "label_token_ids" in assert_error(await post(site, path, {"input": "x"}), 400, "invalid_request_error", field)


async def test_a_responses_text_has_the_log_probabilities_of_its_tokens_streamed_or_whole() -> None:
    asked: Any = {
        "model": MODEL,
        "input": "ab",
        "max_output_tokens": 4,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    async with openai_client() as client:
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        counted = await client.responses.input_tokens.count(model=MODEL, input="ab")
    (part,) = whole.output[0].content
    told: Any = part.logprobs
    assert [(one.token, one.logprob, len(one.top_logprobs)) for one in told] == [(char, -0.25, 2) for char in "abab"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(one.token for event in deltas for one in event.logprobs) == "abab"
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [one.token for one in done.logprobs] == list("abab")
    assert counted.input_tokens == 2


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        ("", {"top_logprobs": 2}, "top_logprobs"),
        ("", {"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ("<think>", {"include": ["message.output_text.logprobs"]}, "include"),
    ],
)
async def test_log_probabilities_of_a_response_are_for_text_alone(template: str, fields: dict[str, Any], param: str) -> None:
    async with Site(chat_template=template) as site:
        response = await post(site, "/v1/responses", {"model": MODEL, "input": "ab"} | fields)
    assert_error(response, 400, "invalid_request_error", param)


# --- tokens and embeddings ------------------------------------------------------------------------------------------------------


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


async def test_answers_with_log_probabilities_and_models_are_the_clients_own_types() -> None:
    async with openai_client() as client:
        logprobs = (await client.chat.completions.create(**chat("hi", logprobs=True, top_logprobs=2))).choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        first, second, *_ = logprobs.content
        assert [(each.token, each.logprob, each.bytes) for each in (first, second)] == [("h", -0.25, [104]), ("i", -0.25, [105])]
        assert [top.token for top in first.top_logprobs] == ["h", "i"]
        assert [model.id async for model in client.models.list()] == [MODEL]


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


@pytest.mark.parametrize("tokens", [CONTEXT, CONTEXT + 1])
@pytest.mark.parametrize(
    ("path", "field", "others"),
    [
        ("/v1/embeddings", "input", {}),
        ("/v1/completions", "prompt", {"max_tokens": 0, "echo": True}),
        ("/generate", "input_ids", {"sampling_params": {"max_new_tokens": 0}}),
        ("/v1/score", "query", {"items": [[]], "label_token_ids": [98]}),
    ],
)
async def test_a_prompt_without_an_answer_may_fill_the_context(
    path: str, field: str, others: dict[str, Any], tokens: int
) -> None:
    async with Site(embedding=EmbeddingMode("last", normalize=False, size=2)) as site:
        named = {} if path == "/generate" else {"model": MODEL}
        response = await post(site, path, {field: [97] * tokens, **named, **others})
        if tokens == CONTEXT:
            assert response.status_code == 200, response.text
        else:
            assert f"{tokens}, so shorten it" in assert_error(response, 400, "invalid_request_error", field)
