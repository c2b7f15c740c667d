"""The API over HTTP with a fleet that echoes: answers and errors; the id that every response carries, and a request's session."""

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest

from common.config import RouterConfig
from common.errors import ConfigError, DeadlinePassed, InstanceFailed, Overloaded, TandemError, Unavailable
from common.ids import unpack_ids
from common.messages import Failed
from common.sampling_params import SamplingParams
from common.text.embedding import EmbeddingMode
from router.api import admission
from tests.router.calls import JSON, assert_error, chat, completion, events, get, metric, post, sent_to_fleet, until, usage
from tests.router.fakes import CONTEXT, MODEL, EchoFleet, Site

pytestmark = pytest.mark.anyio
EMBEDDING = EmbeddingMode("last", normalize=False, size=2)


# --- answers -----------------------------------------------------------------------------------------------------------


async def test_a_chat_completion_has_text_reason_usage_and_id(site: Site) -> None:
    response = await post(site, "/v1/chat/completions", chat("hello world"))
    body = response.json()
    assert response.status_code == 200
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert body["usage"] == usage(11, 5)


async def test_a_chat_stream_opens_with_the_role_and_closes_with_the_reason(site: Site) -> None:
    response = await post(site, "/v1/chat/completions", chat(stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response)
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{response.headers['x-request-id']}"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "hello"
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_usage_comes_in_a_last_chunk_without_choices_when_asked(site: Site) -> None:
    response = await post(site, "/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True}))
    *chunks, last = events(response)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], usage(5, 5))


async def test_the_usage_says_how_much_of_each_prompt_was_cached_however_many_choices_it_has() -> None:
    fleet = EchoFleet()
    fleet.cached_tokens = 2
    chat_body, prompts = chat("hello", n=3, max_tokens=4), completion(["abc", "defg"], n=2, max_tokens=4)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with Site(fleet) as site:
        for path, body, expected in (("chat/completions", chat_body, usage(5, 12, 2)), ("completions", prompts, usage(7, 16, 4))):
            assert (await post(site, f"/v1/{path}", body)).json()["usage"] == expected
            assert events(await post(site, f"/v1/{path}", body | streamed))[-1]["usage"] == expected
        ids = {"input_ids": [[104, 105, 106], [107, 108]], "sampling_params": {"max_new_tokens": 2}}
        for part in (await post(site, "/generate", ids)).json() + events(await post(site, "/generate", ids | {"stream": True})):
            assert part["meta_info"]["cached_tokens"] == 2
        response = (await post(site, "/v1/responses", {"model": MODEL, "input": "hello"})).json()
        assert response["usage"]["input_tokens_details"] == {"cached_tokens": 2}


async def test_the_usage_says_what_came_of_proposed_tokens() -> None:
    fleet = EchoFleet()
    fleet.drafts = 3, 1
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    expected = usage(5, 12) | {"completion_tokens_details": {"accepted_prediction_tokens": 12, "rejected_prediction_tokens": 24}}
    async with Site(fleet) as site:
        body = chat("hello", n=3, max_tokens=4)
        assert (await post(site, "/v1/chat/completions", body)).json()["usage"] == expected
        assert events(await post(site, "/v1/chat/completions", body | streamed))[-1]["usage"] == expected


async def test_a_text_completion_whole_and_streamed(site: Site) -> None:
    whole = (await post(site, "/v1/completions", completion())).json()
    chunks = events(await post(site, "/v1/completions", completion(stream=True)))
    assert whole["id"].startswith("cmpl-") and whole["object"] == "text_completion"
    assert whole["choices"] == [{"index": 0, "text": "hello", "finish_reason": "length", "logprobs": None}]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("prompt", "texts"), [([97, 98], ["ab"]), ([[97, 98], [99]], ["ab", "cc"])])
async def test_one_prompt_and_several_may_be_token_ids(site: Site, prompt: Any, texts: list[str]) -> None:
    response = await post(site, "/v1/completions", completion(prompt, max_tokens=2))
    assert [choice["text"] for choice in response.json()["choices"]] == texts


async def test_several_prompts_and_several_choices_are_numbered_prompt_by_prompt(site: Site) -> None:
    body = (await post(site, "/v1/completions", completion(["aa", "bbb"], n=2, max_tokens=1, seed=7))).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert body["usage"] == usage(5, 4)
    assert [message.sampling.seed for message in sent_to_fleet(site)] == [7, 8, 7, 8]
    assert len({message.key for message in sent_to_fleet(site)}) == 4


