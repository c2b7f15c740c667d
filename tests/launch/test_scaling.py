"""What a fleet can serve, held against queues that are played and against sums by hand; and what is chosen from it."""

import heapq
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from common.config import RouterConfig
from common.ids import Role
from launch.fleet_options import ScalingConfig
from launch.scaling import (
    AMPLE,
    GOOD_SHARE,
    VARIES,
    Division,
    FleetDemand,
    ScalingChoice,
    choose,
    decode_serves,
    headroom,
    prefill_serves,
)
from simulation.plan import FleetPlan, LoadPlan
from simulation.run import Simulation

PROMPTY = FleetDemand(
    requests_per_s=4.0,
    prompt_tokens=2000.0,
    answer_tokens_per_s=800.0,
    held_tokens=2100.0,
    prompt_step_s=0.02,
    chunk_token_s=0.0003,
    step_s=0.02,
    decode_row_s=0.0008,
    capacity_tokens=300_000.0,
    max_running=64.0,
)
"""2.4 instances' time of prompts in every second; 20 rows on each of two decode instances."""
WORDY = replace(PROMPTY, prompt_tokens=700.0, answer_tokens_per_s=1800.0)
LIMITS = ScalingConfig(margin=0.15, scale="launch")


def on_time(instances: int, busy: float, mean_s: float, limit_s: float, prompts: int = 40_000) -> float:
    """The share of prompts of one line whose first token comes in time: each goes to the instance that is free first."""
    random, now, late = Random(1), 0.0, 0
    free_s = [0.0] * instances
    for _ in range(prompts):
        now += random.expovariate(instances * busy / mean_s)
        begins_s = max(now, heapq.heappop(free_s))
        late += begins_s - now > limit_s - mean_s
        heapq.heappush(free_s, begins_s + random.expovariate(1 / mean_s))
    return 1 - late / prompts


@pytest.mark.parametrize("instances", [1, 2, 4, 16])
@pytest.mark.parametrize("mean_s", [0.2, 0.6])
def test_the_load_that_prefill_serves_is_that_of_a_played_line(instances: int, mean_s: float) -> None:
    """A tenth less is served in time, and a tenth more is not, unless that is more than all of the instances' time."""
    demand = replace(PROMPTY, prompt_tokens=mean_s / PROMPTY.chunk_token_s, prompt_step_s=0.0, requests_per_s=instances / mean_s)
    most = headroom(demand, LIMITS, Division(instances, 1)).prefill
    assert on_time(instances, 0.9 * most, mean_s, LIMITS.slo_ttft_s) >= GOOD_SHARE
    assert 1.1 * most >= 1 or on_time(instances, 1.1 * most, mean_s, LIMITS.slo_ttft_s) < GOOD_SHARE


def test_prefill_serves_no_more_than_its_time() -> None:
    assert not prefill_serves(PROMPTY, 1.0, 2, slo_ttft_s=1000.0), "2.4 instances are needed"
    assert prefill_serves(PROMPTY, 1.0, 3, slo_ttft_s=1000.0)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({}, 37.5 / 0.05),  # rows at which a step takes 50 ms: (0.05 - 0.02) / 0.0008
        ({"decode_row_s": 0.0003, "held_token_s": 0.0005 / 2100}, 37.5 / 0.05),  # as much for each row, for what it holds
        ({"decode_row_s": 0.0}, None),
        ({"max_running": 20.0}, None),
        ({"held_tokens": 30_000.0}, None),
    ],
)
def test_decode_serves_the_rows_that_keep_the_time_limit_and_have_room(change: Any, most: float | None) -> None:
    demand = replace(PROMPTY, answer_tokens_per_s=1.0, **change)
    answers = max(rate for rate in range(1, 8000) if decode_serves(demand, float(rate), 2, 0.05, alone=False))
    if most is not None:
        assert answers / 2 == pytest.approx(most, rel=0.01)
    row_s = demand.decode_row_s + demand.held_tokens * demand.held_token_s
    token_s = demand.step_s / (1 - answers / 2 * row_s)
    rows = answers * token_s
    room = 2 * min(demand.max_running, demand.capacity_tokens / demand.held_tokens)
    assert token_s <= 0.05 and rows <= room
    assert most is not None or rows == pytest.approx(room, rel=0.3), "what varies needs some of the room"


