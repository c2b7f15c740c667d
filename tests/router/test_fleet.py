"""Membership as lists of messages and the messages that answer them; and members that left or fell silent.

These are remembered, and for a while they can be reached. Also what a router says of deleting an instance, and that an older
release is not told what it does not know.
"""

import asyncio
from functools import partial
from unittest import mock

import pytest
from msgspec.structs import replace

from common.errors import Conflict, NotFound, TandemError
from common.ids import ROUTER, Incarnation, InstanceId, Life
from common.instance.ports import Send
from common.messages import (
    SINCE,
    WIRE_VERSION,
    DoTask,
    Drain,
    Finished,
    Goodbye,
    InstanceInfo,
    Load,
    Peers,
    Refused,
    Register,
    TextBatch,
    TextDelta,
    Welcome,
)
from common.messages.variants import LeaveGroup, ReadWeight, Task
from router import fleet as router_fleet
from router.fleet import LEFT_ROUTE_S, REPLACED_REMEMBERED, SILENT_ROUTE_S, Members
from tests.builders import instance
from tests.router import bench
from tests.router.bench import D0, D1, P0
from tests.router.calls import completion, get, post, until
from tests.router.fakes import EchoFleet, Site, beat, flush, hear

DEAD_AFTER_S = 4.0
new_fleet = partial(bench.new_fleet, linked=False, dead_after_s=DEAD_AFTER_S)
D0_NEXT = instance("d0", "decode", incarnation="2")


@pytest.fixture
def fleet() -> Members:
    return new_fleet(P0, D0)


def ids(fleet: Members) -> list[str]:
    return [member.info.id for member in fleet.members()]


def refusal_of(fleet: Members, asking: InstanceInfo, now: float = 1.0) -> tuple[InstanceId, str]:
    """To whom the refusal of this registration goes, and its reason."""
    (refusal,) = fleet.register(Register(instance=asking), now).sends
    assert isinstance(refusal.message, Refused)
    return refusal.to, refusal.message.reason


Told = dict[str, tuple[list[str], list[str]]]


def told(fleet: Members, now: float = 1.0) -> Told:
    """Who is told of which peers that joined and left, now."""
    news: Told = {}
    for send in flush(fleet, now):
        assert isinstance(send.message, Peers)
        news[send.to] = ([info.id for info in send.message.joined], list(send.message.left))
    return news


WELCOME = Welcome(router=ROUTER, detokenizers=("tcp://detokenizer:1",), heartbeat_s=0.5, dead_after_s=DEAD_AFTER_S)


def test_an_instance_that_registers_gets_its_peers_and_the_other_role_hears_about_it(fleet: Members) -> None:
    assert told(fleet) == {"p0": (["d0"], []), "d0": (["p0"], [])}
    change = fleet.register(Register(instance=D1), 1.0)
    assert (change.sends, change.lost) == ([Send(D1.id, WELCOME)], [])
    assert told(fleet) == {"d1": (["p0"], []), "p0": (["d1"], [])}


def test_registering_again_is_answered_again_but_tells_nobody_anything_new(fleet: Members) -> None:
    told(fleet)
    fleet.take_moves()
    assert fleet.register(Register(instance=D0), 1.0).sends == [Send(D0.id, WELCOME)]
    assert (fleet.take_moves(), told(fleet)) == ([], {})


def test_registering_again_keeps_the_last_report() -> None:
    fleet = new_fleet(D0)
    hear(fleet, D0, load=Load(running_tokens=7), now=1.0)
    fleet.register(Register(instance=D0), 1.5)
    assert next(fleet.members()).load.running_tokens == 7


def test_a_silent_member_is_lost_and_its_peers_hear_of_it(fleet: Members) -> None:
    hear(fleet, P0, now=2.0)
    assert fleet.next_deadline() == DEAD_AFTER_S
    assert fleet.tick(2.9).lost == []
    change = fleet.tick(DEAD_AFTER_S)
    assert [member.info for member in change.lost] == [D0]
    assert told(fleet) == {"p0": ([], ["d0"])}
    assert ids(fleet) == ["p0"]
    assert fleet.next_deadline() == 2.0 + DEAD_AFTER_S


