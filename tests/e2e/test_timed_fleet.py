"""`launch local --executor timed`: everything but the model. It is traced meanwhile."""

import json
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from bench.trace import TraceRecording, paths_of_requests, slices_of
from tests.rig.pages import RunningFleet, running_fleet

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
