"""Structured answers of a fleet whose instances are killed and that lacks memory: each of them validates."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import jsonschema_rs
import pytest

from tests.fleet_pages import RunningFleet, running_fleet
from tests.random_schemas import random_schema

SCHEMAS, AT_ONCE = 200, 12
KILLED_EVERY_S = 4.0


def instance_pids(fleet: RunningFleet) -> list[int]:
    return [instance["ranks"][0]["pid"] for instance in fleet.cluster()["instances"]]


def kill_one_now_and_then(fleet: RunningFleet, is_over: threading.Event, random: Random) -> int:
    """Returns how many were killed."""
    killed = 0
    while not is_over.wait(KILLED_EVERY_S):
        pids = instance_pids(fleet)
        if len(pids) == 4:  # the others are still there to go on
            os.kill(random.choice(pids), signal.SIGKILL)
            killed += 1
    return killed


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_answer_to_random_schemas_validates_with_preemption_and_kills_going_on() -> None:
    random = Random(11)
    schemas = [random_schema(random) for _ in range(SCHEMAS)]
    flags = ("--prefill", "2", "--decode", "2", "--kv-memory", "3MiB", "--context-tokens", "768", "--dead-after-s", "2")
    with running_fleet(*flags) as fleet, ThreadPoolExecutor(AT_ONCE + 1) as pool:

        def ask(number: int) -> tuple[str, str]:
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": f"Number {number}, please. " * (1 + number % 7)}],
                "temperature": 1.0,
                "seed": number,
                "max_tokens": 600,
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schemas[number]}},
            }
            reply = fleet.post("/v1/chat/completions", body)
            assert reply.status == 200, f"{schemas[number]}: {reply.text}"
            (choice,) = reply.json()["choices"]
            return choice["message"]["content"], choice["finish_reason"]

        is_over = threading.Event()
        killer = pool.submit(kill_one_now_and_then, fleet, is_over, random)
        try:
            answers = list(pool.map(ask, range(SCHEMAS)))
        finally:
            is_over.set()
        preempted = sum(value for _, value in fleet.samples("tandem_instance_preemptions_total"))
        resumed = sum(value for _, value in fleet.samples("tandem_resumes_total"))
        print(f"killed {killer.result()}, preempted {preempted} (of those alive now), resumed {resumed}")  # noqa: T201
        assert killer.result() > 2 and resumed > 2
        fleet.wait_until_home()
    ended = [(schema, text) for schema, (text, reason) in zip(schemas, answers, strict=True) if reason == "stop"]
    assert len(ended) > 0.5 * SCHEMAS, "at temperature 1 the demo model writes much white space, so some are cut at max_tokens"
    for schema, text in ended:
        assert jsonschema_rs.is_valid(schema, json.loads(text)), f"{text} to {schema}"
