"""Fleets whose instances have several ranks: answers are those of one rank, and an instance without one of its ranks ends."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from common.executor import Chunk, RowStart, StepPlan
from common.instance.ranks.line import SILENCE_S
from common.sampling_params import SamplingParams
from tests.engine.toy import TOY_HEADS, ToyExecutor, ToyRanks
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize

PROMPT = list(range(10, 31))
ANSWER = 12
DEGREES = [(*ranks, TOY_HEADS) for ranks in product((1, 2, 4), repeat=2)] + [(1, 2, 4), (2, 4, 4), (4, 2, 4), (4, 1, 1)]
"""(ranks that compute prompts, ranks that decode, KV heads). Where there are more ranks than heads, several hold the same."""


def fleet_of(prefill: int, decode: int, instances: int = 1, kv_heads: int = TOY_HEADS) -> ToyFleet:
    return ToyFleet(instances, instances, size=ToySize(kv_heads=kv_heads), ranks={"prefill": prefill, "decode": decode})


@pytest.mark.parametrize(("prefill", "decode", "kv_heads"), DEGREES)
def test_a_prompt_computed_on_some_ranks_is_decoded_on_others(prefill: int, decode: int, kv_heads: int) -> None:
    fleet, alone = fleet_of(prefill, decode, kv_heads=kv_heads), ToyFleet(0, 1, size=ToySize(kv_heads=kv_heads))
    clients, expected = ([each.submit(f"r{n}", PROMPT[n:], ANSWER) for n in range(3)] for each in (fleet, alone))
    fleet.run(*clients)
    alone.run(*expected)
    assert [client.token_ids for client in clients] == [client.token_ids for client in expected]
    if kv_heads == TOY_HEADS:
        assert [client.token_ids for client in clients] == [undisturbed(PROMPT[n:], ANSWER) for n in range(3)]
    sent, received = (fleet.instances[name].scheduler.report().counters for name in ("prefill-0", "decode-0"))
    assert fleet.observer.resumes == [] and (sent.handoffs, received.handoffs) == (3, 3), "decode took it over"
    assert sent.pages_pushed == received.pages_received and sent.bytes_pushed == received.bytes_received


Toys = list[ToyExecutor]
PAGES = np.array([3, 4, 20, 0, 7, 1], dtype=np.int32)


def next_token(ranks: int, kv_heads: int, damage: Callable[[Toys], None]) -> int:
    """The token after a prompt and its first token. damage: to the KV of the prompt, before that."""
    group = ToyRanks(ranks, wake=lambda: None)
    toys = [ToyExecutor(24, 2, kv_heads=kv_heads, ranks=group) for _ in range(ranks)]
    start = RowStart(0, PAGES, SamplingParams(max_new_tokens=4))
    prompt = StepPlan(1, starts=(start,), chunks=(Chunk(0, 0, np.array(PROMPT, dtype=np.int32), last=True),))
    decode = StepPlan(2, decode_rows=np.zeros(1, dtype=np.int32))
    for plan in (prompt, decode):
        steps = [toy.launch(plan) for toy in toys]
        results = [step.poll() for step in steps]
        (token,) = {int(result.tokens[0]) for result in results if result is not None}
        damage(toys)
    return token


def other_heads(toys: Toys) -> None:
    toys[1].pages[PAGES] = toys[1].pages[PAGES][:, :, :, ::-1]


def other_rank(toys: Toys) -> None:
    toys[0].pages[PAGES], toys[1].pages[PAGES] = toys[1].pages[PAGES].copy(), toys[0].pages[PAGES].copy()


def missing_rank(toys: Toys) -> None:
    toys[1].pages[PAGES] = 0


def missing_layer_of_a_rank(toys: Toys) -> None:
    toys[0].pages[PAGES[3:], 1] = 0


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "damage"),
    [
        *((2, 4, damage) for damage in (other_heads, other_rank, missing_rank, missing_layer_of_a_rank)),
        (4, 2, missing_rank),  # whose copy on another rank differs then
    ],
)
def test_what_is_misplaced_among_ranks_changes_the_answer(ranks: int, kv_heads: int, damage: Callable[[Toys], None]) -> None:
    assert next_token(ranks, kv_heads, damage) != next_token(ranks, kv_heads, lambda toys: None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_an_instance_that_lacks_a_rank_ends_on_all_others_and_its_requests_are_served(
    name: str, rank: int, is_killed: bool
) -> None:
    fleet = fleet_of(2, 2, instances=2)
    clients = [fleet.submit(f"r{n}", PROMPT[n:], ANSWER) for n in range(4)]
    fleet.turn_until(lambda: any(client.token_ids for client in clients))
    instance = fleet.instances[name]
    if not is_killed:
        instance.processes[rank].stop_until(fleet.clock.now + 3 * SILENCE_S)
    elif rank == 0:
        instance.kill()
        del fleet.instances[name]
    else:
        fleet.kill_rank(name, rank)
    fleet.turn_until(lambda: all(client.ended for client in clients), seconds=30.0)
    assert [client.token_ids for client in clients] == [undisturbed(PROMPT[n:], ANSWER) for n in range(4)]
    fleet.run_for(4 * SILENCE_S)
    assert not instance.followers[0].alive
    told = dict(fleet.ends) if rank else dict(fleet.rank_ends)
    (reason,) = told.values()
    assert f"rank {rank} " in reason and ("is gone" if is_killed else "silent") in reason


@pytest.mark.parametrize("seconds", [1.5, 5.0, 60.0])
def test_a_machine_that_stood_still_is_no_silence_between_ranks(seconds: float) -> None:
    """As when a host is paused: all processes of the fleet at once."""
    fleet = fleet_of(2, 2)
    clients = [fleet.submit(f"r{n}", PROMPT[n:], ANSWER) for n in range(4)]
    fleet.turn_until(lambda: any(client.token_ids for client in clients))
    until_s = fleet.clock.now + seconds
    for instance in fleet.instances.values():
        for process in instance.processes:
            process.stop_until(until_s)
    fleet.router_process.stop_until(until_s)
    fleet.turn_until(lambda: all(client.ended for client in clients), seconds=seconds + 30.0)
    assert fleet.ends == [] and fleet.rank_ends == []
    assert [client.token_ids for client in clients] == [undisturbed(PROMPT[n:], ANSWER) for n in range(4)]


def test_a_rank_that_is_lost_while_the_machine_stands_still_is_noticed_in_time() -> None:
    fleet = fleet_of(2, 2, instances=2)
    instance = fleet.instances["decode-0"]
    fleet.run_for(1.0)
    until_s = fleet.clock.now + 5.0
    instance.processes[0].stop_until(until_s)
    instance.processes[1].stop_until(until_s + 60.0)
    fleet.run_for(5.0 + SILENCE_S + 1.0)
    ((name, reason),) = fleet.ends
    assert name == "decode-0" and "rank 1" in reason and "silent" in reason


def test_a_follower_that_is_told_to_stop_drains_the_instance() -> None:
    fleet = fleet_of(2, 2)
    client = fleet.submit("r", PROMPT, ANSWER)
    fleet.turn_until(lambda: bool(client.token_ids))
    fleet.instances["decode-0"].followers[0].drain()
    fleet.turn_until(lambda: fleet.ends == [("decode-0", "drained")] and client.ended)
    assert client.token_ids == undisturbed(PROMPT, ANSWER)
    fleet.turn_until(lambda: [reason for _, reason in fleet.rank_ends] == ["drained"])
