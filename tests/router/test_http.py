"""The API over HTTP with a fleet that echoes: answers, errors and pages."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from common.config import RouterConfig
from common.errors import DeadlinePassed, InstanceFailed, Overloaded, TandemError, Unavailable
from common.ids import DETOKENIZER, unpack_ids
from common.messages import DetokenizerHeartbeat, Drain, Failed, Generate, Load, Register
from tests.router.fakes import CONTEXT, MODEL, EchoFleet, Site, beat

pytestmark = pytest.mark.anyio


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 5} | fields


def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 5} | fields


async def post(site: Site, path: str, body: Any) -> httpx.Response:
    async with site.client() as client:
        return await client.post(path, json=body)


async def get(site: Site, path: str) -> httpx.Response:
    async with site.client() as client:
        return await client.get(path)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream that ends with [DONE]."""
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def sent_to_fleet(site: Site) -> list[Generate]:
    return [message for message in site.fleet.sent if isinstance(message, Generate)]


def assert_error(response: httpx.Response, status: int, kind: str, param: str | None) -> str:
    """The response is one OpenAI error; returns its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == (kind, param)
    message: str = error["message"]
    return message


# --- answers -----------------------------------------------------------------------------------------------------------


async def test_a_chat_completion_has_text_reason_usage_and_id() -> None:
    async with Site() as site:
        response = await post(site, "/v1/chat/completions", chat("hello world"))
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-") and response.headers["x-request-id"] == body["id"]
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert body["usage"] == {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}


async def test_a_chat_stream_opens_with_the_role_and_closes_with_the_reason() -> None:
    async with Site() as site:
        response = await post(site, "/v1/chat/completions", chat(stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response)
    assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "hello"
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_usage_comes_in_a_last_chunk_without_choices_when_asked() -> None:
    async with Site() as site:
        response = await post(site, "/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True}))
    *chunks, last = events(response)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10})


async def test_a_text_completion_whole_and_streamed() -> None:
    async with Site() as site:
        whole = (await post(site, "/v1/completions", completion())).json()
        chunks = events(await post(site, "/v1/completions", completion(stream=True)))
    assert whole["id"].startswith("cmpl-") and whole["object"] == "text_completion"
    assert whole["choices"] == [{"index": 0, "text": "hello", "finish_reason": "length", "logprobs": None}]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_token_ids_are_a_prompt() -> None:
    async with Site() as site:
        response = await post(site, "/v1/completions", completion([ord("a"), ord("b")], max_tokens=2))
    assert response.json()["choices"][0]["text"] == "ab"


async def test_several_prompts_and_several_choices_are_numbered_prompt_by_prompt() -> None:
    async with Site() as site:
        body = (await post(site, "/v1/completions", completion(["aa", "bbb"], n=2, max_tokens=1, seed=7))).json()
        assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
        assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
        assert [message.sampling.seed for message in sent_to_fleet(site)] == [7, 8, 7, 8]
        assert len({message.key for message in sent_to_fleet(site)}) == 4


async def test_a_stream_of_several_choices_has_each_choice_whole() -> None:
    async with Site() as site:
        chunks = events(await post(site, "/v1/chat/completions", chat(stream=True, n=3)))
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "hello"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]


async def test_a_stop_string_ends_the_answer_before_it() -> None:
    async with Site() as site:
        body = (await post(site, "/v1/chat/completions", chat(stop=["l"]))).json()
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("he", "stop")
    assert body["usage"]["completion_tokens"] == 3


async def test_without_a_seed_each_request_gets_its_own() -> None:
    async with Site() as site:
        for _ in range(2):
            await post(site, "/v1/chat/completions", chat())
        first, second = (message.sampling.seed for message in sent_to_fleet(site))
    assert first != second


async def test_the_greatest_seed_wraps_round_for_further_choices() -> None:
    async with Site() as site:
        await post(site, "/v1/chat/completions", chat(seed=2**63 - 1, n=2))
        assert [message.sampling.seed for message in sent_to_fleet(site)] == [2**63 - 1, -(2**63)]


async def test_sampling_parameters_reach_the_fleet() -> None:
    wanted: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 3, "ignore_eos": True}
    async with Site() as site:
        await post(site, "/v1/chat/completions", chat(**wanted))
        (message,) = sent_to_fleet(site)
    sampling = msgspec.structs.asdict(message.sampling)
    assert sampling == wanted | {"max_new_tokens": 5, "stop_token_ids": ()}
    assert unpack_ids(message.prompt).tolist() == [ord(char) for char in "hello"]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat()), ("/v1/completions", completion())])
async def test_timeout_and_priority_reach_the_fleet(path: str, body: dict[str, Any]) -> None:
    async with Site() as site:
        await post(site, path, body | {"timeout": 30, "priority": -7})
        await post(site, path, body | {"timeout": None})
        asked, plain = (message.terms for message in sent_to_fleet(site))
    assert asked.priority == -7 and asked.timeout_s == pytest.approx(30.0, abs=5.0) and 0 <= asked.age_s < 5
    assert plain.priority == 0 and plain.timeout_s == pytest.approx(600.0, abs=5.0)


async def test_a_request_whose_time_is_over_before_its_first_token_is_a_504() -> None:
    async with Site(EchoFleet(stall_at=0)) as site:
        response = await post(site, "/v1/chat/completions", chat(stream=True, timeout=0.05))
        assert len(site.fleet.cancelled()) == 1
    assert "0.05 s" in assert_error(response, 504, "timeout_error", None)


async def test_a_request_whose_time_is_over_later_ends_its_stream_with_an_error_event() -> None:
    async with Site(EchoFleet(stall_at=3)) as site:
        response = await post(site, "/v1/completions", completion(stream=True, timeout=1))
        assert len(site.fleet.cancelled()) == 1
    parts = [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n") if part]
    assert response.status_code == 200
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == "hel"
    assert parts[-1]["error"]["type"] == "timeout_error"


@pytest.mark.parametrize(
    ("default", "prompt_tokens", "answer_tokens"),
    [(2048, 5, CONTEXT - 5), (20, 5, 20), (20, CONTEXT - 20, 20), (20, CONTEXT - 19, 19), (20, CONTEXT - 1, 1)],
)
async def test_without_max_tokens_a_chat_answer_has_the_default_length_or_what_the_context_leaves(
    default: int, prompt_tokens: int, answer_tokens: int
) -> None:
    async with Site(config=RouterConfig(default_max_tokens=default)) as site:
        await post(site, "/v1/chat/completions", chat("x" * prompt_tokens, max_tokens=None))
        assert sent_to_fleet(site)[0].sampling.max_new_tokens == answer_tokens


@pytest.mark.parametrize(("prompt_tokens", "answer_tokens"), [(5, 16), (CONTEXT - 7, 7)])
async def test_without_max_tokens_a_completion_has_16_tokens_as_openai_says(prompt_tokens: int, answer_tokens: int) -> None:
    body = completion("x" * prompt_tokens)
    del body["max_tokens"]
    async with Site(config=RouterConfig(default_max_tokens=100)) as site:
        await post(site, "/v1/completions", body)
        assert sent_to_fleet(site)[0].sampling.max_new_tokens == answer_tokens


async def test_a_default_length_is_no_limit_for_those_that_ask_for_more() -> None:
    async with Site(config=RouterConfig(default_max_tokens=2)) as site:
        await post(site, "/v1/chat/completions", chat(max_tokens=50))
        assert sent_to_fleet(site)[0].sampling.max_new_tokens == 50


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("/v1/chat/completions", chat(colour=1), 400, "colour", "not a known field"),
        ("/v1/chat/completions", chat(n="2"), 400, "n", "expected `int`"),
        ("/v1/chat/completions", chat(n=17), 400, "n", "between 1 and 16"),
        ("/v1/chat/completions", chat(messages=[]), 400, "messages", "empty"),
        ("/v1/chat/completions", chat(""), 400, "messages", "empty"),
        ("/v1/chat/completions", chat(messages=[{"role": "assistant", "content": "x"}]), 400, "messages", "template"),
        ("/v1/chat/completions", chat(model="gpt-9"), 404, "model", "use 'echo'"),
        ("/v1/chat/completions", chat("x" * CONTEXT), 400, "messages", f"at most {CONTEXT - 1}"),
        ("/v1/chat/completions", chat("x" * 70_000), 400, "messages", "far longer"),
        ("/v1/completions", completion(["x", "x" * 70_000]), 400, "prompt", "far longer"),
        ("/v1/chat/completions", chat("x" * 100, max_tokens=29), 400, "max_tokens", "has room for 28"),
        ("/v1/chat/completions", chat("x" * 100, max_tokens=None, max_completion_tokens=29), 400, "max_completion_tokens", "28"),
        ("/v1/chat/completions", chat(max_tokens=0), 400, "max_tokens", "at least 1"),
        ("/v1/chat/completions", chat(max_tokens=-(2**70)), 400, "max_tokens", "at least 1"),
        ("/v1/chat/completions", chat(temperature=2.5), 400, "temperature", "between 0 and 2"),
        ("/v1/chat/completions", chat(top_p=0), 400, "top_p", "above 0"),
        ("/v1/chat/completions", chat(top_k=-1), 400, "top_k", "0 (all tokens)"),
        ("/v1/chat/completions", chat(min_p=1.5), 400, "min_p", "between 0 and 1"),
        ("/v1/chat/completions", chat(seed=2**63), 400, "seed", "64-bit"),
        ("/v1/chat/completions", chat(timeout=0), 400, "timeout", "above 0 and at most 600 seconds"),
        ("/v1/completions", completion(timeout=-1.5), 400, "timeout", "is -1.5"),
        ("/v1/completions", completion(timeout=600.5), 400, "timeout", "is 600.5"),
        ("/v1/completions", completion(timeout="1"), 400, "timeout", "expected `float"),
        ("/v1/chat/completions", chat(priority=1001), 400, "priority", "between -1000 and 1000"),
        ("/v1/completions", completion(priority=-1001), 400, "priority", "is -1001"),
        ("/v1/completions", completion(priority=0.5), 400, "priority", "expected `int"),
        ("/v1/completions", completion(""), 400, "prompt", "empty"),
        ("/v1/completions", completion([5, 1000]), 400, "prompt", "between 0 and 999"),
        ("/v1/completions", completion([-1]), 400, "prompt", "between 0 and 999"),
        ("/v1/completions", completion([2**80]), 400, "prompt", "between 0 and 999"),
        ("/v1/completions", completion("x", echo=True), 400, "echo", "send false"),
    ],
)
async def test_a_bad_request_is_refused_by_field_and_the_next_one_is_served(
    path: str, body: dict[str, Any], status: int, param: str, says: str
) -> None:
    async with Site() as site:
        assert says in assert_error(await post(site, path, body), status, "invalid_request_error", param)
        assert sent_to_fleet(site) == []
        assert (await post(site, "/v1/chat/completions", chat())).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"hello", b"\xff\xfe"])
async def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    async with Site() as site, site.client() as client:
        response = await client.post("/v1/chat/completions", content=body)
    assert "not JSON" in assert_error(response, 400, "invalid_request_error", None)


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_long_is_refused(announced: bool) -> None:
    async def chunks() -> Any:
        for _ in range(11):
            yield b"x" * 100

    async with Site(max_body_bytes=1000) as site, site.client() as client:
        response = await client.post("/v1/completions", content=b"x" * 1001 if announced else chunks())
    assert "--max-body" in assert_error(response, 413, "invalid_request_error", None)


async def test_unknown_urls_and_methods_are_refused_in_the_same_shape() -> None:
    async with Site() as site:
        assert "/v1/nothing" in assert_error(await get(site, "/v1/nothing"), 404, "invalid_request_error", None)
        wrong_method = await get(site, "/v1/chat/completions")
        assert_error(wrong_method, 405, "invalid_request_error", None)
        assert wrong_method.headers["allow"] == "POST"


async def test_without_instances_the_answer_is_503_with_retry_after() -> None:
    async with Site(EchoFleet(joins=False)) as site:
        response = await post(site, "/v1/chat/completions", chat(stream=True))
    assert_error(response, 503, "unavailable_error", None)
    assert int(response.headers["retry-after"]) > 0


async def test_beyond_max_requests_the_answer_is_429_with_retry_after() -> None:
    async with Site(config=RouterConfig(max_requests=2)) as site:
        response = await post(site, "/v1/chat/completions", chat(n=3))
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
    async with Site(EchoFleet(fail_at=0, failed=Failed.of(error))) as site:
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


async def test_a_failure_of_a_whole_answer_is_its_status_however_late_it_comes() -> None:
    async with Site(EchoFleet(fail_at=2)) as site:
        assert_error(await post(site, "/v1/chat/completions", chat()), 500, "instance_error", None)


@pytest.mark.parametrize("fail_at", [0, 1, 3])
async def test_a_failed_attempt_that_can_be_resumed_is_not_seen_by_the_client(fail_at: int) -> None:
    fleet = EchoFleet(fail_at=fail_at, failed=Failed.of(Unavailable("the push failed")), failing=2)
    async with Site(fleet) as site:
        body = completion(stream=True, return_token_ids=True, stream_options={"include_usage": True})
        *chunks, last = events(await post(site, "/v1/completions", body))
        counted = (await get(site, "/metrics")).text
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", ())] == [ord(char) for char in "hello"]
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert metric(counted, 'tandem_resumes_total{reason="failed_attempt"}') == 2
    assert metric(counted, "tandem_attempts_sum") == 3
    assert metric(counted, "tandem_resume_gap_seconds_count") == 1


async def test_when_one_choice_fails_the_others_are_cancelled() -> None:
    async with Site(EchoFleet(fail_at=0)) as site:
        await post(site, "/v1/chat/completions", chat(n=3))
        assert len(site.core.requests) == 0


# --- pages -------------------------------------------------------------------------------------------------------------


async def test_models_lists_the_one_model_and_knows_it_by_name() -> None:
    async with Site() as site:
        listed = (await get(site, "/v1/models")).json()
        assert (await get(site, f"/v1/models/{MODEL}")).json() == listed["data"][0]
        assert (listed["data"][0]["id"], listed["data"][0]["max_model_len"]) == (MODEL, CONTEXT)
        assert "use 'echo'" in assert_error(await get(site, "/v1/models/org/other"), 404, "invalid_request_error", "model")


async def test_health_is_the_routers_life_and_ready_is_the_fleets() -> None:
    async with Site(EchoFleet(joins=False)) as site:
        assert (await get(site, "/health")).status_code == 200
        unready = await get(site, "/ready")
        assert (unready.status_code, unready.json()) == (503, {"ready": False, "reasons": ["no instance is live"]})
    async with Site() as site:
        ready = await get(site, "/ready")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "reasons": []})


async def test_a_drained_instance_is_told_and_shown_and_the_fleet_is_unready_when_it_was_the_last() -> None:
    async with Site() as site:
        async with site.client() as client:
            response = await client.post("/cluster/d0/drain")
            again = await client.post("/cluster/d0/drain")
        page, ready = (await get(site, "/cluster")).json(), await get(site, "/ready")
        refused = await post(site, "/v1/chat/completions", chat())
        told = [message for message in site.fleet.sent if isinstance(message, Drain)]
    assert (response.status_code, response.json()) == (202, {"id": "d0", "state": "draining"})
    assert (again.status_code, len(told)) == (202, 2)
    assert [one["state"] for one in page["instances"]] == ["live", "draining"]
    assert ready.status_code == 503 and "d0 is draining" in ready.json()["reasons"][0]
    assert "d0 is draining" in assert_error(refused, 503, "unavailable_error", None)


async def test_who_is_no_member_cannot_be_drained() -> None:
    async with Site() as site, site.client() as client:
        response = await client.post("/cluster/d9/drain")
        assert "'d9'" in assert_error(response, 404, "invalid_request_error", None)
        assert (await get(site, "/ready")).status_code == 200


async def test_a_stuck_instance_is_shown_with_the_reason() -> None:
    async with Site() as site:
        site.fleet.say(beat(site.fleet.decode, site.fleet.prefill, load=Load(oldest_transfer_s=42.0)))
        while not site.core.unready():
            await asyncio.sleep(0)
        page, ready = (await get(site, "/cluster")).json(), await get(site, "/ready")
    assert [one["state"] for one in page["instances"]] == ["live", "stuck"]
    assert page["instances"][1]["reason"] == "its oldest transfer has not moved for 42 s"
    assert ready.status_code == 503 and "d0 is stuck" in ready.json()["reasons"][0]


async def test_a_router_whose_detokenizer_falls_silent_is_neither_healthy_nor_ready_until_it_is_heard_again() -> None:
    async with Site() as site:
        site.fleet.say(DetokenizerHeartbeat(open_answers=2, early_answers=1, dropped=5))
        while site.core.detokenizer.last is None:
            await asyncio.sleep(0)
        text = (await get(site, "/metrics")).text
        healthy = await get(site, "/health")
        site.core.tick(site.gateway.clock() + 4.0)
        sick, unready, page = await get(site, "/health"), await get(site, "/ready"), (await get(site, "/cluster")).json()
        dark = (await get(site, "/metrics")).text
        site.fleet.say(DetokenizerHeartbeat(open_answers=0, early_answers=0, dropped=5))
        while site.core.unhealthy():
            await asyncio.sleep(0)
        assert (await get(site, "/health")).status_code == 200
    assert metric(text, "tandem_detokenizer_open_answers") == 2
    assert metric(text, "tandem_detokenizer_early_answers") == 1
    assert metric(text, "tandem_detokenizer_dropped_total") == 5
    assert (metric(text, "tandem_detokenizer_up"), metric(dark, "tandem_detokenizer_up")) == (1, 0)
    assert (healthy.status_code, healthy.json()) == (200, {"status": "ok", "reasons": []})
    reason = "the detokenizer has not been heard of for 3 s"
    assert (sick.status_code, sick.json()) == (503, {"status": "unhealthy", "reasons": [reason]})
    assert unready.status_code == 503 and reason in unready.json()["reasons"]
    assert page["detokenizer"] == {"silent": True, "open_answers": 2, "early_answers": 1, "dropped": 5}


async def test_cluster_shows_every_instance_with_ranks_load_and_links() -> None:
    async with Site() as site:
        page = (await get(site, "/cluster")).json()
    assert page["router"]["requests_open"] == 0
    assert page["router"]["phases"] == {"awaiting_first_token": 0, "generating": 0, "resuming": 0}
    prefill, decode = page["instances"]
    assert (prefill["id"], prefill["role"], prefill["state"], prefill["pages_total"]) == ("p0", "prefill", "live", 64)
    assert prefill["ranks"] == [{"rank": 0, "pid": 1, "host": "localhost", "device": "cpu"}]
    assert [(link["peer"], link["state"]) for link in prefill["links"]] == [("d0", "ready")]
    assert decode["incarnation"] == "1" and {"load", "counters", "pages_free"} <= decode.keys()


async def test_metrics_count_responses_endings_and_what_instances_report() -> None:
    async with Site() as site:
        await post(site, "/v1/chat/completions", chat())
        await post(site, "/v1/chat/completions", chat(n=0))
        text = (await get(site, "/metrics")).text
    assert metric(text, 'tandem_http_responses_total{path="/v1/chat/completions",status="200"}') == 1
    assert metric(text, 'tandem_http_responses_total{path="/v1/chat/completions",status="400"}') == 1
    assert metric(text, 'tandem_requests_ended_total{ending="length"}') == 1
    assert metric(text, "tandem_time_to_first_token_seconds_count") == 1
    assert metric(text, "tandem_inter_token_seconds_count") == 4
    assert metric(text, "tandem_requests_open") == 0
    assert metric(text, 'tandem_instance_bytes_pushed_total{instance="p0",role="prefill"}') == 0
    assert metric(text, 'tandem_instance_up{instance="d0",role="decode"}') == 1


async def test_metrics_count_what_the_routers_mailbox_dropped_by_reason_and_whom_the_fleet_refused() -> None:
    async with Site() as site:
        site.fleet.frames_refused |= {"magic": 3, "body": 1}
        site.fleet.messages_lost["full"] = 2
        site.fleet.say(Register(instance=msgspec.structs.replace(site.fleet.decode, id=DETOKENIZER)))
        while not site.core.fleet.refusals:
            await asyncio.sleep(0)
        text, page = (await get(site, "/metrics")).text, (await get(site, "/cluster")).json()
    assert metric(text, 'tandem_router_frames_refused_total{reason="magic"}') == 3
    assert metric(text, 'tandem_router_frames_refused_total{reason="body"}') == 1
    assert metric(text, 'tandem_router_messages_lost_total{reason="full"}') == 2
    assert metric(text, "tandem_router_registrations_refused_total") == 1
    assert [refused["id"] for refused in page["refused"]] == ["detokenizer#1"]


async def test_quarantined_pages_make_the_fleet_unready_and_are_shown() -> None:
    async with Site() as site:
        site.fleet.say(beat(site.fleet.decode, site.fleet.prefill, load=Load(pages_quarantined=40)))
        while not site.core.unready():
            await asyncio.sleep(0)
        ready, page = await get(site, "/ready"), (await get(site, "/cluster")).json()
        text = (await get(site, "/metrics")).text
        response = await post(site, "/v1/chat/completions", chat())
    assert ready.status_code == 503 and "d0 is quarantined: 40 of 64" in ready.json()["reasons"][0]
    assert [(one["state"], one["reason"]) for one in page["instances"]] == [
        ("live", None),
        ("quarantined", "40 of 64 pages are quarantined"),
    ]
    assert metric(text, 'tandem_instance_up{instance="d0",role="decode"}') == 0
    assert "d0 is quarantined: 40 of 64" in assert_error(response, 503, "unavailable_error", None)


def metric(text: str, name: str) -> float:
    lines: Sequence[str] = [line for line in text.splitlines() if line.startswith(name + " ")]
    assert len(lines) == 1, f"{name} is there {len(lines)} times"
    return float(lines[0].split()[-1])


async def test_two_routers_can_live_in_one_process() -> None:
    async with Site() as one, Site() as other:
        await post(one, "/v1/chat/completions", chat())
        assert "tandem_requests_ended_total{" not in (await get(other, "/metrics")).text
