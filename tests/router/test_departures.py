"""Members that left or fell silent: how long they can be reached, and what is remembered of them."""

from functools import partial

from common.ids import InstanceId
from common.messages import Goodbye, Register
from router.fleet import DEPARTED_REMEMBERED, LEFT_ROUTE_S, SILENT_ROUTE_S
from tests.builders import instance
from tests.router import bench
from tests.router.bench import D0, P0
from tests.router.fakes import hear

DEAD_AFTER_S = 4.0
new_fleet = partial(bench.new_fleet, linked=False, dead_after_s=DEAD_AFTER_S)


def test_a_member_that_left_is_reached_a_little_longer_and_a_silent_one_as_long_as_it_keeps_requests() -> None:
    fleet = new_fleet(P0, D0)
    fleet.goodbye(Goodbye(id=P0.id, incarnation=P0.incarnation), 1.0)
    fleet.tick(DEAD_AFTER_S)
    fleet.take_moves()
    assert (fleet.address(P0.id), fleet.address(D0.id)) == (P0.inbox, D0.inbox)
    assert fleet.next_deadline() == 1.0 + LEFT_ROUTE_S
    fleet.tick(1.0 + LEFT_ROUTE_S)
    assert fleet.take_moves() == [(P0.id, None)]
    assert fleet.next_deadline() == DEAD_AFTER_S + SILENT_ROUTE_S
    fleet.tick(DEAD_AFTER_S + SILENT_ROUTE_S)
    assert fleet.take_moves() == [(D0.id, None)]
    hear(fleet, D0, now=500.0)
    assert fleet.take_moves() == [(D0.id, D0.inbox)], "its next heartbeat makes it a member again"


def test_a_member_that_came_back_keeps_its_route_when_the_time_of_its_silence_is_over() -> None:
    fleet = new_fleet(D0)
    fleet.tick(DEAD_AFTER_S)
    hear(fleet, D0, now=5.0)
    hear(fleet, D0, now=DEAD_AFTER_S + SILENT_ROUTE_S - 1.0)
    fleet.take_moves()
    assert fleet.tick(DEAD_AFTER_S + SILENT_ROUTE_S).lost == [] and fleet.take_moves() == []


def test_of_a_whole_fleet_that_falls_silent_at_once_all_can_be_reached_and_the_drained_one_still_drains_when_back() -> None:
    infos = [instance(f"d{number}", "decode") for number in range(200)]
    fleet = new_fleet(*infos)
    fleet.drain(infos[0].id)
    assert len(fleet.tick(DEAD_AFTER_S).lost) == 200
    assert [fleet.address(info.id) for info in infos] == [info.inbox for info in infos]
    fleet.register(Register(instance=infos[0]), 12.0)
    assert [member.told_to_drain for member in fleet.members()] == [True]


def test_how_many_departures_are_remembered_is_bounded() -> None:
    fleet = new_fleet()
    for number in range(DEPARTED_REMEMBERED + 1):
        life = instance(f"d{number}", "decode")
        fleet.register(Register(instance=life), 1.0)
        fleet.goodbye(Goodbye(id=life.id, incarnation=life.incarnation), 1.0)
    assert len(fleet.departed) == DEPARTED_REMEMBERED and fleet.address(InstanceId("d0")) is None
    assert (InstanceId("d0"), None) in fleet.take_moves()


def test_a_member_that_beats_after_its_connection_broke_lives() -> None:
    fleet = new_fleet(P0)
    fleet.connection_broken(P0.id, 1.0)
    hear(fleet, P0, now=1.4)
    assert fleet.tick(2.1).lost == [] and fleet.next_deadline() == 1.4 + DEAD_AFTER_S
