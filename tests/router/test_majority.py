"""A router that starts again and meets an odd instance first: real memberships ask, on a clock turned by hand, and the fleet is
whole again."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from common.errors import PeerRefused
from common.ids import InstanceId
from common.instance.membership import SELDOM_EVERY_S, Memberships, State
from common.messages import Counters, Heartbeat, InstanceInfo, Load, Refused, Register, Welcome
from router.fleet import VOTE_S, VOTES_COUNTED, Fleet, Majority
from tests.builders import instance

AT = "tcp://127.0.0.1:7"
IDLE = State(Load(), Counters(), 0, draining=False)
HEALED_S = 2 * SELDOM_EVERY_S


def good(number: int) -> InstanceInfo:
    return instance(f"d{number}", "decode")


def odd(number: int) -> InstanceInfo:
    info = instance(f"odd{number}", "decode")
    return replace(info, model=replace(info.model, context_tokens=64))


class World:
    """Instances that register and report at one router, each when it is due; mail takes no time. exited: those that gave up."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lives = 0
        self.instances: dict[InstanceId, Memberships] = {}
        self.exited: set[str] = set()
        self.new_router()

    def new_router(self, *first: InstanceInfo) -> None:
        """The former life is gone, and everybody knows. These ask before all others."""
        self.lives += 1
        self.fleet = Fleet(InstanceId(f"router-{self.lives}"), (), heartbeat_s=0.5, dead_after_s=3.0)
        for each in self.instances.values():
            each.gone([next(iter(each)).name], self.now)
        for info in first:
            self._ask(info.id)

    def start(self, *infos: InstanceInfo) -> None:
        for info in infos:
            self.instances[info.id] = Memberships(info, [AT], 1e9, self.now)
            self._ask(info.id)

    def run_for(self, seconds: float) -> None:
        ends_s = self.now + seconds
        while self.now < ends_s:
            name = min(self.instances, key=lambda each: self.instances[each].next_deadline)
            self.now = max(self.now, self.instances[name].next_deadline)
            self.fleet.tick(self.now)
            self._ask(name)

    def members(self) -> set[str]:
        return {member.info.id for member in self.fleet.members()}

    def _ask(self, name: InstanceId) -> None:
        asking = self.instances[name]
        for sent in next(iter(asking)).due(self.now, IDLE, 0, reachable=True):
            assert isinstance(sent.message, Register | Heartbeat)
            if isinstance(sent.message, Register):
                change = self.fleet.register(sent.message, self.now)
            else:
                change = self.fleet.heartbeat(sent.message, self.now)
            for send in change.sends:
                if isinstance(send.message, Welcome | Refused) and name in self.instances:
                    try:
                        asking.receive(send.message, self.now)
                    except PeerRefused:
                        self.exited.add(name)
                        del self.instances[name]


def names(infos: Sequence[InstanceInfo]) -> set[str]:
    return {info.id for info in infos}


@pytest.mark.parametrize(("most", "odds"), [(1, 1), (2, 1), (5, 1), (5, 3)])
def test_a_fleet_that_served_before_is_whole_again_soon_though_newcomers_that_differ_came_first(most: int, odds: int) -> None:
    world, fleet, others = World(), [good(number) for number in range(most)], [odd(number) for number in range(odds)]
    world.start(*fleet)
    world.run_for(60.0)
    world.new_router()
    for other in others:
        world.start(other)
    assert world.members() & names(others)
    world.run_for(HEALED_S)
    assert world.members() == names(fleet) and not world.exited & names(fleet)
    world.new_router(*others)
    world.run_for(HEALED_S)
    if most > odds:
        assert world.members() == names(fleet), "though a former life welcomed the others too"
    world.run_for(60.0)
    assert not world.exited & names(fleet)


def test_those_that_no_life_of_the_router_welcomed_push_nobody_out_and_exit() -> None:
    world, fleet, crowd = World(), [good(0)], [odd(number) for number in range(9)]
    world.start(*fleet, *crowd)
    world.run_for(60.0)
    assert world.members() == names(fleet) and world.exited == names(crowd)


def test_one_that_is_left_of_a_former_fleet_pushes_no_larger_new_one_out() -> None:
    world, former, fleet = World(), odd(0), [good(number) for number in range(3)]
    world.start(former)
    world.run_for(60.0)
    kept = world.instances.pop(former.id)
    world.new_router()
    kept.gone([next(iter(kept)).name], world.now)
    world.start(*fleet)
    world.instances[former.id] = kept
    world.run_for(60.0)
    assert world.members() == names(fleet) and not world.exited


def test_equal_halves_do_not_push_each_other_out() -> None:
    world, halves = World(), ([good(number) for number in range(3)], [odd(number) for number in range(3)])
    for half in halves:
        world.new_router()
        world.instances.clear()
        world.start(*half)
    world.instances |= {info.id: Memberships(info, [AT], 1e9, world.now) for info in halves[0]}
    for each in world.instances.values():
        next(iter(each)).receive(Welcome(router=InstanceId("router-0"), detokenizers=(), heartbeat_s=0.5), world.now)
    world.new_router(*halves[1])
    seen = set[frozenset[str]]()
    for _ in range(60):
        world.run_for(1.0)
        seen.add(frozenset(world.members()))
    assert seen == {frozenset(names(halves[1]))} and not world.exited


def test_a_vote_counts_once_for_a_while_and_their_number_is_bounded() -> None:
    majority, a, b = Majority(), InstanceId("a"), InstanceId("b")
    assert [majority.vote(a, "x", 0.0), majority.vote(a, "x", 1.0), majority.vote(b, "x", 2.0)] == [1, 1, 2]
    assert majority.vote(a, "y", 3.0) == 1 and majority.vote(InstanceId("c"), "x", 4.0) == 2
    assert majority.vote(InstanceId("d"), "x", 4.0 + VOTE_S) == 1
    assert [majority.vote(InstanceId(str(n)), "z", 30.0) for n in range(VOTES_COUNTED + 5)][-1] == VOTES_COUNTED
