"""Structured answers of a fleet whose instances are killed and that lacks memory: each of them validates."""

import json
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from tests.random_schemas import Schema, random_schema
from tests.rig.pages import RunningFleet, running_fleet

SCHEMAS, AT_ONCE = 200, 24
BLOCK = 25
"""Short and long answers come in turn, so many of each. The decode instances expect answers like those before, and so they let in
more long ones than there is memory for."""
KILLED_EVERY = 20
"""One instance is killed after so many answers, so that every request gets on between two kills."""
FLAGS = ("--prefill", "2", "--decode", "2", "--kv-memory", "3MiB", "--context-tokens", "768", "--dead-after-s", "2")


def three_of(schema: Schema) -> Schema:
    """A list of three values that the schema holds."""
    parts = {key: part for key, part in schema.items() if key != "$defs"}
    defs = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {"type": "array", "items": parts, "minItems": 3, "maxItems": 3, **defs}


def kill_one_now_and_then(
    fleet: RunningFleet, ended: threading.Semaphore, is_over: threading.Event, random: Random
) -> Counter[str]:
    """ended: released for each answer. Returns how many of each role were killed."""
    killed: Counter[str] = Counter()
    while True:
        for _ in range(KILLED_EVERY):
            ended.acquire()
        while not is_over.is_set() and len(members := fleet.cluster()["instances"]) < 4:
            is_over.wait(0.2)  # the others are still there to go on
        if is_over.is_set():
            return killed
        # A decode instance that is new expects long answers. So each third only is one, or nobody would be preempted.
        role = "decode" if killed.total() % 3 == 1 else "prefill"
        one = random.choice([member for member in members if member["role"] == role])
        os.kill(one["ranks"][0]["pid"], signal.SIGKILL)
        killed[role] += 1


def problem(schema: Schema, text: str) -> str | None:
    try:
        return (
            None
            if jsonschema_rs.is_valid(schema, json.loads(text), validate_formats=True)
            else f"{text!r} does not validate to {schema}"
        )
    except ValueError as error:
        return f"{text!r} to {schema} is no JSON: {error}"


def body(number: int, schema: Schema) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"Number {number}, please. " * (1 + number % 7)}],
        "temperature": 1.0,
        "seed": number,
        "max_tokens": 600,
        "frequency_penalty": 2.0,  # or an answer may be a number that goes on
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_answer_to_random_schemas_validates_with_preemption_and_kills_going_on() -> None:
    random = Random(11)
    drawn = [random_schema(random) for _ in range(SCHEMAS)]
    schemas = [three_of(schema) if number // BLOCK % 2 else schema for number, schema in enumerate(drawn)]
    ended, is_over = threading.Semaphore(0), threading.Event()
    with running_fleet(*FLAGS) as fleet, ThreadPoolExecutor(AT_ONCE + 1) as pool:

        def ask(number: int) -> tuple[str, str]:
            reply = fleet.post("/v1/chat/completions", body(number, schemas[number]))
            assert reply.status == 200, f"{schemas[number]}: {reply.text}"
            ended.release()
            (choice,) = reply.json()["choices"]
            return choice["message"]["content"], choice["finish_reason"]

        killer = pool.submit(kill_one_now_and_then, fleet, ended, is_over, random)
        try:
            answers = list(pool.map(ask, range(SCHEMAS)))
        finally:
            is_over.set()
            ended.release(KILLED_EVERY)
        resumes = {labels["reason"]: value for labels, value in fleet.samples("tandem_resumes_total")}
        fleet.wait_until_home()
    cut = sum(reason == "length" for _, reason in answers)
    print(f"killed {dict(killer.result())}, resumed {resumes}, cut at max_tokens {cut}")  # noqa: T201
    stopped = [(schema, text) for schema, (text, reason) in zip(schemas, answers, strict=True) if reason == "stop"]
    assert len(stopped) + cut == SCHEMAS and cut <= 0.05 * SCHEMAS
    assert [found for schema, text in stopped if (found := problem(schema, text))] == []
    assert killer.result()["prefill"] > 0 and killer.result()["decode"] > 0
    assert resumes["lost_instance"] > 0 and resumes["preempted"] > 0