def test_a_member_that_was_only_silent_is_a_member_again_at_its_next_heartbeat(fleet: Members) -> None:
    hear(fleet, P0, now=2.0)
    fleet.tick(DEAD_AFTER_S)
    assert told(fleet) == {"p0": ([], ["d0"])}
    change = hear(fleet, D0, load=Load(running_tokens=3), now=4.0)
    assert change.sends == [Send(D0.id, WELCOME)]
    assert told(fleet) == {"d0": (["p0"], []), "p0": (["d0"], [])}
    assert [member.load.running_tokens for member in fleet.members("decode")] == [3]
    assert fleet.departed == {}


def test_a_goodbye_removes_at_once_and_heartbeats_that_follow_are_stale(fleet: Members) -> None:
    told(fleet)
    change = fleet.goodbye(Goodbye(id=D0.id, incarnation=D0.incarnation), 1.0)
    assert [member.info for member in change.lost] == [D0]
    assert told(fleet) == {"p0": ([], ["d0"])}
    assert hear(fleet, D0, now=1.0).sends == []
    assert (ids(fleet), fleet.stale) == (["p0"], 1)
    assert [(name, departure.reason) for name, departure in fleet.departed.items()] == [("d0", "left")]


def test_a_goodbye_of_a_former_incarnation_does_not_remove_its_successor() -> None:
    fleet = new_fleet(P0, D0, D0_NEXT)
    assert fleet.goodbye(Goodbye(id=D0.id, incarnation=D0.incarnation), 1.0).lost == []
    assert (ids(fleet), fleet.stale) == (["p0", "d0"], 1)


def test_a_newer_incarnation_takes_the_place_of_the_older(fleet: Members) -> None:
    told(fleet)
    change = fleet.register(Register(instance=D0_NEXT), 1.0)
    assert [member.info for member in change.lost] == [D0]
    assert change.sends == [Send(D0_NEXT.id, WELCOME)]
    assert told(fleet) == {"d0": (["p0"], []), "p0": (["d0"], [])}
    assert (D0.id, D0_NEXT.inbox) in fleet.take_moves()


def test_a_replaced_incarnation_is_refused_at_its_own_address_and_its_successor_stays() -> None:
    fleet = new_fleet(D0, D0_NEXT)
    to, reason = refusal_of(fleet, D0)
    assert "newer incarnation" in reason
    assert fleet.take_moves() == [(D0.id, D0_NEXT.inbox), (to, D0.inbox)]
    assert [member.info for member in fleet.members()] == [D0_NEXT]


def test_an_incarnation_that_wakes_after_its_successor_joined_is_refused_and_the_successor_stays(fleet: Members) -> None:
    hear(fleet, P0, now=2.0)
    fleet.tick(DEAD_AFTER_S)
    fleet.register(Register(instance=D0_NEXT), 3.5)
    woken = hear(fleet, D0, now=4.0)
    assert (woken.sends, woken.lost, fleet.stale) == ([], [], 1)
    change = fleet.register(Register(instance=D0), 4.0)
    (refusal,) = change.sends
    assert isinstance(refusal.message, Refused) and "newer incarnation" in refusal.message.reason
    assert (refusal.message.incarnation, refusal.message.final) == (D0.incarnation, True)
    assert change.lost == []
    assert [member.info for member in fleet.members("decode")] == [D0_NEXT]
    fleet.goodbye(Goodbye(id=D0_NEXT.id, incarnation=D0_NEXT.incarnation), 1.0)
    assert refusal_of(fleet, D0, 5.0), "nor does it return when it is gone"


def test_replacing_an_incarnation_does_not_affect_other_instances() -> None:
    fleet = new_fleet(D0, D0_NEXT)
    assert D1.incarnation == D0.incarnation
    fleet.register(Register(instance=D1), 1.0)
    assert ids(fleet) == ["d0", "d1"]


def test_how_many_replaced_incarnations_are_remembered_is_bounded() -> None:
    lives = [instance("d0", "decode", incarnation=str(number)) for number in range(REPLACED_REMEMBERED + 2)]
    fleet = new_fleet(*lives)
    assert refusal_of(fleet, lives[1])
    assert fleet.register(Register(instance=lives[0]), 1.0).lost, "the oldest is forgotten"


def test_reports_of_links_to_a_silent_member_are_void_when_it_returns(fleet: Members) -> None:
    hear(fleet, P0, D0, now=2.0)
    fleet.tick(DEAD_AFTER_S)
    hear(fleet, P0, D0, now=3.5)  # sent before it heard that d0 is gone
    hear(fleet, D0, P0, now=4.0)
    hear(fleet, D0, P0, now=4.1)
    prefill, decode = fleet.members()
    assert (list(prefill.partners.values()), list(prefill.usable)) == ([decode], [])
    hear(fleet, P0, D0, now=4.5)
    assert list(prefill.usable) == [decode]


