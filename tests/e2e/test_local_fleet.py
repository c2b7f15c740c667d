"""`launch local` as its users meet it: the openai client, bad input, clients that leave, and Ctrl-C."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from random import Random

import httpx
import jsonschema_rs
import pytest
from openai import OpenAI

from common.access import write_key
from demo import corpus
from tests.random_schemas import random_schema
from tests.rig.pages import RunningFleet, running_fleet, until
from tests.rig.shared_memory import left_behind, shared_files


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Its processes share a cluster key. Ctrl-C at the end leaves no process, socket or shared memory."""
    before = shared_files()
    key = str(tmp_path_factory.mktemp("fleet") / "key")
    write_key(key)
    with running_fleet("--dtype", "float32", "--cluster-key", key) as running:
        yield running
        family = running.family()
        assert len(family) >= 4, "router, detokenizer, prefill and decode"
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family), "no process is left")
    assert not left_behind(before)
    assert not re.search("Traceback", running.output)


@pytest.fixture
def client(fleet: RunningFleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_printed_curl_line_works(fleet: RunningFleet) -> None:
    printed = fleet.output[fleet.output.index("curl ") :].replace("\\\n", " ").split("\n")[0]
    done = subprocess.run(shlex.split(printed), capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_openai_client_gets_the_same_answer_streamed_and_whole(client: OpenAI) -> None:
    (turn,) = corpus.held_out("retrieval", 60, 1).turns
    whole = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": turn.user}], temperature=0, max_tokens=40
    )
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": turn.user}],
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text == turn.answer
    assert whole.choices[0].finish_reason == "stop"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_choices_of_a_seeded_request_are_repeatable_and_differ(client: OpenAI) -> None:
    def sample() -> list[str]:
        answer = client.completions.create(
            model="demo", prompt="Hello", temperature=1.5, seed=7, n=3, max_tokens=20, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first = sample()
    assert sample() == first and len(set(first)) == 3


def test_a_stop_string_ends_the_answer_and_is_trimmed(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Count from 3 to 9."}], temperature=0, stop=["6"]
    )
    assert answer.choices[0].message.content == "3 4 5 "
    assert answer.choices[0].finish_reason == "stop"


APART_S = 0.1
"""Each process reads the host's two clocks once, one after the other: so far may those of two processes be apart."""


def test_the_timeline_of_a_chat_goes_through_router_prefill_and_decode_in_order(fleet: RunningFleet) -> None:
    answer = fleet.complete("Hello", 8, ignore_eos=True)
    fleet.wait_until_home()  # so both instances have told of it
    (choice,) = fleet.get(f"/requests/{answer['id']}").json()["choices"]
    (attempt,) = choice["attempts"]
    prefill, decode = (told["times"] for told in attempt["instances"])
    assert [told["role"] for told in attempt["instances"]] == ["prefill", "decode"]
    assert (choice["tokens"], choice["ending"], prefill["pages_pushed"]) == (8, "length", decode["pages_pushed"])
    course = [choice["received_s"], choice["tokenized_s"], attempt["dispatched_s"], prefill["accepted_s"], prefill["admitted_s"]]
    course += [prefill["last_chunk_s"], prefill["handed_off_s"], decode["handed_off_s"], decode["first_decode_s"]]
    course += [decode["ended_s"], choice["ended_s"]]
    assert all(later > earlier - APART_S for earlier, later in pairwise(course))
    durations = choice["durations"]
    parts = durations["queue_s"] + durations["prefill_s"] + durations["exposed_transfer_s"] + durations["decode_s"]
    assert 0 < parts < durations["e2e_s"] and durations["time_to_first_token_s"] > 0
    assert 0 <= durations["transfer_s"] < durations["e2e_s"]  # by the clocks of two processes, so a short one may be 0


BAD_BODIES: list[tuple[str, dict[str, object], int, str | None]] = [
    ("unknown field", {"temprature": 1}, 400, "temprature"),
    ("wrong type", {"max_tokens": "many"}, 400, "max_tokens"),
    ("empty messages", {"messages": []}, 400, "messages"),
    ("prompt too long", {"messages": [{"role": "user", "content": "falcon " * 9000}]}, 400, "messages"),
    ("unknown model", {"model": "gpt-9"}, 404, "model"),
    ("n out of range", {"n": 1000}, 400, "n"),
    ("temperature out of range", {"temperature": -1}, 400, "temperature"),
    ("a field that is not built", {"audio": {"voice": "x"}}, 400, "audio"),
]


@pytest.mark.parametrize(("change", "status", "field"), [row[1:] for row in BAD_BODIES], ids=[row[0] for row in BAD_BODIES])
def test_bad_input_is_named_and_the_server_goes_on(
    fleet: RunningFleet, change: dict[str, object], status: int, field: str | None
) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5} | change
    answer = fleet.post("/v1/chat/completions", body)
    assert answer.status == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == field and error["message"] and error["type"]
    assert fleet.complete("Hello", 2)["choices"]


def test_a_body_that_is_not_json_is_refused(fleet: RunningFleet) -> None:
    answer = fleet.post("/v1/chat/completions", b"{")
    assert answer.status == 400 and "JSON" in answer.json()["error"]["message"]


def _leave_in_mid_stream(fleet: RunningFleet, number: int) -> None:
    """Read a few chunks of a long answer, then hang up."""
    words = ["falcon"] * (10 + 37 * (number % 9))
    body = {
        "model": "demo", "prompt": " ".join(words), "max_tokens": 600, "ignore_eos": True, "stream": True, "temperature": 1.0,
    }  # fmt: skip
    with httpx.Client(base_url=fleet.url, timeout=60) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for count, _ in enumerate(answer.iter_lines()):
            if count >= number % 7:
                return


def test_memory_comes_home_after_many_clients_left_in_mid_stream(fleet: RunningFleet) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: _leave_in_mid_stream(fleet, number), range(40)))
    cluster = fleet.wait_until_home()
    assert all(instance["counters"]["requests_accepted"] for instance in cluster["instances"])
    assert fleet.complete("Hello", 3)["usage"]["completion_tokens"] <= 3


