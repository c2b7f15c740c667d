"""Steps that are taken at once, held against the same fleet step by step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.config import RouterConfig
from simulation.clock import TURN_S
from simulation.plan import FleetPlan, LoadPlan
from simulation.report import figures
from simulation.run import Simulation

FLEET = FleetPlan(prefill=1, decode=2, step_cost="0.010,0.0001,0.001", front="0,0,0,0")
HEAVY = replace(FLEET, step_cost="0.010,0.0001,0.001,0.000004")
"""A token that a row holds takes time too: a context of 500 as much as two rows."""
BUSY = {"requests": 14, "rate": 4.0, "mean_input": 500, "mean_output": 80}


def both_ways(fleet: FleetPlan, **load: Any) -> tuple[Simulation, Simulation]:
    """Step by step, and with steps taken at once."""
    simulations = [Simulation(replace(fleet, skip_steps=way), LoadPlan(**load), RouterConfig()) for way in ("off", "on")]
    for simulation in simulations:
        simulation.run()
    return simulations[0], simulations[1]


@pytest.mark.parametrize(
    ("fleet", "more"), [(FLEET, {}), (FLEET, {"max_tokens": 4000, "system_tokens": 600}), (HEAVY, {"mean_output": 100})]
)
def test_clients_see_the_same_times_whether_or_not_steps_are_taken_at_once(fleet: FleetPlan, more: dict[str, Any]) -> None:
    one_by_one, at_once = both_ways(fleet, **{**BUSY, **more})
    assert at_once.measured.endings == one_by_one.measured.endings
    for name in ("first_s", "answer_s"):
        expected, found = (np.sort(np.asarray(getattr(each.measured, name))) for each in (one_by_one, at_once))
        assert found == pytest.approx(expected, abs=0.02 if name == "first_s" else 0.06, rel=0.02)
    expected, found = (np.asarray(each.measured.between_s) for each in (one_by_one, at_once))
    assert len(found) == len(expected)
    assert np.percentile(found, (50, 90)) == pytest.approx(np.percentile(expected, (50, 90)), rel=0.03)
    assert found.sum() == pytest.approx(expected.sum(), rel=0.01)
    real, quick = figures(one_by_one), figures(at_once)
    assert quick.tokens == real.tokens
    assert quick.engines[1].steps == pytest.approx(real.engines[1].steps, rel=0.01)
    assert quick.engines[1].pages_mean == pytest.approx(real.engines[1].pages_mean, rel=0.05)
    assert quick.messages < real.messages / 3, "most steps tell nobody anything by themselves"
    for simulation in (one_by_one, at_once):
        (cost,) = (each.load.cost for each in simulation.fleet.router_process.core.fleet.members() if each.info.id == "decode-0")
        assert cost.decode_row_s + 500 * cost.held_token_s == pytest.approx(
            0.001 + 500 * fleet.cost("decode").held_token_s, rel=0.1
        )
        assert (cost.held_token_s > 0.000003) is (fleet is HEAVY)


@pytest.mark.parametrize("fleet", [FLEET, HEAVY])
def test_a_single_answer_ends_when_its_steps_do(fleet: FleetPlan) -> None:
    for simulation in both_ways(fleet, requests=1, mean_input=500, mean_output=200, lengths="constant"):
        (answer_s,), (first_s,) = simulation.measured.answer_s, simulation.measured.first_s
        steps_s = [0.010 + 0.001 + fleet.cost("decode").held_token_s * (500 + number) for number in range(1, 200)]
        assert answer_s - first_s == pytest.approx(sum(steps_s), abs=8 * TURN_S)
        assert list(simulation.measured.between_s[1:]) == pytest.approx(steps_s[1:], abs=2 * TURN_S)


def test_answers_are_whole_where_instances_die_and_where_memory_is_short() -> None:
    dying = {**BUSY, "kill_every_s": 1.0, "restart_s": 0.5}
    one_by_one, at_once = both_ways(replace(FLEET, prefill=2, decode=3), **dying)
    assert at_once.measured.endings == one_by_one.measured.endings == {"finished: length": 14}
    assert at_once.measured.tokens == one_by_one.measured.tokens
    short = replace(FLEET, decode=1, kv_pages=160)
    one_by_one, at_once = both_ways(short, requests=10, rate=20.0, mean_input=300, mean_output=100, max_tokens=2000)
    assert at_once.measured.tokens == one_by_one.measured.tokens