def test_everyone_that_was_silent_at_once_comes_back_and_knows_the_others() -> None:
    fleet = new_fleet(P0, D0, D1)
    assert len(fleet.tick(DEAD_AFTER_S).lost) == 3
    for member in (D0, P0, D1):
        hear(fleet, member, now=4.0)
    assert ids(fleet) == ["d0", "p0", "d1"]
    flush(fleet, 5.0)
    assert {member.info.id: set(member.partners) for member in fleet.members()} == {
        "p0": {"d0", "d1"},
        "d0": {"p0"},
        "d1": {"p0"},
    }


# --- heartbeats ----------------------------------------------------------------------------------------------------------


def test_a_heartbeat_is_answered_unless_the_last_answer_is_younger_than_half_of_what_counts_as_silence(fleet: Members) -> None:
    for now, answered in ((1.0, True), (1.5, False), (2.9, False), (3.0, True), (3.5, False), (5.0, True)):
        assert hear(fleet, D0, P0, now=now).sends == [Send(D0.id, WELCOME)] * answered


def test_a_heartbeat_of_a_stranger_is_not_answered_and_is_counted_as_stale(fleet: Members) -> None:
    assert hear(fleet, D1, now=1.0).sends == []
    assert hear(fleet, instance("d0", "decode", incarnation="0"), now=1.0).sends == []
    assert (ids(fleet), fleet.stale) == (["p0", "d0"], 2)


def test_a_new_detokenizer_is_named_to_every_member_and_to_those_that_come(fleet: Members) -> None:
    moved = replace(WELCOME, detokenizers=("tcp://detokenizer:2",))
    assert fleet.detokenizer_moved(0, "tcp://detokenizer:2") == [Send(P0.id, moved), Send(D0.id, moved)]
    assert fleet.register(Register(instance=D1), 1.0).sends[0] == Send(D1.id, moved)


STUCK = Load(oldest_step_s=31.0)
DRAIN = Drain(incarnation=D0.incarnation)


def test_a_member_that_gets_stuck_is_lost_for_its_requests_once_and_stays_a_member(fleet: Members) -> None:
    assert hear(fleet, D0, P0, load=Load(oldest_step_s=29.0), now=1.0).lost == []
    assert [member.info for member in hear(fleet, D0, P0, load=STUCK, now=2.0).lost] == [D0]
    assert hear(fleet, D0, P0, load=STUCK, now=2.5).lost == []
    assert ids(fleet) == ["p0", "d0"]
    hear(fleet, D0, P0, now=3.0)
    assert [member.info for member in hear(fleet, D0, P0, load=STUCK, now=3.5).lost] == [D0]


def test_a_refusal_says_whether_another_start_would_end_the_same_way(fleet: Members) -> None:
    odd = replace(instance("odd", "decode"), model=replace(D0.model, dtype="float16"))
    (refusal,) = fleet.register(Register(instance=odd), 1.0).sends
    assert isinstance(refusal.message, Refused) and refusal.message.is_mismatch
    with mock.patch.object(fleet.weights, "why_not", lambda *of: "its weights are old"):
        (refusal,) = fleet.register(Register(instance=instance("late", "decode")), 1.0).sends
    assert isinstance(refusal.message, Refused) and not refusal.message.is_mismatch


# --- draining ------------------------------------------------------------------------------------------------------------


def test_a_member_is_told_to_drain_until_it_says_that_it_does(fleet: Members) -> None:
    assert fleet.drain(D0.id, 0.0).sends == [Send(D0.id, DRAIN)]
    (_, member) = fleet.members()
    assert (member.draining, member.trouble is None) == (True, False)
    for now in (1.0, 1.5):
        assert Send(D0.id, DRAIN) in hear(fleet, D0, P0, now=now).sends, "the message was lost, or is on its way"
    assert hear(fleet, D0, P0, draining=True, now=3.0).sends == [Send(D0.id, WELCOME)]
    assert Send(D0.id, DRAIN) in hear(fleet, D0, P0, now=3.5).sends
    assert member.trouble is not None


