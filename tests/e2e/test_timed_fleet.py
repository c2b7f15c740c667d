"""`launch local --executor timed`, traced meanwhile, as trainers call it, and with two routers of which one dies: everything but
the model.

`tests/life` proves what instances do about the requests of a dead router; here the kernel says that it is gone.
"""

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing

import httpx
import pytest

from bench.trace import TraceRecording, paths_of_requests, slices_of
from tests.e2e.trainers_calls import ROUNDS, SAMPLING, Call, slime
from tests.rig.client import Request, Streams
from tests.rig.pages import FleetPages, RunningFleet, running_fleet, until
from tests.rig.shared_memory import left_behind, shared_files

TOKENS = 20
PROMPT = "falcon " * 100
TRACE_S = 2.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    by_caches = ("--prefill-policy", "cache_aware", "--decode-policy", "cache_aware")
    timed = ("--executor", "timed", "--step-cost", "0.002,0,0", "--kv-memory", "16MiB", "--verify-pages", "on")
    with running_fleet(*timed, *by_caches) as running:
        yield running


def test_a_fleet_without_a_model_streams_an_answer_whose_prompt_was_pushed_page_by_page(fleet: RunningFleet) -> None:
    with closing(TraceRecording(fleet.url)) as recording:
        recording.begin(TRACE_S)
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        with httpx.Client(base_url=fleet.url, timeout=60) as client:
            lines = [line.removeprefix("data: ") for line in client.post("/v1/completions", json=body).text.splitlines()]
        events = [json.loads(line)["choices"][0] for line in lines if line.startswith("{")]
        text = "".join(event["text"] for event in events)
        assert len(text.split()) == TOKENS and text.replace(" ", "").isalpha()
        assert events[-1]["finish_reason"] == "length"
        decode = next(i for i in fleet.wait_until_home()["instances"] if i["role"] == "decode")
        assert decode["counters"]["pages_received"] >= 100 // 16 and not decode["counters"]["pages_corrupt"]
        status, spans = recording.spans()
        slices = slices_of(spans, status.began_s)
        assert all(process.over and process.spans and not process.dropped for process in status.processes)
        (way,) = paths_of_requests(slices)
        tracks = [each.span.track for each in way]
        assert tracks[:3] == ["requests", "attempts", "chunks"] and tracks[-2:] == ["starts", "answers"], tracks
        pushed = [each.span.args["bytes"] for each in slices if each.span.track == "pushes"]
        prefill = next(i for i in fleet.cluster()["instances"] if i["role"] == "prefill")
        assert sum(map(int, pushed)) == prefill["counters"]["bytes_pushed"] == decode["counters"]["bytes_received"]