async def test_a_stream_of_several_choices_has_each_choice_whole(site: Site) -> None:
    chunks = events(await post(site, "/v1/chat/completions", chat(stream=True, n=3)))
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "hello"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]


async def test_a_stop_string_ends_the_answer_before_it(site: Site) -> None:
    body = (await post(site, "/v1/chat/completions", chat(stop=["l"]))).json()
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("he", "stop")
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("asked", "seeds"),
    [
        (completion(["aa", "b", "aa"], n=2, max_tokens=1, seed=7), [7, 8, 7, 8, 9, 10]),
        (completion(seed=2**63 - 1, n=2), [2**63 - 1, -(2**63)]),
    ],
    ids=["equal prompts", "the greatest seed wraps round"],
)
async def test_each_choice_of_a_prompt_gets_a_seed_of_its_own(site: Site, asked: dict[str, Any], seeds: list[int]) -> None:
    await post(site, "/v1/completions", asked)
    assert [message.sampling.seed for message in sent_to_fleet(site)] == seeds


async def test_without_a_seed_each_request_gets_its_own(site: Site) -> None:
    for _ in range(2):
        await post(site, "/v1/chat/completions", chat())
    first, second = (message.sampling.seed for message in sent_to_fleet(site))
    assert first != second


async def test_sampling_parameters_reach_the_fleet(site: Site) -> None:
    wanted: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 3, "ignore_eos": True}
    await post(site, "/v1/chat/completions", chat(**wanted, stop_token_ids=[7, 999, 7]))
    await post(site, "/v1/chat/completions", chat(top_k=-1))
    message, of_all = sent_to_fleet(site)
    assert message.sampling == SamplingParams(**wanted, max_new_tokens=5, stop_token_ids=(7, 999))
    assert of_all.sampling.top_k == 0
    assert unpack_ids(message.prompt).tolist() == [ord(char) for char in "hello"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/completions", completion()),
        ("/v1/responses", {"model": MODEL, "input": "hello"}),
        ("/generate", {"text": "hello"}),
        ("/v1/embeddings", {"input": "hello"}),
    ],
    ids=["chat", "completion", "response", "generate", "embeddings"],
)
async def test_the_cache_salt_reaches_the_fleet_with_every_attempt(path: str, body: dict[str, Any]) -> None:
    fleet = EchoFleet(fail_at=1, failed=Failed.of(Unavailable("the push failed")), failing=1)
    async with Site(fleet, RouterConfig(heartbeat_s=0.01, dead_after_s=1000.0), embedding=EMBEDDING) as site:
        for salt in ({"cache_salt": "tenant"}, {"cache_salt": None}, {}):
            assert (await post(site, path, body | salt)).status_code == 200
        refused = [await post(site, path, body | {"cache_salt": salt}) for salt in ("", "x" * 129, 7)]
        for response in refused:
            assert "cache_salt" in assert_error(response, 400, "invalid_request_error", "cache_salt")
        salts = [(message.key.attempt, message.salt) for message in sent_to_fleet(site)]
        assert sorted(set(salts)) == sorted({(attempt, salt) for attempt, _ in salts for salt in ("", "tenant")})
        assert max(attempt for attempt, _ in salts) == (0 if path == "/v1/embeddings" else 1)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat()), ("/v1/completions", completion())])
async def test_timeout_and_priority_reach_the_fleet(site: Site, path: str, body: dict[str, Any]) -> None:
    await post(site, path, body | {"timeout": 30, "priority": -7})
    await post(site, path, body | {"timeout": None})
    await post(site, path, body | {"timeout": 86_400})
    asked, plain, long = (message.terms for message in sent_to_fleet(site))
    assert asked.priority == -7 and asked.timeout_s == pytest.approx(30.0, abs=5.0) and 0 <= asked.age_s < 5
    assert long.timeout_s == pytest.approx(86_400.0, abs=5.0), "more than the default"
    assert plain.priority == 0 and plain.timeout_s == pytest.approx(1800.0, abs=5.0)


async def test_a_request_whose_time_is_over_before_its_first_token_is_a_504() -> None:
    async with Site(EchoFleet(stall_at=0)) as site:
        response = await post(site, "/v1/chat/completions", chat(stream=True, timeout=0.05))
        assert len(site.fleet.cancelled()) == 1
    said = assert_error(response, 504, "timeout_error", None)
    assert said == "the request took longer than 0.05 s: a request may ask for up to 86400 s with `timeout`"