def test_a_member_that_was_told_to_drain_and_was_silent_for_a_while_is_told_again(fleet: Members) -> None:
    fleet.drain(D0.id, 0.0)
    hear(fleet, P0, now=2.0)
    fleet.tick(DEAD_AFTER_S)
    assert Send(D0.id, DRAIN) in hear(fleet, D0, now=5.0).sends
    assert [member.trouble is None for member in fleet.members("decode")] == [False]


def test_the_successor_of_a_draining_incarnation_takes_requests(fleet: Members) -> None:
    fleet.drain(D0.id, 0.0)
    fleet.register(Register(instance=D0_NEXT), 1.0)
    assert [member.trouble is None for member in fleet.members("decode")] == [True]


def test_a_member_whose_connection_broke_is_dead_when_two_heartbeats_pass_without_one(fleet: Members) -> None:
    for member in (P0, D0):
        hear(fleet, member, now=10.0)
    fleet.connection_broken(D0.id, 10.1)
    fleet.connection_broken(P0.id, 10.1)
    assert fleet.next_deadline() == 11.1
    hear(fleet, D0, now=10.5)
    assert [member.info.id for member in fleet.tick(11.1).lost] == ["p0"]
    assert ids(fleet) == ["d0"]


def test_a_broken_connection_gives_no_member_more_time_and_a_stranger_none() -> None:
    fleet = new_fleet(P0)
    deadline = fleet.next_deadline()
    assert deadline is not None
    fleet.connection_broken(P0.id, deadline - 0.1)
    fleet.connection_broken(D0.id, deadline - 0.1)
    assert fleet.next_deadline() == deadline


def test_members_of_a_large_fleet_report_more_rarely_but_several_times_before_they_could_be_taken_for_dead() -> None:
    fleet = new_fleet()
    paces = []
    for number in range(1_400):
        (greeting,) = fleet.register(Register(instance=instance(f"d{number}", "decode")), 0.0).sends
        assert isinstance(greeting.message, Welcome)
        paces.append(greeting.message.heartbeat_s)
    assert paces[:500] == 500 * [0.5] and paces[999] == 1.0
    assert paces == sorted(paces) and paces[-1] == DEAD_AFTER_S / 3
    for number in range(1_390):
        fleet.goodbye(Goodbye(id=InstanceId(f"d{number}"), incarnation=Incarnation("1")), 1.0)
    (answer,) = fleet.heartbeat(beat(instance("d1399", "decode")), 100.0).sends
    assert isinstance(answer.message, Welcome) and answer.message.heartbeat_s == 0.5


def test_a_member_that_left_is_reached_a_little_longer_and_a_silent_one_as_long_as_it_keeps_requests() -> None:
    fleet = new_fleet(P0, D0)
    fleet.goodbye(Goodbye(id=P0.id, incarnation=P0.incarnation), 1.0)
    fleet.tick(DEAD_AFTER_S)
    assert fleet.take_moves() == [(P0.id, P0.inbox), (D0.id, D0.inbox)]
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
    fleet.drain(infos[0].id, 0.0)
    assert len(fleet.tick(DEAD_AFTER_S).lost) == 200
    assert fleet.take_moves() == [(info.id, info.inbox) for info in infos]
    fleet.register(Register(instance=infos[0]), 12.0)
    assert [member.told_to_drain for member in fleet.members()] == [True]


def test_how_many_departures_are_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_fleet, "DEPARTED_REMEMBERED", 5)
    fleet = new_fleet()
    for number in range(6):
        life = instance(f"d{number}", "decode")
        fleet.register(Register(instance=life), 1.0)
        fleet.goodbye(Goodbye(id=life.id, incarnation=life.incarnation), 1.0)
    assert len(fleet.departed) == 5
    assert (InstanceId("d0"), None) in fleet.take_moves()


# --- what may be deleted, and older releases ------------------------------------------------------------------------------------


HOME = Load(pages_free=64, pages_total=64, pages_cached=10)
"""All pages are at home; some of them hold KV that may be hit again."""


@pytest.fixture
def drained(fleet: Members) -> Members:
    fleet.drain(D0.id, 1.0)
    return fleet


def reasons(fleet: Members, load: Load = HOME, *, draining: bool = True) -> list[str]:
    fleet.heartbeat(beat(D0, load, draining), 1.1)
    return fleet.why_keep(D0.id)


