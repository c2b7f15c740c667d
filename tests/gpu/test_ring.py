"""A prefill and a decode instance that share a card, as real processes: their answers beside those of colocated serving."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from common.processes.local_fleet import local_fleet
from common.processes.router_client import RouterClient
from tests.rig.client import completion_of_ids

FLAGS = (
    "--kv-memory=256MiB",
    "--max-running=16",
    "--chunk-tokens=128",
    "--grammar=off",
    "--dead-after-s=60",
    "--log-level=warning",
)
PROMPTS, LONGEST, TOKENS = 24, 1500, 48
AT_ONCE = 4
COUNTED_S, LOOK_EVERY_S = 5.0, 0.1


def answers(url: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy, several at once."""
    client = RouterClient(url)

    def answer(prompt: list[int]) -> list[int]:
        data = completion_of_ids("demo", prompt, TOKENS, return_token_ids=True)
        ids: list[int] = client.post("/v1/completions", json.loads(data))["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(answer, prompts))


def bytes_pushed(url: str) -> int:
    """What the instances have counted. Counters come with heartbeats, so the first ones are waited for."""
    until = time.monotonic() + COUNTED_S
    while True:
        instances = RouterClient(url).get("/cluster")["instances"]
        pushed = sum(int(instance["counters"]["bytes_pushed"]) for instance in instances)
        if pushed or time.monotonic() > until:
            return pushed
        time.sleep(LOOK_EVERY_S)


@pytest.mark.parametrize(
    ("dtype", "attention", "least_equal"),
    [
        pytest.param("float32", "torch", 1.0, id="float32, where a token does not depend on its batch"),
        pytest.param("bfloat16", "auto", 0.5, id="bfloat16, where near ties may fall otherwise"),
    ],
)
def test_two_instances_on_one_card_answer_as_a_colocated_one(dtype: str, attention: str, least_equal: float) -> None:
    random = np.random.default_rng(8)
    prompts = [random.integers(300, 2000, length).tolist() for length in random.integers(1, LONGEST, PROMPTS)]
    flags = ("--device=cuda:0", f"--dtype={dtype}", f"--attention={attention}", *FLAGS)
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            started = [pool.submit(stack.enter_context, local_fleet(f"--prefill={count}", *flags)) for count in (1, 0)]
        ring, colocated = (fleet.result().url for fleet in started)
        pairs = list(zip(answers(ring, prompts), answers(colocated, prompts), strict=True))
        assert bytes_pushed(ring) > 0
    equal = sum(ours == theirs for ours, theirs in pairs)
    assert equal >= least_equal * PROMPTS, f"{equal} of {PROMPTS} answers are equal"
