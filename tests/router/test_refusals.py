"""What each endpoint refuses, by the field that is at fault. Over HTTP, at one router, which gets nothing of it.

What is refused as it is read is in `test_bodies.py`, for chats and completions, and in `test_messages.py`.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.text.embedding import EmbeddingMode
from tests.router.calls import assert_error, chat, completion, post, prompt, sent_to_fleet
from tests.router.fakes import CONTEXT, MODEL, Site

pytestmark = pytest.mark.anyio
LABELS = {"query": "a", "items": ["b"], "label_token_ids": [1]}
RERANK = {"query": "a", "documents": ["b"]}
REFUSED: dict[str, list[tuple[Any, str, str]]] = {
    "/v1/chat/completions": [
        (chat(colour=1), "colour", "not a known field"),
        (chat(""), "messages", "empty"),
        (chat(messages=[{"role": "assistant", "content": "x"}]), "messages", "template"),
        (chat(model="gpt-9"), "model", "use 'echo'"),
        (chat("x" * CONTEXT), "messages", f"at most {CONTEXT - 1}"),
        (chat("x" * 70_000), "messages", "far longer"),
        (chat("x" * 100, max_tokens=29), "max_tokens", "has room for 28"),
        (chat("x" * 100, max_tokens=None, max_completion_tokens=29), "max_completion_tokens", "28"),
        (chat(max_tokens=0), "max_tokens", "at least 1"),
        (chat(max_tokens=-(2**70)), "max_tokens", "at least 1"),
        (chat(temperature=2.5), "temperature", "at most 2"),
        (chat(top_p=0), "top_p", "above 0"),
        (chat(top_k=-2), "top_k", "at least -1"),
        (chat(min_p=1.5), "min_p", "at most 1"),
        (chat(seed=2**63), "seed", "at most 9223372036854775807"),
        (chat(timeout=0), "timeout", "above 0"),
        (chat(priority=1001), "priority", "at most 1000"),
        (chat(stop_token_ids=[1000]), "stop_token_ids", "between 0 and 999"),
        (chat(stop_token_ids=[65], guided_regex="A"), "stop_token_ids", "65 is the text 'A'"),
    ],
    "/v1/completions": [
        (completion(["x", "x" * 70_000]), "prompt", "far longer"),
        (completion(timeout=-1.5), "timeout", "above 0"),
        (completion(timeout=86_400.5), "timeout", "at most 86400 seconds (--max-request-timeout-s), is 86400.5"),
        (completion(timeout="1"), "timeout", "expected `float"),
        (completion(priority=-1001), "priority", "at least -1000"),
        (completion(priority=0.5), "priority", "expected `int"),
        (completion(""), "prompt", "empty"),
        (completion([5, 1000]), "prompt", "between 0 and 999"),
        (completion([[5], [1000]]), "prompt", "between 0 and 999"),
        (completion([[5], []]), "prompt", "empty"),
        (completion([-1]), "prompt", "between 0 and 999"),
        (completion([2**80]), "prompt", "between 0 and 999"),
        (completion(logit_bias={"1000": 1}), "logit_bias", "between 0 and 999"),
        (completion(logit_bias={"x": 1}), "logit_bias", "must be token ids"),
        (completion(min_tokens=6), "min_tokens", "at most 5: lower it"),
        (completion(bad_words=[" "]), "bad_words", "no tokens"),
    ],
    "/tokenize": [
        ({}, "prompt", ""),
        ({"prompt": "x", "messages": []}, "prompt", ""),
        ({"messages": []}, "messages", ""),
        ({"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "add_special_tokens", ""),
        ({"prompt": "x", "model": "gpt-9"}, "model", ""),
        ({"prompt": "x", "colour": 1}, "colour", ""),
        ({"prompt": "x" * (2**20 + 1)}, "prompt", ""),
    ],
    "/detokenize": [({"tokens": [1000]}, "tokens", ""), ({"tokens": [-1]}, "tokens[0]", ""), ({"tokens": "x"}, "tokens", "")],
    "/v1/embeddings": [
        ({}, "input", "missing"),
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a"] * 257}, "input", "at most 256"),
        ({"input": [1, "a"]}, "input", "mixture"),
        ({"input": "x" * (CONTEXT + 1)}, "input", "context"),
        ({"input": [10**6]}, "input", "token ids"),
        ({"input": "x", "model": "gpt-9"}, "model", "not served"),
        ({"input": "x", "dimensions": 1}, "dimensions", "send 2"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"input": "x", "stream": True}, "stream", "not a known field"),
    ],
    "/rerank": [
        ({"query": "a", "documents": []}, "documents", ""),
        ({"query": "a", "documents": ["x"] * 257}, "documents", ""),
        ({"query": "a", "documents": [""]}, "documents", ""),
        ({"query": "a"}, "documents", ""),
        (RERANK | {"max_tokens_per_doc": 5}, "max_tokens_per_doc", ""),
        (RERANK | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", ""),
        (RERANK | {"use_activation": False}, "use_activation", ""),
        (RERANK | {"model": "gpt-9"}, "model", ""),
    ],
    "/score": [
        ({}, "text_1", ""),
        ({"text_1": "a"}, "text_1", ""),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "text_1", ""),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_2", ""),
        ({"text_1": "a", "text_2": []}, "text_2", ""),
        ({"text_1": "a", "text_2": "b", "apply_softmax": True}, "text_1", ""),
        ({"query": "a", "items": ["b"]}, "query", ""),
        (LABELS | {"items": [[1]]}, "items", ""),
        (LABELS | {"items": []}, "items", ""),
        (LABELS | {"label_token_ids": [1, 1]}, "label_token_ids", ""),
        (LABELS | {"label_token_ids": [10**6]}, "label_token_ids", ""),
        (LABELS | {"label_token_ids": []}, "label_token_ids", ""),
        (LABELS | {"query": "a" * CONTEXT}, "items", "so shorten it"),
        (LABELS | {"query": "a" * 90_000, "items": ["b"] * 50}, "items", ""),
        ({"query": [1] * (CONTEXT + 1), "items": [[1]], "label_token_ids": [1]}, "query", ""),
    ],
    "/generate": [
        ({}, "text", "one of them"),
        ({"text": "x", "input_ids": [1]}, "text", "one of them"),
        ({"text": []}, "text", "empty"),
        ({"input_ids": [1, [2]]}, "input_ids", "mixture"),
        ({"text": "x", "colour": 1}, "colour", "not a known field"),
        (prompt(sampling_params={"colour": 1}), "sampling_params.colour", "not a known field"),
        (prompt(sampling_params={"temperature": 3}), "sampling_params.temperature", "at most 2"),
        (prompt(sampling_params=[{"n": 1}, {"n": 2}]), "sampling_params", "a request of its own"),
        (prompt(sampling_params=[None]), "sampling_params", "must be one object"),
        (prompt(sampling_params={"max_new_tokens": 1, "min_new_tokens": 2}), "sampling_params.min_new_tokens", "lower it"),
        (prompt(sampling_params={"max_new_tokens": 9_999}), "sampling_params.max_new_tokens", "has room for"),
        (prompt(tokens=9_999, stream=True, return_logprob=True, top_logprobs_num=2), "return_logprob", "stream=false"),
        (prompt(top_logprobs_num=1), "top_logprobs_num", "return_logprob=true"),
        (prompt(logprob_start_len=0), "logprob_start_len", "return_logprob=true"),
        (prompt(return_text_in_logprobs=True), "return_text_in_logprobs", "return_logprob=true"),
        (prompt(["a", "b"], rid=["x"]), "rid", "one for each"),
        (prompt(rid="a b"), "rid", "visible ASCII"),
    ],
    "/v1/responses": [
        ({"input": []}, "input", "empty"),
        ({"input": 3}, "input", "expected"),
        ({"input": [3]}, "input[0]", "expected `object`"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "robot"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "use input_text"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
            "is not JSON",
        ),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "leave it out"),
        ({"include": ["x"]}, "include[0]", "invalid enum value"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "use function:"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"max_tokens": 3}, "max_tokens", "not a known field"),
        ({"n": 2}, "n", "not a known field"),
        ({"input": "x" * 200}, "input", ""),
        ({"max_output_tokens": 1000}, "max_output_tokens", ""),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", ""),
    ],
}
CASES = [(path, *case) for path, cases in REFUSED.items() for case in cases]


@pytest.fixture(scope="module")
async def untouched() -> AsyncIterator[Site]:
    async with Site(embedding=EmbeddingMode("last", normalize=False, size=2), max_body_bytes=2**22) as site:
        yield site


@pytest.mark.parametrize(("path", "body", "param", "says"), CASES)
async def test_a_bad_request_is_refused_by_field_and_fix_and_the_next_one_is_served(
    untouched: Site, path: str, body: Any, param: str, says: str
) -> None:
    before = len(sent_to_fleet(untouched))
    asked = {"model": MODEL, "input": "hi"} | body if path == "/v1/responses" else body
    response = await post(untouched, path, asked)
    assert says in assert_error(response, 404 if param == "model" else 400, "invalid_request_error", param)
    assert len(sent_to_fleet(untouched)) == before
    assert (await post(untouched, "/v1/chat/completions", chat())).status_code == 200
