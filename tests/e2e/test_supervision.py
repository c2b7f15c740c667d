"""Processes of a running fleet die or are told to leave: what dies comes back, what leaves stays away, and streams go on.

Real signals, real processes; `tests/life` proves what happens to one request in every phase. The tests share one fleet. They are
slow because a process that died must load torch, the model and the transport again before it is back.
"""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from launch.fleet_page import FleetPage
from tests.fleet_pages import FleetPages, RunningFleet, running_fleet
from tests.shared_memory import left_behind, shared_files

PATIENCE_S = 120.0
ANSWER_TOKENS = 1200
"""Answers take seconds of decode steps, and a fault must hit them in a moment of that."""
PROMPTS = [f"Count from {number} to 90." for number in range(3, 7)]
PREFILL, DECODE = ["prefill-0"], ["decode-0", "decode-1"]


@dataclass
class Stream:
    """What a client has read of a streamed answer so far."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Streams:
    """Several greedy answers, streamed at the same time."""

    def __init__(self, fleet: FleetPages) -> None:
        self._fleet = fleet
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self._model = fleet.model()
        self.open = [Stream() for _ in PROMPTS]
        self._ends: list[Future[None]] = []

    def begin(self) -> None:
        """Returns when every stream has brought a few tokens."""
        self._ends = [self._pool.submit(self._read, *pair) for pair in zip(PROMPTS, self.open, strict=True)]
        until(lambda: all(len(stream.token_ids) > 5 for stream in self.open), "every stream has begun")
        assert not any(end.done() for end in self._ends), "the streams are long enough for a fault to hit them"

    def end(self) -> list[list[int]]:
        """Waits until all have ended as they should. Returns the tokens of each answer."""
        for end in self._ends:
            end.result(PATIENCE_S)
        self._pool.shutdown()
        assert [stream.finish_reason for stream in self.open] == ["length"] * len(PROMPTS)
        return [stream.token_ids for stream in self.open]

    def _read(self, prompt: str, stream: Stream) -> None:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        with (
            httpx.Client(base_url=self._fleet.url, timeout=PATIENCE_S) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    (choice,) = chunk["choices"]
                    stream.token_ids += choice.get("token_ids") or []
                    stream.finish_reason = choice["finish_reason"] or stream.finish_reason


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


def until_whole(fleet: RunningFleet, decode: list[str]) -> None:
    """Waits until every member is there and linked and the router takes requests."""
    page = FleetPage(fleet.url)
    until(lambda: not page.missing(PREFILL, decode) and fleet.is_ready(), "the fleet is whole")


def state(fleet: RunningFleet, name: str) -> str | None:
    states = {instance["id"]: instance["state"] for instance in fleet.cluster()["instances"]}
    return states.get(name)


def busiest(fleet: RunningFleet) -> str:
    """The decode instance that has most of the open tokens: how the router divides them depends on the moment."""
    tokens = {instance["id"]: instance["assigned_tokens"] for instance in fleet.cluster()["instances"]}
    return max(DECODE, key=lambda name: tokens[name])


def pid_of(fleet: RunningFleet, role: str) -> int:
    """The only process of the fleet that runs this role."""
    found = []
    for pid in fleet.family():
        with contextlib.suppress(OSError):  # the process has just ended
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found += [pid] if "launch.main" in words and role in words else []
    (pid,) = found
    return pid


def until_replaced(fleet: RunningFleet, before: dict[str, int], name: str) -> None:
    """Waits until another process has the name of the one that died and the fleet is whole. No other one has changed."""
    until(lambda: instance_pids(fleet).get(name, before[name]) != before[name], f"another {name} has joined")
    until_whole(fleet, DECODE)
    after = instance_pids(fleet)
    assert {other for other in before if before[other] != after[other]} == {name}


def instance_pids(fleet: RunningFleet) -> dict[str, int]:
    return {instance["id"]: instance["ranks"][0]["pid"] for instance in fleet.cluster()["instances"]}


def resumed(fleet: RunningFleet) -> float:
    """How many attempts the router has followed by another one since it began."""
    lines = httpx.get(f"{fleet.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tandem_resumes_total{"))


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    before = shared_files()
    with running_fleet("--dtype", "float32", "--decode", "2", "--grammar", "off") as running:
        yield running
        running.wait_until_home()
    assert not left_behind(before)


@pytest.fixture(scope="module")
def undisturbed(fleet: RunningFleet) -> list[list[int]]:
    streams = Streams(fleet)
    streams.begin()
    answers = streams.end()
    assert [len(answer) for answer in answers] == [ANSWER_TOKENS] * len(PROMPTS)
    return answers


@pytest.fixture
def streams(fleet: RunningFleet, undisturbed: list[list[int]]) -> Streams:
    """Streams that have begun."""
    made = Streams(fleet)
    made.begin()
    return made


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_an_instance_that_was_killed_comes_back_and_its_streams_go_on(
    fleet: RunningFleet, streams: Streams, undisturbed: list[list[int]], role: str
) -> None:
    before = instance_pids(fleet)
    victim = busiest(fleet) if role == "decode" else "prefill-0"
    os.kill(before[victim], signal.SIGKILL)
    assert streams.end() == undisturbed
    until_replaced(fleet, before, victim)
    assert re.search(rf"^{victim} +ended, and is started again in \S+ s: killed by SIGKILL$", fleet.output, re.MULTILINE)


def test_a_detokenizer_that_was_killed_comes_back_and_no_stream_notices(
    fleet: RunningFleet, streams: Streams, undisturbed: list[list[int]]
) -> None:
    router, first, resumes = pid_of(fleet, "router"), pid_of(fleet, "detokenizer"), resumed(fleet)
    os.kill(first, signal.SIGKILL)
    assert streams.end() == undisturbed
    assert resumed(fleet) == resumes, "the tokens were told again"
    assert pid_of(fleet, "router") == router and pid_of(fleet, "detokenizer") != first
    until_whole(fleet, DECODE)


def test_a_router_that_was_killed_comes_back_on_its_ports_and_the_instances_find_it(
    fleet: RunningFleet, undisturbed: list[list[int]]
) -> None:
    before, first = instance_pids(fleet), pid_of(fleet, "router")
    os.kill(first, signal.SIGKILL)
    until_whole(fleet, DECODE)
    assert pid_of(fleet, "router") != first and instance_pids(fleet) == before
    streams = Streams(fleet)
    streams.begin()
    assert streams.end() == undisturbed


def test_a_router_that_is_told_to_stop_lets_its_streams_finish_refuses_others_and_comes_back(
    fleet: RunningFleet, streams: Streams, undisturbed: list[list[int]]
) -> None:
    first = pid_of(fleet, "router")
    os.kill(first, signal.SIGTERM)
    until(lambda: "the router is draining: it takes no more requests" in httpx.get(f"{fleet.url}/ready").text, "it drains")
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    refused = httpx.post(f"{fleet.url}/v1/completions", json=body)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert streams.end() == undisturbed
    until_whole(fleet, DECODE)
    assert pid_of(fleet, "router") != first


def test_a_router_that_was_stopped_for_ten_seconds_goes_on_and_nothing_is_computed_anew(
    fleet: RunningFleet, streams: Streams, undisturbed: list[list[int]]
) -> None:
    until_whole(fleet, DECODE)
    before, resumes = instance_pids(fleet), resumed(fleet)
    router = pid_of(fleet, "router")
    os.kill(router, signal.SIGSTOP)
    time.sleep(10.0)
    os.kill(router, signal.SIGCONT)
    assert streams.end() == undisturbed
    assert resumed(fleet) == resumes and instance_pids(fleet) == before
    until_whole(fleet, DECODE)


def test_an_instance_that_is_told_twice_to_stop_ends_at_once_and_comes_back(
    fleet: RunningFleet, streams: Streams, undisturbed: list[list[int]]
) -> None:
    before, victim = instance_pids(fleet), busiest(fleet)
    os.kill(before[victim], signal.SIGTERM)
    until(lambda: state(fleet, victim) == "draining", "it drains")
    os.kill(before[victim], signal.SIGTERM)
    assert streams.end() == undisturbed
    until_replaced(fleet, before, victim)
    assert re.search(rf"^{victim} +ended, and is started again in \S+ s: told again to stop", fleet.output, re.MULTILINE)


def test_an_instance_that_is_told_to_stop_finishes_its_streams_and_stays_away(
    fleet: RunningFleet, streams: Streams, undisturbed: list[list[int]]
) -> None:
    """The last test of the fleet, which has one instance less from here on."""
    victim = busiest(fleet)
    os.kill(instance_pids(fleet)[victim], signal.SIGTERM)
    assert streams.end() == undisturbed
    until(lambda: f"{victim}     has left as it was told, and is not started again" in fleet.output, "it has left")
    rest = [name for name in DECODE if name != victim]
    until_whole(fleet, rest)
    assert sorted(instance_pids(fleet)) == [*rest, *PREFILL]
    assert fleet.complete(PROMPTS[0], 5)["usage"]["completion_tokens"] == 5