def test_decode_instances_that_serve_alone_have_less_time_for_rows() -> None:
    alone, beside = (headroom(PROMPTY, LIMITS, Division(prefill, 4)).decode for prefill in (0, 4))
    assert alone < beside / 2
    few, strict = replace(PROMPTY, prompt_tokens=1.0), replace(LIMITS, slo_itl_s=LIMITS.slo_itl_s / VARIES)
    assert headroom(few, LIMITS, Division(0, 4)).least == pytest.approx(headroom(few, strict, Division(4, 4)).decode, rel=0.02)


ASSUMED = FleetPlan(skip_steps="on")
PROMPT, ANSWER = 12_000, 340


def long_demand(rate: float) -> FleetDemand:
    cost = ASSUMED.cost("decode")
    return FleetDemand(
        requests_per_s=rate,
        prompt_tokens=PROMPT,
        answer_tokens_per_s=rate * ANSWER,
        held_tokens=PROMPT + ANSWER / 2,
        prompt_step_s=cost.step_s,
        chunk_token_s=cost.chunk_token_s,
        step_s=cost.step_s,
        decode_row_s=cost.decode_row_s,
        capacity_tokens=ASSUMED.kv_pages * ASSUMED.page_size,
        max_running=ASSUMED.max_running,
    )


def attained(rate: float, division: Division) -> float:
    """The share of requests whose tokens come in time, simulated."""
    fleet = replace(ASSUMED, prefill=division.prefill, decode=division.decode)
    load = LoadPlan(rate=rate, requests=round(45 * rate), mean_input=PROMPT, mean_output=ANSWER)
    load = replace(load, slo_ttft_s=LIMITS.slo_ttft_s, slo_itl_s=LIMITS.slo_itl_s)
    simulation = Simulation(fleet, load, RouterConfig(dispatch="conditional" if division.whole else "auto", max_requests=100_000))
    simulation.run()
    return simulation.good / load.requests


def test_what_decode_instances_serve_alone_is_what_simulated_ones_do() -> None:
    """Within a third of it; a simulated mix serves somewhat more than the better way of the two."""
    most = headroom(long_demand(1.0), LIMITS, Division(0, 2)).least
    assert attained(0.8 * most, Division(0, 2)) >= GOOD_SHARE > attained(1.35 * most, Division(0, 2))


def test_decode_instances_become_both_where_that_serves_more_than_any_division_that_the_limits_allow() -> None:
    rate, apart, both = 1.7, Division(1, 2), Division(1, 2, whole=True)
    limits = replace(LIMITS, scale="none", max_prefill=1)
    choice = choose(long_demand(rate), limits, apart)
    assert (choice.action, choice.role, choice.count) == ("flip", "both", 2), choice.reason
    assert attained(rate, both) >= GOOD_SHARE > attained(rate, apart) + 0.1
    assert choose(long_demand(rate), limits, both).action == "stay"
    alone = choose(long_demand(2.5), replace(LIMITS, scale="none", min_prefill=0, max_prefill=1), apart)
    assert (alone.action, alone.role) == ("flip", "decode"), alone.reason


