"""Fleets whose instances have several ranks: answers are those of one rank, and an instance without one of its ranks ends."""

from itertools import product

import pytest

from common.instance.ranks.line import SILENCE_S
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet

PROMPT = list(range(10, 31))
ANSWER = 12
DEGREES = [degrees for degrees in product((1, 2, 4), repeat=2) if degrees != (1, 1)]
"""The toy has two heads, so four ranks hold each of them twice."""


def fleet_of(prefill: int, decode: int, instances: int = 1) -> ToyFleet:
    return ToyFleet(instances, instances, ranks={"prefill": prefill, "decode": decode})


@pytest.mark.parametrize(("prefill", "decode"), DEGREES)
def test_a_prompt_computed_on_some_ranks_is_decoded_on_others(prefill: int, decode: int) -> None:
    fleet = fleet_of(prefill, decode)
    clients = [fleet.submit(f"r{n}", PROMPT[n:], ANSWER) for n in range(3)]
    fleet.run(*clients)
    assert [client.token_ids for client in clients] == [undisturbed(PROMPT[n:], ANSWER) for n in range(3)]
    sent, received = (fleet.instances[name].scheduler.report().counters for name in ("prefill-0", "decode-0"))
    assert fleet.observer.resumes == [] and (sent.handoffs, received.handoffs) == (3, 3), "decode took it over"
    assert sent.pages_pushed == received.pages_received and sent.bytes_pushed == received.bytes_received


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


def test_a_follower_that_is_told_to_stop_drains_the_instance() -> None:
    fleet = fleet_of(2, 2)
    client = fleet.submit("r", PROMPT, ANSWER)
    fleet.turn_until(lambda: bool(client.token_ids))
    fleet.instances["decode-0"].followers[0].drain()
    fleet.turn_until(lambda: fleet.ends == [("decode-0", "drained")] and client.ended)
    assert client.token_ids == undisturbed(PROMPT, ANSWER)
    fleet.turn_until(lambda: [reason for _, reason in fleet.rank_ends] == ["drained"])
