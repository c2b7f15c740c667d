"""Conversations of ten turns against two fleets of real processes, with prefix caches and without: what does each turn take?

Owns the comparison. Each fleet is one prefill and one decode instance with the demo model, on this machine. One request is open
at a time, and every turn goes to both fleets before the next, so that other work of the machine affects both alike. A turn's
prompt is that of the turn before, its answer, and new random words. Prints a Markdown table; judges nothing.

    python -m tests.bench.turns --turns 10 --conversations 4
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from bench.client import HttpClient, TimedAnswer
from bench.options import ServeOptions, WorkloadOptions
from bench.report import machine_line, markdown_table, say, this_hardware
from bench.workloads import RequestBodies, sessions_of
from common.config import DEMO_MODEL
from common.options import Switch
from common.processes.local_fleet import connected, local_fleet

CACHES: tuple[Switch, ...] = get_args(Switch)
INSTANCES = 2
HEARTBEAT_S = 0.2
"""Counters come with heartbeats."""
COUNTED_S, LOOK_S = 60.0, 0.02


@dataclass(slots=True)
class Turn:
    """What one turn of every conversation took. prompt_tokens: of the last one; they differ by nothing."""

    prompt_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    pushed_bytes: list[int] = field(default_factory=list)


def serve(url: str, body: bytes, answer_tokens: int) -> tuple[TimedAnswer, int]:
    """Send one completion, and wait until every instance has counted it. Returns the answer, and the bytes that were pushed."""

    async def ask() -> None:
        client = HttpClient(url, "/v1/completions", {}, COUNTED_S, keeps_text=True)
        answer.begin(time.perf_counter())
        await client.ask(answer, body)
        client.close()

    answer, before, deadline = TimedAnswer(0.0, answer_tokens), totals(url), time.monotonic() + COUNTED_S
    asyncio.run(ask())
    assert not answer.error and answer.counted == answer_tokens, answer.message
    while (now := totals(url))["requests_ended"] - before["requests_ended"] < INSTANCES:
        assert time.monotonic() < deadline, f"an answered request is not over on each instance: {now}"
        time.sleep(LOOK_S)
    return answer, now["bytes_pushed"] - before["bytes_pushed"]


def totals(url: str) -> dict[str, int]:
    """Counters of all instances of a fleet, added up."""
    with connected(url) as connection:
        connection.request("GET", "/cluster")
        instances = json.loads(connection.getresponse().read())["instances"]
    return {name: sum(each["counters"][name] for each in instances) for name in ("requests_ended", "bytes_pushed")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--input-tokens", type=int, default=256, help="that each turn adds")
    parser.add_argument("--output-tokens", type=int, default=32)
    flags = parser.parse_args()
    hardware = this_hardware()
    options = WorkloadOptions(
        dataset_name="conversation",
        num_prompts=flags.conversations,
        conversation_turns=flags.turns,
        random_input_len=flags.input_tokens,
        random_output_len=flags.output_tokens,
    )
    load = ServeOptions(workload=options)
    sessions, bodies = sessions_of(load, DEMO_MODEL), RequestBodies(load, DEMO_MODEL, "continuous")
    found = {cache: [Turn() for _ in range(flags.turns)] for cache in CACHES}
    common = ("--threads=1", f"--heartbeat-s={HEARTBEAT_S}", "--log-level=warning")
    with contextlib.ExitStack() as stack:
        urls = {cache: stack.enter_context(local_fleet(f"--prefix-cache={cache}", *common)).url for cache in CACHES}
        for number, session in enumerate((sessions.warmups[0], *sessions.measured)):
            say(f"conversation {number} of {flags.conversations}, load {os.getloadavg()[0]:.1f}")
            chance = random.Random(number)
            texts: dict[Switch, list[str]] = {cache: [] for cache in CACHES}
            for turn in range(flags.turns):
                for cache in chance.sample(CACHES, len(CACHES)):
                    answer, pushed = serve(urls[cache], bodies.body(session, texts[cache]), flags.output_tokens)
                    texts[cache].append(answer.text)
                    if number:  # the first one is not measured: memory and links have been used then
                        of = found[cache][turn]
                        of.prompt_tokens = answer.prompt_tokens
                        of.first_s.append(answer.ttft_s)
                        of.pushed_bytes.append(pushed)
            assert texts["on"] == texts["off"], "a prefix cache has changed an answer"
    sys.stdout.write(f"{machine_line(hardware, f'{os.getloadavg()[0]:.1f} at the end')}\n\n{markdown_table(lines(found))}\n")


def lines(found: dict[Switch, list[Turn]]) -> list[tuple[str, ...]]:
    head = ("turn", "prompt tokens", "first token, ms: on", "off", "KiB pushed: on", "off")
    rows: list[tuple[str, ...]] = [head]
    for number, turns in enumerate(zip(*(found[cache] for cache in ("on", "off")), strict=True), start=1):
        first = [f"{1e3 * np.median(turn.first_s):.0f} ({1e3 * max(turn.first_s):.0f})" for turn in turns]
        pushed = [f"{np.mean(turn.pushed_bytes) / 1024:.0f}" for turn in turns]
        rows.append((str(number), str(turns[0].prompt_tokens), *first, *pushed))
    return rows


if __name__ == "__main__":
    main()