@pytest.mark.parametrize(
    ("what", "demand", "prefill", "decode", "limits", "action", "role"),
    [
        ("long prompts need prefill", PROMPTY, 2, 4, {}, "flip", "prefill"),
        ("long answers need decode", WORDY, 4, 2, {}, "flip", "decode"),
        ("a good division stays", PROMPTY, 4, 2, {}, "stay", None),
        (
            "one less of a role than the least is not chosen",
            PROMPTY,
            2,
            4,
            {"min_decode": 4},
            "add",
            "prefill",
        ),
        ("nor one more than the most", PROMPTY, 2, 4, {"max_prefill": 2, "max_decode": 4}, "stay", None),
        ("the last decode instance stays", replace(PROMPTY, requests_per_s=9.0), 1, 1, {}, "add", "prefill"),
        ("a small gain is none", PROMPTY, 3, 3, {"margin": 1.0}, "add", "prefill"),
        ("nobody starts instances", replace(PROMPTY, requests_per_s=40.0), 5, 1, {"scale": "none"}, "stay", None),
        ("a fleet that has too much gives one back", replace(PROMPTY, requests_per_s=0.2), 4, 4, {}, "remove", "prefill"),
        ("but none below the least", replace(PROMPTY, requests_per_s=0.01, answer_tokens_per_s=2.0), 1, 1, {}, "stay", None),
    ],
)
def test_a_choice(what: str, demand: FleetDemand, prefill: int, decode: int, limits: Any, action: str, role: Role | None) -> None:
    choice = choose(demand, replace(LIMITS, **limits), Division(prefill, decode))
    assert (choice.action, choice.role) == (action, role), f"{what}: {choice.reason}"
    assert choice.reason.startswith(f"{prefill} prefill + {decode} decode serve ")


def test_no_instance_is_added_while_one_is_on_its_way() -> None:
    demand = replace(PROMPTY, requests_per_s=9.0)
    assert choose(demand, LIMITS, Division(1, 1)).action == "add"
    assert choose(demand, LIMITS, Division(1, 1), coming=1).action == "stay"


def test_a_large_fleet_changes_all_that_it_lacks_at_once_and_half_where_the_load_is_still_served() -> None:
    demand, fleet = replace(PROMPTY, requests_per_s=40.0, answer_tokens_per_s=4000.0), Division(10, 50)
    choice = choose(demand, LIMITS, fleet)
    assert choice.action == "flip" and choose(demand, LIMITS, after(fleet, choice)).action != "flip"
    early = choose(replace(demand, requests_per_s=13.0), LIMITS, fleet)
    assert early.action == "flip" and 1 < early.count < choice.count


def test_a_line_of_prompts_that_waits_takes_no_instance_from_answers_that_need_it() -> None:
    fleet, limits = Division(4, 2), replace(LIMITS, scale="none")
    waits = replace(PROMPTY, requests_per_s=12.0, answer_tokens_per_s=1400.0)
    assert choose(waits, limits, fleet).role == "prefill", "were it to go on, prefill would be what lacks most"
    line = replace(waits, backlog_per_s=8.0)
    assert line.lasting.requests_per_s == 4.0 and choose(line, limits, fleet).action == "stay"


def after(fleet: Division, choice: ScalingChoice) -> Division:
    """The fleet that follows the choice."""
    if choice.role == "both":
        assert (choice.action, choice.count) == ("flip", fleet.decode) and not fleet.whole
        return fleet._replace(whole=True)
    change = choice.count if (choice.action != "remove") is (choice.role == "prefill") else -choice.count
    if choice.action == "flip":
        return fleet._replace(prefill=fleet.prefill + change, decode=fleet.decode - change)
    sign = 1 if choice.action == "add" else -1
    is_prefill = choice.role == "prefill"
    return fleet._replace(prefill=fleet.prefill + sign * is_prefill, decode=fleet.decode + sign * (not is_prefill))


def test_following_the_choices_ends_at_a_fleet_that_stays() -> None:
    """Whatever comes, and whatever the fleet begins as: no two choices undo each other."""
    random = Random(2)
    for _ in range(60):
        demand = replace(PROMPTY, requests_per_s=random.uniform(0.5, 12), answer_tokens_per_s=random.uniform(50, 6000))
        fleet, seen = Division(random.randint(1, 8), random.randint(1, 8)), list[ScalingChoice]()
        while (choice := choose(demand, LIMITS, fleet)).action != "stay":
            fleet = after(fleet, choice)
            seen.append(choice)
            assert len(seen) < 40 and min(fleet.prefill, fleet.decode) >= 1, seen
        assert not ({"add", "remove"} <= {each.action for each in seen}), seen
    assert AMPLE > 1
