"""SGLang's /generate and /abort_request, as its own clients use them."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from common.ids import unpack_ids
from router.api import intake
from router.api.sglang import GENERATE, PARAMETERS
from tests.router.calls import assert_error, events, post, prompt, sent_to_fleet, until
from tests.router.fakes import CharTokenizer, EchoFleet, Site

pytestmark = pytest.mark.anyio


async def test_one_prompt_gets_one_answer_and_a_batch_gets_a_list(site: Site) -> None:
    one = (await post(site, "/generate", prompt(rid="mine"))).json()
    assert one == {
        "text": "hel",
        "output_ids": [104, 101, 108],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "weight_version": "",
            "weight_versions": [],
        },
    }
    batch = (await post(site, "/generate", prompt(["ab", "cd"], rid=["x", "y"]))).json()
    assert [(part["text"], part["meta_info"]["id"]) for part in batch] == [("aba", "x"), ("cdc", "y")]
    ids = {"input_ids": [[97], [98, 99]], "sampling_params": {"max_new_tokens": 2, "n": 2}}
    assert [part["text"] for part in (await post(site, "/generate", ids)).json()] == ["aa", "aa", "bc", "bc"]


async def test_the_cache_salt_has_sglangs_name_too(site: Site) -> None:
    assert (await post(site, "/generate", prompt(extra_key="tenant"))).status_code == 200
    assert [message.salt for message in sent_to_fleet(site)] == ["tenant"]
    differ = await post(site, "/generate", prompt(extra_key="tenant", cache_salt="other"))
    assert_error(differ, 400, "invalid_request_error", "extra_key")


async def test_each_rid_of_a_batch_stands_for_all_choices_of_its_prompt() -> None:
    async with Site(EchoFleet(stall_at=2)) as site:
        body = prompt(["abc", "def"], rid=["one", "two"]) | {"sampling_params": {"max_new_tokens": 5, "n": 2}}
        answer = asyncio.create_task(post(site, "/generate", body))
        await until(lambda: len(site.core.requests) == 4)
        for rid, ended in (("one", 2), ("two_1", 1), ("two", 1), ("one_0", 0)):
            assert (await post(site, "/abort_request", {"rid": rid})).json() == {"aborted": ended}
        assert [one["meta_info"]["id"] for one in (await answer).json()] == ["one_0", "one_1", "two_0", "two_1"]


async def test_each_event_of_a_stream_repeats_the_answer_so_far(site: Site) -> None:
    parts = events(await post(site, "/generate", prompt(stream=True)))
    assert [part["text"] for part in parts] == ["h", "he", "hel"]
    assert [part["output_ids"] for part in parts] == [[104], [104, 101], [104, 101, 108]]
    assert [part["meta_info"]["finish_reason"] for part in parts] == [None, None, {"type": "length", "length": 3}]
    batch = events(await post(site, "/generate", prompt(["ab", "cd"], stream=True)))
    assert {part["index"]: part["text"] for part in batch} == {0: "aba", 1: "cdc"}


async def test_sampling_parameters_reach_the_fleet_under_our_names(site: Site) -> None:
    given = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0,
        "top_k": 7,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -1},
        "sampling_seed": 3,
        "stop": "lo",
        "stop_token_ids": [9],
    }
    answer = (await post(site, "/generate", {"input_ids": [104, 101, 108, 108, 111], "sampling_params": given})).json()
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("hel" + "l", {"type": "stop", "matched": "lo"})
    (sent,) = sent_to_fleet(site)
    sampling = sent.sampling
    assert unpack_ids(sent.prompt).tolist() == [104, 101, 108, 108, 111]
    assert (sampling.max_new_tokens, sampling.min_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (9, 2, 0, 7, 3)
    assert (sampling.frequency_penalty, sampling.logit_bias, sampling.stop_token_ids) == (0.5, ((7, -1.0),), (9,))


async def test_fields_of_sglang_that_ask_for_nothing_are_accepted_and_others_refused_by_name(site: Site) -> None:
    nothing = {name: next(iter(values), None) for name, values in GENERATE.values.items()}
    parameters = {name: next(iter(values), None) for name, values in PARAMETERS.values.items()}
    body = prompt() | nothing | {"sampling_params": {"max_new_tokens": 3} | parameters}
    assert (await post(site, "/generate", body)).json()["text"] == "hel"
    for name in GENERATE.values:
        assert_error(await post(site, "/generate", prompt() | {name: "something"}), 400, "invalid_request_error", name)


async def test_an_aborted_request_ends_with_what_it_has_got() -> None:
    async with Site(EchoFleet(stall_at=2)) as site:
        whole = asyncio.create_task(post(site, "/generate", prompt(rid="a")))
        stream = asyncio.create_task(post(site, "/generate", prompt(["ab", "cd"], rid=["b", "c"], stream=True)))
        other = asyncio.create_task(named(site, "other"))
        await until(lambda: sum(len(record.token_ids) for record in site.core.requests.records()) == 8)
        assert (await post(site, "/abort_request", {"rid": "a"})).json() == {"aborted": 1}
        aborted = (await whole).json()
        assert (aborted["text"], aborted["meta_info"]["finish_reason"]["type"]) == ("he", "abort")
        assert (await post(site, "/abort_request", {"rid": "c"})).json() == {"aborted": 1}
        assert len(site.core.requests) == 2 and not stream.done()
        assert (await post(site, "/abort_request", {"rid": "other"})).json() == {"aborted": 1}
        assert (await other).json()["choices"][0]["finish_reason"] == "abort"
        assert (await post(site, "/abort_request", {"abort_all": True})).json() == {"aborted": 1}
        parts = [json.loads(part.removeprefix("data: ")) for part in (await stream).text.split("\n\n")[:-2]]
        assert {
            part["index"]: part["meta_info"]["finish_reason"]["type"] for part in parts if part["meta_info"]["finish_reason"]
        } == {
            0: "abort",
            1: "abort",
        }
        assert (await post(site, "/abort_request", {"rid": "a"})).json() == {"aborted": 0}
        assert len(site.core.requests) == len(site.core.requests.clients) == 0
        assert_error(await post(site, "/abort_request", {}), 400, "invalid_request_error", "rid")


@pytest.mark.parametrize(
    ("aborts", "counts", "ended"),
    [
        ([{"rid": "b"}], [1], ["length", "abort"]),
        ([{"rid": "other"}], [0], ["length", "length"]),
        ([{"rid": "a"}, {"abort_all": True}, {"rid": "a"}], [1, 1, 0], ["abort", "abort"]),
    ],
)
async def test_a_request_is_aborted_while_its_prompt_is_tokenized(
    site: Site, monkeypatch: pytest.MonkeyPatch, aborts: list[dict[str, Any]], counts: list[int], ended: list[str]
) -> None:
    monkeypatch.setattr(intake, "SHORT_CHARS", 0)
    encoding, go = threading.Event(), threading.Event()

    def encode(_: CharTokenizer, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        encoding.set()
        go.wait(60)
        return list(map(ord, text))

    monkeypatch.setattr(CharTokenizer, "encode", encode)
    answer = asyncio.create_task(post(site, "/generate", prompt(["xy", "xy"], rid=["a", "b"])))
    await until(encoding.is_set)
    assert [(await post(site, "/abort_request", abort)).json()["aborted"] for abort in aborts] == counts
    go.set()
    assert [one["meta_info"]["finish_reason"]["type"] for one in (await answer).json()] == ended
    assert len(site.core.requests) == len(site.core.requests.clients) == 0


async def named(site: Site, request_id: str) -> httpx.Response:
    async with site.client() as client:
        body = {"model": "echo", "prompt": "xy", "max_tokens": 5}
        return await client.post("/v1/completions", json=body, headers={"x-request-id": request_id})
