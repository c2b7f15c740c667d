"""How long things take, with steps of a known cost: what disaggregation is for."""

import pytest

from common.step_cost import StepCost
from simulation.clock import TURN_S
from simulation.network import DELAY_S
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize

SIZE = ToySize(cost=StepCost(step_s=0.002, chunk_token_s=0.010, decode_row_s=0.001))
CHUNK_S = 0.002 + 8 * 0.010
"""A full chunk of 8 tokens."""
SLACK_S = 8 * (TURN_S + DELAY_S)
"""Messages and turns on the way of one token."""


def longest_pause(fleet: ToyFleet) -> float:
    """Between two tokens of an answer, while the prompt of another request of five chunks is computed."""
    talking = fleet.submit("talking", list(range(10, 15)), max_tokens=60)
    fleet.turn_until(lambda: len(fleet.observer.seconds_between) > 3)
    other = fleet.submit("other", list(range(10, 50)), max_tokens=1)
    fleet.run(talking, other)
    return max(fleet.observer.seconds_between)


def test_a_long_prompt_does_not_hold_up_the_tokens_of_others() -> None:
    assert longest_pause(ToyFleet(size=SIZE)) < 2 * 0.003 + SLACK_S < CHUNK_S


def test_where_one_instance_does_both_it_does() -> None:
    assert longest_pause(ToyFleet(prefill=0, size=SIZE)) >= CHUNK_S


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_first_token_takes_its_chunks_and_a_few_messages(chunks: int) -> None:
    fleet = ToyFleet(size=SIZE)
    fleet.run(fleet.submit("r", list(range(10, 10 + 8 * chunks)), max_tokens=4))
    (seconds,) = fleet.observer.seconds_to_first
    assert chunks * CHUNK_S <= seconds < chunks * CHUNK_S + SLACK_S


def test_instances_measure_their_pace_and_their_router_hears_of_it() -> None:
    fleet = ToyFleet(size=SIZE)
    for number in range(12):
        prompts = list(range(60 * number + 60, 61 * number + 62)), list(range(50, 55))
        fleet.run(*(fleet.submit(f"r{number}-{n}", prompt, max_tokens=5) for n, prompt in enumerate(prompts)))
    fleet.run_for(2.0)
    loads = {member.info.role: member.load for member in fleet.router.fleet.members()}
    cost = SIZE.cost
    prefill, decode = loads["prefill"], loads["decode"]
    assert (prefill.step_s, prefill.chunk_token_s) == pytest.approx((cost.step_s, cost.chunk_token_s), rel=0.1)
    assert (decode.step_s, decode.decode_row_s) == pytest.approx((cost.step_s, cost.decode_row_s), rel=0.1)
    assert (prefill.decode_row_s, decode.chunk_token_s) == (0.0, 0.0), "neither has had such steps"