@pytest.mark.parametrize("told", [False, True])
def test_an_idle_instance_is_needed_until_it_says_that_it_drains(told: bool) -> None:
    fleet = new_fleet(P0, D0)
    if told:
        fleet.drain(D0.id, 1.0)
    assert reasons(fleet, draining=False) == ["it does not drain: POST /cluster/d0/drain"]
    assert reasons(fleet) == []


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (replace(HOME, waiting_requests=2), "2 requests wait there"),
        (replace(HOME, running_requests=1), "1 requests run there"),
        (replace(HOME, reservations=3), "3 reservations wait for their handoff"),
        (replace(HOME, pushes_in_flight=4), "4 pushes are in flight"),
        (replace(HOME, pages_free=60, pages_quarantined=4), "4 pages are in use"),
    ],
)
def test_what_is_left_there_is_named_whichever_routers_it_is(drained: Members, load: Load, reason: str) -> None:
    assert reasons(drained, load) == [reason]
    assert reasons(drained) == []


def test_a_new_life_of_its_name_is_judged_and_not_the_former_one(drained: Members) -> None:
    assert reasons(drained) == []
    drained.register(Register(instance=replace(D0, incarnation=Incarnation("2"))), 2.0)
    assert drained.why_keep(D0.id)[0].startswith("it does not drain")


@pytest.mark.parametrize(
    ("goodbye", "told"),
    [
        (Goodbye(id=D0.id, incarnation=D0.incarnation, is_quiet=True), []),
        (Goodbye(id=D0.id, incarnation=D0.incarnation), ["it is gone (left), and has not said that its transfers have ended"]),
        (
            Goodbye(id=D0.id, incarnation=D0.incarnation, reason="rank 1 ended"),
            ["it is gone (rank 1 ended), and has not said that its transfers have ended"],
        ),
    ],
    ids=["quiet", "an older version", "failed"],
)
def test_of_an_instance_that_has_left_its_last_word_counts(drained: Members, goodbye: Goodbye, told: list[str]) -> None:
    drained.goodbye(goodbye, 2.0)
    assert drained.why_keep(D0.id) == told


def test_what_is_not_known_of_an_instance_that_died_is_no(drained: Members) -> None:
    assert reasons(drained) == []
    drained.tick(DEAD_AFTER_S + 2.0)
    assert drained.why_keep(D0.id) == ["it is gone (not heard of in time), and has not said that its transfers have ended"]
    with pytest.raises(NotFound, match="'d9'"):
        drained.why_keep(InstanceId("d9"))


@pytest.mark.anyio
async def test_the_page_tells_whether_and_why_not() -> None:
    async with Site(EchoFleet(stall_at=3)) as site:
        fleet, decode, records = site.fleet, site.fleet.decode, site.core.requests.records
        assert (await get(site, "/cluster/d9/safe_to_delete")).status_code == 404
        answer = asyncio.create_task(post(site, "/v1/completions", completion()))
        await until(lambda: any(len(record.token_ids) == 3 for record in records()))
        await post(site, "/cluster/d0/drain", {})
        fleet.say(beat(decode, HOME, draining=True))
        await until(lambda: next(site.core.fleet.members("decode")).reports_draining)
        page = (await get(site, "/cluster/d0/safe_to_delete")).json()
        assert page == {"id": "d0", "safe_to_delete": False, "reasons": ["1 requests of this router are assigned to it"]}
        (record,) = records()
        assert record.attempt is not None
        rest = TextDelta(record.attempt.key, 3, tuple(map(ord, "lo")), "lo", Finished(reason="length"))
        fleet.say(TextBatch(deltas=(rest,)))
        assert (await answer).status_code == 200
        assert (await get(site, "/cluster/d0/safe_to_delete")).json() == {"id": "d0", "safe_to_delete": True, "reasons": []}


def test_a_task_that_an_older_release_does_not_know_is_refused_by_name_and_others_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SINCE, "ReadWeight", WIRE_VERSION)
    fleet = new_fleet(P0, replace(D0, wire_version=WIRE_VERSION - 1))
    outcome: list[dict[Life, str] | TandemError] = []

    def begin(task: Task) -> list[str]:
        tasks = {member.life: task for member in fleet.members()}
        return [send.to for send in fleet.tasks.begin(tasks, outcome.append, 9.0) if isinstance(send.message, DoTask)]

    with pytest.raises(
        Conflict, match=f"d0 has wire version {WIRE_VERSION - 1}, and ReadWeight came with {WIRE_VERSION}"
    ) as refused:
        begin(ReadWeight(name="w", rows=1))
    assert refused.value.status == 409 and not outcome
    assert begin(LeaveGroup(group="g")) == ["p0", "d0"]
