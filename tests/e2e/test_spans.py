"""Traces of a fleet of processes: one request whole, and one whose decode instance is killed, below a client's span.

The collector reads what it gets with the messages of `opentelemetry-proto`. `tests/router/test_reports.py` has the rest.
"""

import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from tests.rig.collector import Collector, collecting, tree, values
from tests.rig.pages import RunningFleet, running_fleet, until

TRACES = {"whole": "11" * 16, "killed": "22" * 16}
PARENT = "33" * 8
FLAGS = ("--executor=timed", "--transport=cma", "--step-cost=0.01,0,0", "--decode=2", "--kv-memory=16MiB")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def fleet(collector: Collector) -> Iterator[RunningFleet]:
    told = ("--otlp-endpoint", collector.url, "--access-log", "--log-format=json", "--log-level=debug")
    with running_fleet(*FLAGS, *told) as running:
        yield running


def sent(fleet: RunningFleet, name: str, *, killed: bool) -> None:
    """A stream of 200 tokens. killed: the decode instance that serves it is, in its middle."""
    headers = {"traceparent": f"00-{TRACES[name]}-{PARENT}-01", "X-Request-Id": name}
    body = {"model": "demo", "prompt": "falcon " * 50, "max_tokens": 200, "stream": True}
    events = 0
    with (
        httpx.Client(base_url=fleet.url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
    ):
        for line in answer.iter_lines():
            events += line.startswith("data: {")
            if killed and events == 10:
                (choice,) = fleet.get(f"/requests/{name}").json()["choices"]
                decode = choice["attempts"][0]["decode"]
                os.kill(fleet.members()[decode]["ranks"][0]["pid"], signal.SIGKILL)
                killed = False
    assert events > 10 and not killed


def test_a_whole_request_and_one_that_is_resumed_after_a_kill_are_traces_below_their_clients_spans(
    fleet: RunningFleet, collector: Collector
) -> None:
    for name in TRACES:
        sent(fleet, name, killed=name == "killed")
    until(lambda: sum(span.parent_span_id.hex() == PARENT for span in collector.spans) == len(TRACES), "their spans are here")
    of = {name: [span for span in collector.spans if span.trace_id.hex() == trace] for name, trace in TRACES.items()}
    whole, killed = (tree(spans) for spans in of.values())
    stages = ["queue", "prefill", "transfer", "exposed transfer", "decode"]
    root = "text_completion demo"
    assert whole[""] == killed[""] == [root] and whole[root] == ["intake", "attempt 0"]
    assert sorted(whole["attempt 0"]) == sorted(stages), "both roles"
    assert killed[root] == ["intake", "attempt 0", "attempt 1"]
    assert "prefill" in killed["attempt 0"] and "decode" not in killed["attempt 0"], "who was killed tells nothing"
    assert "decode" in killed["attempt 1"]
    by_name = {span.name: span for span in of["killed"]}
    first, second = (by_name[f"attempt {number}"] for number in range(2))
    assert values(first.attributes)["tandem.resume_reason"] == "lost_instance"
    assert [link.span_id for link in second.links] == [first.span_id]
    assert sum(values(each.attributes)["tandem.tokens"] for each in (first, second)) == 200
    for spans in of.values():
        within = {span.name: (span.start_time_unix_nano, span.end_time_unix_nano) for span in spans}
        assert all(within[root][0] <= begin <= end <= within[root][1] + 10**9 for begin, end in within.values())


def test_every_line_of_every_process_is_json_and_lines_about_the_request_name_it(fleet: RunningFleet) -> None:
    lines = [json.loads(line) for line in fleet.output.splitlines() if line.startswith("{")]
    of_request = [line for line in lines if "whole" in line.get("request", "")]
    assert {"router", "prefill-0"} < {line["process"] for line in of_request}
    (access,) = [line for line in of_request if line["logger"] == "router.access" and line["path"] == "/v1/completions"]
    assert (access["status"], access["answer_tokens"], access["finish"]) == (200, 200, "length")
    assert {"Generate", "Reserve", "Grant", "Handoff"} <= {line["message"] for line in of_request}