def test_the_pages_of_the_api_answer(fleet: RunningFleet) -> None:
    assert fleet.get("/health").status == 200
    assert fleet.get("/ready").status == 200
    cluster = fleet.cluster()
    assert sorted(instance["role"] for instance in cluster["instances"]) == ["decode", "prefill"]
    for instance in cluster["instances"]:
        assert instance["ranks"][0]["pid"] > 0 and instance["peers"]
        assert instance["role"] == "decode" or instance["links"] == {"ready": instance["usable"]}
    told = fleet.get("/cluster?links=prefill-0").json()
    assert sorted(link["peer"] for link in told["links"]) == ["decode-0"]
    assert all(link["state"] == "ready" and link["traffic"]["pushes"] >= 0 for link in told["links"])
    assert fleet.get("/nowhere").json()["error"]["message"]


def test_structured_answers_match_and_what_cannot_be_says_where(fleet: RunningFleet) -> None:
    random = Random(2)
    schemas = [random_schema(random) for _ in range(6)]

    def ask(number: int) -> str:
        asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schemas[number]}}
        answer = fleet.complete("A record:", 600, temperature=1.0, seed=number, response_format=asked)["choices"][0]
        assert answer["finish_reason"] == "stop"
        return str(answer["text"])

    with ThreadPoolExecutor(6) as pool:
        for schema, text in zip(schemas, pool.map(ask, range(6)), strict=True):
            assert jsonschema_rs.is_valid(schema, json.loads(text)), (schema, text)
    choices = ["a falcon", 'quoted "so"', "é"]
    for fields, matches in (
        ({"guided_choice": choices}, lambda text: text in choices),
        ({"structured_outputs": {"regex": r"\d{3}-\d{4}"}}, lambda text: re.fullmatch(r"\d{3}-\d{4}", text)),
        ({"ebnf": 'root ::= "[" ("x" | root) "]"'}, lambda text: re.fullmatch(r"(\[)+x\]+", text)),
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ):
        answers = fleet.complete("Say:", 200, temperature=0.9, seed=3, n=8, **fields)["choices"]
        texts = [answer["text"] for answer in answers if answer["finish_reason"] == "stop"]
        assert texts and all(map(matches, texts)), (fields, answers)
    for refused, says in (
        ({"guided_json": {"type": "array", "uniqueItems": True}}, r"guided_json: at \$: uniqueItems is not supported"),
        ({"regex": "(a"}, "regex: Regex parsing error at position 3"),
    ):
        answer = fleet.post("/v1/completions", {"model": "demo", "prompt": "a", **refused})
        error = answer.json()["error"]
        assert answer.status == 400 and error["type"] == "invalid_request_error" and re.search(says, error["message"])