def test_two_tenants_share_no_page_and_a_flush_leaves_none(fleet: RunningFleet) -> None:
    """What was asked before without a salt is nobody's either."""

    def cached(salt: str) -> int:
        usage = fleet.complete(PROMPT, 2, cache_salt=salt)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        assert found in (0, (usage["prompt_tokens"] - 1) // 16 * 16)
        return found

    assert [cached(salt) > 0 for salt in ("one", "other", "one", "other")] == [False, False, True, True]
    assert fleet.post("/flush_cache", {}).status == 200
    assert [cached("one") > 0 for _ in range(2)] == [False, True]


# --- what trainers send ---------------------------------------------------------------------------------------------------------


def ask(fleet: RunningFleet, call: Call) -> httpx.Response:
    """As `requests.post(url, json=body)` does."""
    with httpx.Client(base_url=fleet.url, timeout=60) as client:
        return client.request(call.method, call.path, json=call.body)


@pytest.mark.parametrize("calls", ROUNDS.values(), ids=list(ROUNDS))
def test_clients_are_answered_as_they_expect(fleet: RunningFleet, calls: Sequence[Call]) -> None:
    for call in calls:
        answer = ask(fleet, call)
        assert answer.status_code == call.status, f"{call}: {answer.text}"
        body = answer.json()  # slime's and SGLang's clients read JSON of every answer, also where they look at nothing in it
        for name, value in call.reads.items():
            assert body[name] == value, f"{call}: {name}"
        if call.status == 400:
            error = body["error"]
            assert error["param"] == (call.refused or None) and call.refused in error["message"], f"{call}: {error}"
            assert not call.refused or len(error["message"]) > len(call.refused) + 20  # it says what to do instead


def test_a_trainer_reads_tokens_their_log_probabilities_and_weights_of_an_answer(fleet: RunningFleet) -> None:
    body = {"sampling_params": SAMPLING, "return_logprob": True, "input_ids": [5, 6, 7]}
    answer = ask(fleet, slime("POST", "/generate", body)).json()
    meta = answer["meta_info"]
    assert len(meta["output_token_logprobs"]) == 4
    assert [token for _, token, *_ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["finish_reason"]["type"] == "length" and isinstance(answer["text"], str)
    assert meta["weight_version"] == fleet.get("/weight_info").json()["weight_version"]
    assert meta["prompt_tokens"] == 3 and "cached_tokens" in meta


# --- two routers ----------------------------------------------------------------------------------------------------------------

FILE = """
executor = "timed"
step-cost = "0.01,0,0"
transport = "cma"
kv-memory = "16MiB"
max-running = 32

[local]
decode = 9

[prefill]
max-running = 4

[decode]
max-running = 16
"""
NAMES = ("prefill-0", "decode-0")
STREAM_TOKENS = 200
EACH = 4
_OWN = re.compile(r"^router-\d .*\bown (http://\S+?),", re.MULTILINE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """A fleet with two routers, whose flags are in a file, and whose metrics have other names too."""
    file = tmp_path_factory.mktemp("pair") / "fleet.toml"
    file.write_text(FILE)
    before = shared_files()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TANDEM_MAX_RUNNING": "3", "TANDEM_EXECUTOR": "torch", "TANDEM_OF_NOBODY": "1"}.items():
            patch.setenv(name, value)
        with running_fleet(f"--config={file}", "--decode=1", "--routers=2", "--metric-aliases=vllm") as running:
            yield running
    assert not left_behind(before)


def test_a_fleet_that_a_measurement_starts_reads_the_file_that_its_flags_name_and_no_variable(pair: RunningFleet) -> None:
    assert {name: member["max_running"] for name, member in pair.members().items()} == {"prefill-0": 4, "decode-0": 16}
    pair.complete("falcon", 5)
    served = 'vllm:e2e_request_latency_seconds_count{model_name="demo"} 1.0'
    until(lambda: served in pair.get("/metrics").text, "the router that has served it is asked", 60)
    running = 'vllm:num_requests_running{model_name="demo",engine="decode-0",engine_type="decode"} 0'
    until(lambda: running in pair.get("/metrics").text, "the instance has reported", 60)


def test_one_of_two_routers_is_killed_and_the_streams_of_the_other_finish_unharmed(pair: RunningFleet) -> None:
    urls = _OWN.findall(pair.output)
    assert len(set(urls)) == 2
    for one, other in (urls, urls[::-1]):
        name = FleetPages(one).complete("falcon", 3)["id"]
        found = FleetPages(other).get(f"/requests/{name}")
        assert found.status == 200 and found.json()["id"] == name, "a request is found at any router behind the port"
        assert FleetPages(other).get(f"/requests/{name}?here=true").status == 404
    streams = {url: Streams(url, "demo", [Request.completion("falcon " * 40, STREAM_TOKENS)] * EACH) for url in urls}
    for several in streams.values():
        several.wait_until_begun()
    os.kill(pair.running("router")[0], signal.SIGKILL)
    (dead,) = [url for url in urls if streams[url].wait_until_over()[0].errors]
    (survivor,) = [url for url in urls if url != dead]
    assert all("the stream broke off" in answer.errors[0] for answer in streams[dead].answers)
    assert [len(tokens) for tokens in streams[survivor].end()] == [STREAM_TOKENS] * EACH
    pages = FleetPages(survivor)
    pages.wait_until_home(NAMES)
    assert not any(value for _, value in pages.samples("tandem_resumes_total")), "nothing was computed anew"
    until(FleetPages(dead).is_ready, "it is back at its port, and the instances have found it")
    assert FleetPages(dead).complete("falcon", 3)["usage"]["completion_tokens"] == 3