async def test_a_request_whose_time_is_over_later_ends_its_stream_with_an_error_event() -> None:
    async with Site(EchoFleet(stall_at=3), RouterConfig(heartbeat_s=100.0, dead_after_s=1000.0)) as site:
        asking = asyncio.create_task(post(site, "/v1/completions", completion(stream=True, timeout=60)))
        await until(lambda: any(len(record.token_ids) == 3 for record in site.core.requests.records()))
        site.gateway.deliver(site.core.tick(site.gateway.clock() + 60.0))
        response = await asking
        assert len(site.fleet.cancelled()) == 1
    parts = [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n") if part]
    assert response.status_code == 200
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == "hel"
    assert parts[-1]["error"]["type"] == "timeout_error"


@pytest.mark.parametrize(
    ("asked", "default", "answer_tokens"),
    [
        (chat(max_tokens=None), 0, CONTEXT - 5),
        (chat(max_tokens=None), 20, 20),
        (chat("x" * (CONTEXT - 20), max_tokens=None), 20, 20),
        (chat("x" * (CONTEXT - 19), max_tokens=None), 20, 19),
        (chat("x" * (CONTEXT - 1), max_tokens=None), 20, 1),
        (chat(max_tokens=50), 2, 50),
        (completion(max_tokens=None), 100, 16),
        (completion("x" * (CONTEXT - 7), max_tokens=None), 100, 7),
    ],
)
async def test_without_max_tokens_a_chat_has_what_the_context_leaves_or_the_flag_sets_and_a_completion_16_tokens_as_at_openai(
    asked: dict[str, Any], default: int, answer_tokens: int
) -> None:
    async with Site(config=RouterConfig(default_max_tokens=default)) as site:
        await post(site, "/v1/chat/completions" if "messages" in asked else "/v1/completions", asked)
        assert sent_to_fleet(site)[0].sampling.max_new_tokens == answer_tokens


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_a_body_that_is_encoded_is_refused(site: Site, encoding: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize", "/flush_cache"):
        async with site.client() as client:
            refused = await client.post(path, content=gzip.compress(b"{}"), headers=JSON | {"content-encoding": encoding})
        assert "Content-Encoding" in assert_error(refused, 415, "invalid_request_error", None)


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_long_is_refused(announced: bool) -> None:
    async def chunks() -> Any:
        for _ in range(11):
            yield b"x" * 100

    async with Site(max_body_bytes=1000) as site, site.client() as client:
        response = await client.post("/v1/completions", content=b"x" * 1001 if announced else chunks(), headers=JSON)
    assert "--max-body" in assert_error(response, 413, "invalid_request_error", None)


async def test_unknown_urls_and_methods_are_refused_in_the_same_shape(site: Site) -> None:
    assert "/v1/nothing" in assert_error(await get(site, "/v1/nothing"), 404, "invalid_request_error", None)
    wrong_method = await get(site, "/v1/chat/completions")
    assert_error(wrong_method, 405, "invalid_request_error", None)
    assert wrong_method.headers["allow"] == "POST"


async def test_without_instances_the_answer_is_503_with_retry_after() -> None:
    async with Site(EchoFleet(joins=False)) as site:
        response = await post(site, "/v1/chat/completions", chat(stream=True))
    assert_error(response, 503, "unavailable_error", None)
    assert int(response.headers["retry-after"]) > 0


async def test_every_call_with_a_body_is_refused_when_too_many_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SPARE_CONNECTIONS", -RouterConfig().max_requests)
    async with Site() as site:
        paths = [path for path, ways in site.app.openapi()["paths"].items() if "requestBody" in ways.get("post", {})]
        assert "/v1/completions" in paths
        for path in paths:
            kind = "rate_limit_error" if path.startswith("/v1/messages") else "overloaded_error"
            assert "HTTP requests open" in assert_error(await post(site, path, {}), 429, kind, None)


async def test_beyond_max_requests_the_answer_is_429_with_retry_after() -> None:
    async with Site(config=RouterConfig(max_requests=2)) as site:
        assert_error(await post(site, "/v1/chat/completions", chat(n=3)), 400, "invalid_request_error", "n")
        with site.core.requests.places.held("", 1):
            response = await post(site, "/v1/chat/completions", chat(n=2))
        assert_error(response, 429, "overloaded_error", None)
        assert int(response.headers["retry-after"]) > 0
        assert (await post(site, "/v1/chat/completions", chat(n=2))).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat()), ("/v1/completions", completion())])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("the decode instance is full"), 429, "1"),
        (Unavailable("no instance left"), 503, "2"),
        (DeadlinePassed("too slow"), 504, None),
        (InstanceFailed("the step failed"), 500, None),
    ],
)
async def test_a_failure_at_an_instance_before_the_first_token_has_its_own_status_even_for_a_stream(
    error: TandemError, status: int, retry_after: str | None, path: str, body: dict[str, Any], stream: bool
) -> None:
    config = RouterConfig(heartbeat_s=0.01, dead_after_s=1000.0)  # the pauses between attempts are some heartbeats
    async with Site(EchoFleet(fail_at=0, failed=Failed.of(error)), config) as site:
        response = await post(site, path, body | {"stream": stream})
        counted = (await get(site, "/metrics")).text
    assert assert_error(response, status, error.kind, None) == str(error)
    assert response.headers.get("retry-after") == retry_after
    assert metric(counted, f'tandem_requests_ended_total{{ending="{error.kind}"}}') == 1


