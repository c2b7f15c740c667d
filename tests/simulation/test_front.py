"""Costs before and behind the instances: what they delay, by hand, and that their measurement runs the real code."""

from dataclasses import replace
from typing import Any

import pytest

from common.config import RouterConfig
from common.errors import ConfigError
from simulation.clock import TURN_S
from simulation.measured_front import measure_front
from simulation.plan import FleetPlan, FrontCosts, LoadPlan
from simulation.run import Simulation

FLEET = FleetPlan(prefill=1, decode=1, step_cost="0.010,0,0", front="0,0,0,0", max_running=64)


def simulate(front: str, **load: Any) -> Simulation:
    simulation = Simulation(replace(FLEET, front=front), LoadPlan(lengths="constant", arrivals="even", **load), RouterConfig())
    simulation.run()
    return simulation


def test_a_request_waits_for_those_that_the_router_reads_before_it_and_for_its_own_tokens() -> None:
    """All come within a moment. The n-th one is read n times 20 ms later, its tokens take 10 ms then, and its step 10 ms. The
    router reads what has come before it sends the first event."""
    load = {"requests": 5, "rate": 10_000.0, "mean_input": 1000, "mean_output": 1}
    expected = [max(5 * 0.020, number * 0.020 + 0.010 + 0.010) for number in range(1, 6)]
    costly = simulate("0.020,0.00001,0,0", **load)
    assert sorted(costly.measured.first_s) == pytest.approx(expected, abs=5 * TURN_S)


def test_tokens_wait_for_the_detokenizer_and_events_for_the_router() -> None:
    """Four streams: in each step the last of four events is read 4 times 1 ms later, and 4 tokens take 2 ms before that."""
    load = {"requests": 4, "rate": 10_000.0, "mean_input": 10, "mean_output": 20}
    free, costly = simulate("0,0,0,0", **load), simulate("0,0,0.0005,0.001", **load)
    last = [max(each.measured.answer_s) for each in (free, costly)]
    assert last[1] - last[0] == pytest.approx(4 * 0.001 + 4 * 0.0005, abs=2 * TURN_S)
    first = [min(each.measured.answer_s) for each in (free, costly)]
    assert first[1] - first[0] == pytest.approx(0.001 + 4 * 0.0005, abs=2 * TURN_S)


@pytest.mark.parametrize("text", ["1,2,3", "0,0,0,-1", "0,0,0,2", "a,b,c,d", ""])
def test_costs_that_are_no_costs_are_refused_by_their_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--front must be"):
        FleetPlan(front=text)


def test_the_costs_of_this_machine_are_measured_with_the_real_code_and_can_be_given_again() -> None:
    measured = measure_front("demo")
    assert all(0 < cost < 0.5 for cost in (measured.request_s, measured.token_s, measured.event_s))
    assert FrontCosts.parse(measured.spelled).request_s == pytest.approx(measured.request_s, rel=0.01)
