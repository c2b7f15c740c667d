"""Instances of several ranks in a running fleet: the tokens of one rank, KV between unequal numbers of ranks, and ranks that die.

Greedy, float32, and transformers is the reference, as in `test_token_exact.py`. Real processes: `launch local` starts the decode
instances, and a command of its own starts a prefill instance that has another number of ranks.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from demo.evaluate import MODEL
from launch.child import RoleProcess, launch_command
from launch.engine import Engine
from tests.e2e.test_supervision import DECODE, begun, busiest
from tests.e2e.test_token_exact import ANSWER_TOKENS, Reference, answers, demo_prompts
from tests.rig.pages import FleetPages, RunningFleet, running_fleet, until
from tests.rig.shared_memory import left_behind, shared_files

FLAGS = ("--dtype=float32", "--kv-memory=64MiB")
END_S = 60.0
FAULTS = [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@contextlib.contextmanager
def unequal_fleet(prefill_ranks: int, decode_ranks: int, decode: int) -> Iterator[RunningFleet]:
    before = shared_files()
    with running_fleet(*FLAGS, "--prefill=0", f"--decode={decode}", f"--tp={decode_ranks}") as fleet:
        (router,) = re.findall(r"control (tcp://\S+)", fleet.output)
        flags = [*FLAGS, f"--router={router}", "--name=prefill-0", f"--tp={prefill_ranks}"]
        prefill = RoleProcess("prefill-0", launch_command("prefill", flags), lambda event: None)
        try:
            fleet.wait_until_whole("prefill-0", *DECODE[:decode])
            yield fleet
        finally:
            prefill.terminate()
            if not prefill.wait(END_S):
                prefill.kill()
                prefill.wait(END_S)
        assert prefill.status == 0, prefill.account()
    assert not left_behind(before)


@pytest.fixture(scope="module")
def model() -> Reference:
    return Reference.load(MODEL)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (4, 1), (2, 4)])
def test_the_tokens_are_those_of_transformers_whatever_the_numbers_of_ranks(
    model: Reference, prefill_ranks: int, decode_ranks: int
) -> None:
    prompts = demo_prompts(16, 1500, seed=prefill_ranks)
    with unequal_fleet(prefill_ranks, decode_ranks, 1) as fleet:
        found = answers(fleet, prompts)
        goes_on_with_its_grammar_beside_others(fleet)
        fleet.wait_until_home()
        prefill, decode = fleet.members()["prefill-0"], fleet.members()["decode-0"]
        assert (len(prefill["ranks"]), len(decode["ranks"])) == (prefill_ranks, decode_ranks)
        assert decode["counters"]["prompt_tokens_computed"] == 0, "all KV was pushed"
        assert prefill["counters"]["bytes_pushed"] == decode["counters"]["bytes_received"] > 0
    for prompt, answer in zip(prompts, found, strict=True):
        assert len(answer) == model.length(answer, ANSWER_TOKENS)
        assert answer == model.greedy(prompt, answer), prompt


def goes_on_with_its_grammar_beside_others(fleet: RunningFleet) -> None:
    """Each other request starts in a step of its own while the words come."""
    words, before = "[a-z]{3,8}( [a-z]{3,8}){8,12}", {name: each["incarnation"] for name, each in fleet.members().items()}
    asked = {"max_tokens": 200, "temperature": 0, "structured_outputs": {"regex": words}}
    with ThreadPoolExecutor(6) as pool:
        structured = [pool.submit(fleet.complete, "Write words. ", **asked) for _ in range(2)]  # type: ignore[arg-type]
        for number in range(12):
            pool.submit(fleet.complete, f"hello {number}", max_tokens=3, temperature=0).result()
        choices = [each.result()["choices"][0] for each in structured]
    assert all(choice["finish_reason"] == "stop" and re.fullmatch(words, choice["text"]) for choice in choices), choices
    assert {name: each["incarnation"] for name, each in fleet.members().items()} == before


def test_an_engine_of_two_ranks_answers_as_one_process_does(model: Reference) -> None:
    prompts = demo_prompts(8, 700, seed=5)
    before = shared_files()
    with Engine(tp=2, dtype="float32", kv_memory="64MiB") as engine:
        found = [answer["output_ids"] for answer in engine.generate(prompts, {"temperature": 0, "max_new_tokens": ANSWER_TOKENS})]
        pids = [rank["pid"] for each in FleetPages(engine.url).cluster()["instances"] for rank in each["ranks"]]
    assert found == [model.greedy(prompt, answer) for prompt, answer in zip(prompts, found, strict=True)]
    assert [len(answer) for answer in found] == [model.length(answer, ANSWER_TOKENS) for answer in found]
    assert len(set(pids)) == 4 and all(map(is_gone, pids))
    assert not left_behind(before)


def test_a_rank_that_dies_or_stops_costs_no_client_a_token_and_is_named() -> None:
    with unequal_fleet(1, 2, 2) as fleet:
        expected = begun(fleet).end()
        for rank, number in FAULTS:
            fleet.wait_until_whole("prefill-0", *DECODE)
            streams = begun(fleet)
            name = busiest(fleet)
            victim = fleet.members()[name]
            pids = [each["pid"] for each in victim["ranks"]]
            os.kill(pids[rank], number)
            reason = departure(fleet, victim["incarnation"])
            assert "rank 1" in reason if rank else reason == "not heard of in time"
            assert streams.end() == expected
            until(lambda pids=pids: all(map(is_gone, pids)), "all of its ranks are gone")  # type: ignore[misc]
        fleet.wait_until_whole("prefill-0", *DECODE)


def departure(fleet: FleetPages, life: str) -> str:
    """Why that incarnation has left, by /cluster. It is shown until the next one joins."""
    found: list[str] = []

    def left() -> bool:
        found.extend(each["reason"] for each in fleet.cluster()["departed"] if each["incarnation"] == life)
        return bool(found)

    until(left, "the instance has left")
    return found[0]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