async def test_a_failure_after_the_first_token_is_an_error_event_and_the_stream_closes() -> None:
    async with Site(EchoFleet(fail_at=2)) as site:
        response = await post(site, "/v1/chat/completions", chat(stream=True))
        parts = [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n") if part]
    assert response.status_code == 200
    assert parts[-1] == {"error": {"message": "the step failed", "type": "instance_error", "param": None, "code": None}}
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts[:-1]) == "he"


@pytest.mark.parametrize("fail_at", [0, 1, 3])
async def test_a_failed_attempt_that_can_be_resumed_is_not_seen_by_the_client(fail_at: int) -> None:
    fleet = EchoFleet(fail_at=fail_at, failed=Failed.of(Unavailable("the push failed")), failing=2)
    async with Site(fleet, RouterConfig(heartbeat_s=0.01, dead_after_s=1000.0)) as site:
        body = completion(stream=True, return_token_ids=True, stream_options={"include_usage": True})
        *chunks, last = events(await post(site, "/v1/completions", body))
        counted = (await get(site, "/metrics")).text
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", ())] == [ord(char) for char in "hello"]
    assert last["usage"] == usage(5, 5)
    assert metric(counted, 'tandem_resumes_total{reason="failed_attempt"}') == 2
    assert metric(counted, "tandem_attempts_sum") == 3
    assert metric(counted, "tandem_resume_gap_seconds_count") == 1


async def test_when_one_choice_fails_the_others_are_cancelled() -> None:
    async with Site(EchoFleet(fail_at=0)) as site:
        await post(site, "/v1/chat/completions", chat(n=3))
        assert len(site.core.requests) == 0


# --- headers --------------------------------------------------------------------------------------------------------------------


async def post_as(site: Site, request_id: str, path: str = "/v1/completions") -> httpx.Response:
    async with site.client() as client:
        return await client.post(path, json=completion(), headers={"x-request-id": request_id})


async def test_a_clients_id_comes_back_in_the_header_and_in_the_answers_id(site: Site) -> None:
    answer = await post_as(site, "mine-1")
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine-1", "cmpl-mine-1")
    for path, status in (("/v1/nothing", 404), ("/v1/chat/completions", 400), ("/health", 405)):
        refused = await post_as(site, "mine-2", path)
        assert (refused.status_code, refused.headers["x-request-id"]) == (status, "mine-2")


async def test_without_an_id_one_is_made_for_each_request(client: httpx.AsyncClient, site: Site) -> None:
    made = [(await client.get(path)).headers["x-request-id"] for path in ("/health", "/health", "/nothing")]
    assert len(set(made)) == 3 and all(made)


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "\x7f", "\u00e9"])
async def test_an_id_that_is_none_is_refused(client: httpx.AsyncClient, site: Site, request_id: str) -> None:
    response = await client.post("/v1/completions", json=completion(), headers=[(b"x-request-id", request_id.encode("latin-1"))])
    assert "visible ASCII" in assert_error(response, 400, "invalid_request_error", "X-Request-Id")
    assert response.headers["x-request-id"] != request_id
    assert (await post_as(site, "x" * 128)).status_code == 200


async def test_requests_of_the_same_id_are_served_apart(site: Site) -> None:
    answers = await asyncio.gather(*(post_as(site, "same") for _ in range(3)))
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
