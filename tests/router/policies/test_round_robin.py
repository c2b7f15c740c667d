"""Round robin is held against a sorted list of names."""

from hypothesis import given
from hypothesis import strategies as st

from common.config import RouterConfig
from router.cost import Demand
from router.policies import RoundRobin
from tests.builders import instance
from tests.router.bench import new_fleet, placer_of
from tests.router.policies.lines import line_of, member, ranked

NAMES = [f"p{number}" for number in range(7)]
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES))), max_size=30)


@given(STEPS)
def test_each_in_turn_behind_the_last_that_was_chosen_whoever_comes_and_goes(steps: list[tuple[str, set[str]]]) -> None:
    there = {name: member(name) for name in NAMES[:3]}
    candidates = line_of(there.values())
    policy, last = RoundRobin(candidates, "prefill"), ""
    for name, barred in steps:
        if name in there:
            candidates.leave(there.pop(name))
        else:
            there[name] = member(name)
            candidates.judge(there[name])
        in_turn = sorted(there, key=lambda name: (name <= last, name))
        expected = [name for name in in_turn if name not in barred]
        assert ranked(policy, candidates, barred=barred) == expected
        if expected:
            last = expected[0]
            candidates.chose(there[last])


def test_both_roles_take_turns_and_a_look_at_readiness_takes_none() -> None:
    members = [instance(f"{role[0]}{number}", role) for role in ("prefill", "decode") for number in range(3)]
    placer = placer_of(new_fleet(*members), RouterConfig(prefill_policy="round_robin", decode_policy="round_robin"))
    served: list[list[str]] = []
    for _ in range(6):
        placement = placer.choose(Demand(10, 5))
        served.append([placement.first.info.id, *(each.info.id for each in placement.decodes)])
        assert placer.unready() == []
    assert served == 2 * [["p0", "d0", "d1", "d2"], ["p1", "d1", "d2", "d0"], ["p2", "d2", "d0", "d1"]]
