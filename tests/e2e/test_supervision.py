"""Processes of a running fleet die or are told to leave: what dies comes back, what leaves stays away, and streams go on.

Real signals, real processes, and no model: a token depends on its request's seed and its position, so one that lacks or comes
twice shows. `tests/life` proves what happens to one request in every phase, and `tests/e2e/test_role_changes.py` kills instances
that compute. The tests share one fleet.
"""

import os
import re
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.rig.client import Request, Streams
from tests.rig.pages import FleetPages, RunningFleet, running_fleet, until
from tests.rig.shared_memory import left_behind, shared_files

ANSWER_TOKENS = 150
"""Answers take three seconds of decode steps, and a fault must hit them in a moment of that."""
FLAGS = ("--executor", "timed", "--step-cost", "0.02,0,0", "--kv-memory", "16MiB", "--decode", "2")
PROMPTS = [f"Count from {number} to 90." for number in range(3, 7)]
PREFILL, DECODE = ["prefill-0"], ["decode-0", "decode-1"]


def begun(fleet: FleetPages) -> Streams:
    """A stream of each prompt, of which a few tokens have come."""
    requests = [Request.completion(prompt, ANSWER_TOKENS, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    streams = Streams(fleet.url, fleet.model(), requests)
    streams.wait_until_begun()
    return streams


def state(fleet: RunningFleet, name: str) -> str | None:
    member = fleet.members().get(name)
    return None if member is None else str(member["state"])


def busiest(fleet: RunningFleet) -> str:
    """The decode instance that has most of the open tokens: how the router divides them depends on the moment."""
    members = fleet.members()
    return max(DECODE, key=lambda name: members[name]["assigned_tokens"])


def pid_of(fleet: RunningFleet, role: str) -> int:
    """The only process of the fleet that runs this role."""
    (pid,) = fleet.running(role)
    return pid


def until_replaced(fleet: RunningFleet, before: dict[str, int], name: str) -> None:
    """Waits until another process has the name of the one that died and the fleet is whole. No other one has changed."""
    until(lambda: instance_pids(fleet).get(name, before[name]) != before[name], f"another {name} has joined")
    fleet.wait_until_whole(*PREFILL, *DECODE)
    after = instance_pids(fleet)
    assert {other for other in before if before[other] != after[other]} == {name}


def instance_pids(fleet: RunningFleet) -> dict[str, int]:
    return {name: member["ranks"][0]["pid"] for name, member in fleet.members().items()}


def resumed(fleet: RunningFleet) -> float:
    """How many attempts the router has followed by another one since it began."""
    return sum(value for _, value in fleet.samples("tandem_resumes_total"))


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    before = shared_files()
    with running_fleet(*FLAGS) as running:
        yield running
        running.wait_until_home()
    assert not left_behind(before)


@pytest.fixture(scope="module")
def undisturbed(fleet: RunningFleet) -> list[list[int]]:
    answers = begun(fleet).end()
    assert [len(answer) for answer in answers] == [ANSWER_TOKENS] * len(PROMPTS)
    return answers


@pytest.fixture
def streams(fleet: RunningFleet, undisturbed: list[list[int]]) -> Streams:
    """Streams that have begun."""
    return begun(fleet)


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
    fleet.wait_until_whole(*PREFILL, *DECODE)


def test_a_router_that_was_killed_comes_back_on_its_ports_and_the_instances_find_it(
    fleet: RunningFleet, undisturbed: list[list[int]]
) -> None:
    before, first = instance_pids(fleet), pid_of(fleet, "router")
    os.kill(first, signal.SIGKILL)
    fleet.wait_until_whole(*PREFILL, *DECODE)
    assert pid_of(fleet, "router") != first and instance_pids(fleet) == before
    assert begun(fleet).end() == undisturbed


def test_a_router_that_is_told_to_stop_lets_its_streams_finish_refuses_others_and_comes_back(
    fleet: RunningFleet, streams: Streams, undisturbed: list[list[int]]
) -> None:
    first = pid_of(fleet, "router")
    os.kill(first, signal.SIGTERM)
    until(lambda: "the router is draining: it takes no more requests" in fleet.unready(), "it drains")
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    refused = httpx.post(f"{fleet.url}/v1/completions", json=body)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert streams.end() == undisturbed
    fleet.wait_until_whole(*PREFILL, *DECODE)
    assert pid_of(fleet, "router") != first


def test_a_router_that_was_stopped_for_ten_seconds_goes_on_and_nothing_is_computed_anew(
    fleet: RunningFleet, streams: Streams, undisturbed: list[list[int]]
) -> None:
    fleet.wait_until_whole(*PREFILL, *DECODE)
    before, resumes = instance_pids(fleet), resumed(fleet)
    router = pid_of(fleet, "router")
    os.kill(router, signal.SIGSTOP)
    time.sleep(10.0)
    os.kill(router, signal.SIGCONT)
    assert streams.end() == undisturbed
    assert resumed(fleet) == resumes and instance_pids(fleet) == before
    fleet.wait_until_whole(*PREFILL, *DECODE)


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
    fleet.wait_until_whole(*PREFILL, *rest)
    assert sorted(instance_pids(fleet)) == [*rest, *PREFILL]
    assert fleet.complete(PROMPTS[0], 5)["usage"]["completion_tokens"] == 5
