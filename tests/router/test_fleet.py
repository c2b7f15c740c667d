"""Membership as lists of messages and the messages that answer them."""

from functools import partial

import msgspec
import pytest

from common.errors import TandemError
from common.ids import Incarnation, InstanceId
from common.instance.ports import Send
from common.messages import (
    WIRE_VERSION,
    Drain,
    Goodbye,
    Heartbeat,
    InstanceInfo,
    Load,
    ModelIdentity,
    Peers,
    Refused,
    Register,
    Welcome,
)
from router.fleet import REMEMBERED, REPLACED_REMEMBERED, Fleet, UnknownInstance
from tests.builders import instance
from tests.router import bench
from tests.router.bench import D0, D1, P0
from tests.router.fakes import beat

DEAD_AFTER_S = 4.0
new_fleet = partial(bench.new_fleet, linked=False, dead_after_s=DEAD_AFTER_S)


def ids(fleet: Fleet) -> list[str]:
    return [member.info.id for member in fleet.members()]


def peers(*infos: InstanceInfo) -> Peers:
    return Peers(instances=infos)


WELCOME = Welcome(router=Incarnation("r"), detokenizer="tcp://detokenizer:1", heartbeat_s=0.5, dead_after_s=DEAD_AFTER_S)


def test_an_instance_that_registers_gets_its_peers_and_the_other_role_hears_about_it() -> None:
    fleet = new_fleet(P0, D0)
    change = fleet.register(Register(instance=D1), 1.0)
    assert change.sends == [Send(D1.id, WELCOME), Send(D1.id, peers(P0)), Send(P0.id, peers(D0, D1))]
    assert change.lost == []


def test_registering_again_is_answered_again_but_tells_nobody_else() -> None:
    fleet = new_fleet(P0, D0)
    version = fleet.addresses_version
    assert fleet.register(Register(instance=D0), 1.0).sends == [Send(D0.id, WELCOME), Send(D0.id, peers(P0))]
    assert fleet.addresses_version == version


def test_registering_again_keeps_the_last_report() -> None:
    fleet = new_fleet(D0)
    fleet.heartbeat(beat(D0, load=Load(running_tokens=7)), 1.0)
    fleet.register(Register(instance=D0), 1.5)
    assert next(fleet.members()).load.running_tokens == 7


def test_a_silent_member_is_lost_and_its_peers_hear_of_it() -> None:
    fleet = new_fleet(P0, D0)
    fleet.heartbeat(beat(P0), 2.0)
    assert fleet.next_deadline() == DEAD_AFTER_S
    assert fleet.tick(2.9).lost == []
    change = fleet.tick(DEAD_AFTER_S)
    assert [member.info for member in change.lost] == [D0]
    assert change.sends == [Send(P0.id, peers())]
    assert ids(fleet) == ["p0"]
    assert fleet.next_deadline() == 2.0 + DEAD_AFTER_S


def test_a_member_that_was_only_silent_is_a_member_again_at_its_next_heartbeat() -> None:
    fleet = new_fleet(P0, D0)
    fleet.heartbeat(beat(P0), 2.0)
    fleet.tick(DEAD_AFTER_S)
    change = fleet.heartbeat(beat(D0, load=Load(running_tokens=3)), 4.0)
    assert change.sends == [Send(D0.id, WELCOME), Send(D0.id, peers(P0)), Send(P0.id, peers(D0))]
    assert [member.load.running_tokens for member in fleet.members("decode")] == [3]
    assert fleet.departed == {}


def test_a_goodbye_removes_at_once_and_heartbeats_that_follow_are_stale() -> None:
    fleet = new_fleet(P0, D0)
    change = fleet.goodbye(Goodbye(id=D0.id, incarnation=D0.incarnation))
    assert [member.info for member in change.lost] == [D0]
    assert change.sends == [Send(P0.id, peers())]
    assert fleet.heartbeat(beat(D0), 1.0).sends == []
    assert (ids(fleet), fleet.stale) == (["p0"], 1)
    assert [(name, departure.reason) for name, departure in fleet.departed.items()] == [("d0", "left")]


def test_a_goodbye_of_a_former_incarnation_does_not_remove_its_successor() -> None:
    successor = instance("d0", "decode", incarnation="2")
    fleet = new_fleet(P0, D0, successor)
    assert fleet.goodbye(Goodbye(id=D0.id, incarnation=D0.incarnation)).lost == []
    assert (ids(fleet), fleet.stale) == (["p0", "d0"], 1)


def test_a_newer_incarnation_takes_the_place_of_the_older() -> None:
    fleet = new_fleet(P0, D0)
    successor = instance("d0", "decode", incarnation="2")
    change = fleet.register(Register(instance=successor), 1.0)
    assert [member.info for member in change.lost] == [D0]
    assert change.sends[-1] == Send(P0.id, peers(successor))
    assert Send(successor.id, WELCOME) in change.sends
    assert fleet.addresses()[D0.id] == successor.inbox


def test_a_replaced_incarnation_is_refused_at_its_own_address_and_its_successor_stays() -> None:
    successor = instance("d0", "decode", incarnation="2")
    fleet = new_fleet(D0, successor)
    (refusal,) = fleet.register(Register(instance=D0), 1.0).sends
    assert isinstance(refusal.message, Refused) and "newer incarnation" in refusal.message.reason
    assert fleet.addresses()[refusal.to] == D0.inbox
    assert fleet.addresses()[D0.id] == successor.inbox
    assert [member.info for member in fleet.members()] == [successor]


def test_an_incarnation_that_wakes_after_its_successor_joined_is_refused_and_the_successor_stays() -> None:
    successor = instance("d0", "decode", incarnation="2")
    fleet = new_fleet(P0, D0)
    fleet.heartbeat(beat(P0), 2.0)
    fleet.tick(DEAD_AFTER_S)
    fleet.register(Register(instance=successor), 3.5)
    woken = fleet.heartbeat(beat(D0), 4.0)
    assert (woken.sends, woken.lost, fleet.stale) == ([], [], 1)
    change = fleet.register(Register(instance=D0), 4.0)
    (refusal,) = change.sends
    assert isinstance(refusal.message, Refused) and "newer incarnation" in refusal.message.reason
    assert change.lost == []
    assert [member.info for member in fleet.members("decode")] == [successor]
    fleet.goodbye(Goodbye(id=successor.id, incarnation=successor.incarnation))
    assert isinstance(fleet.register(Register(instance=D0), 5.0).sends[0].message, Refused), "nor does it return when it is gone"


def test_replacing_an_incarnation_does_not_affect_other_instances() -> None:
    fleet = new_fleet(D0, instance("d0", "decode", incarnation="2"))
    assert D1.incarnation == D0.incarnation
    fleet.register(Register(instance=D1), 1.0)
    assert ids(fleet) == ["d0", "d1"]


def test_how_many_replaced_incarnations_are_remembered_is_bounded() -> None:
    fleet = new_fleet(*(instance("d0", "decode", incarnation=str(number)) for number in range(REPLACED_REMEMBERED + 2)))
    (refusal,) = fleet.register(Register(instance=instance("d0", "decode", incarnation="1")), 1.0).sends
    assert isinstance(refusal.message, Refused)
    assert fleet.register(Register(instance=instance("d0", "decode", incarnation="0")), 1.0).lost, "the oldest is forgotten"


def test_a_prefill_instance_that_was_only_silent_meets_its_peers_again_and_they_meet_it() -> None:
    fleet = new_fleet(P0, D0)
    fleet.heartbeat(beat(D0, P0), 2.0)
    assert fleet.tick(DEAD_AFTER_S).sends == [Send(D0.id, peers())]
    assert fleet.heartbeat(beat(P0, D0), 4.0).sends == [Send(P0.id, WELCOME), Send(P0.id, peers(D0)), Send(D0.id, peers(P0))]
    assert fleet.next_deadline() == 2.0 + DEAD_AFTER_S
    assert fleet.tick(2.0 + DEAD_AFTER_S).lost != [], "of d0"
    assert fleet.next_deadline() == 4.0 + DEAD_AFTER_S


def test_reports_of_links_to_a_silent_member_are_void_when_it_returns() -> None:
    fleet = new_fleet(P0, D0)
    fleet.heartbeat(beat(P0, D0), 2.0)
    fleet.tick(DEAD_AFTER_S)
    fleet.heartbeat(beat(P0, D0), 3.5)  # sent before it heard that d0 is gone
    fleet.heartbeat(beat(D0, P0), 4.0)
    prefill, decode = fleet.members()
    assert (decode.life in prefill.ready_links, prefill.life in decode.ready_links) == (False, True)
    fleet.heartbeat(beat(P0, D0), 4.5)
    assert decode.life in prefill.ready_links


def test_everyone_that_was_silent_at_once_comes_back_and_knows_the_others() -> None:
    fleet = new_fleet(P0, D0, D1)
    assert len(fleet.tick(DEAD_AFTER_S).lost) == 3
    for member in (D0, P0, D1):
        fleet.heartbeat(beat(member), 4.0)
    assert ids(fleet) == ["d0", "p0", "d1"]
    last = fleet.register(Register(instance=P0), 4.0).sends[-1]
    assert last == Send(P0.id, peers(D0, D1))


# --- heartbeats ----------------------------------------------------------------------------------------------------------


def test_every_heartbeat_of_a_member_is_answered_so_that_it_knows_the_router_lives() -> None:
    fleet = new_fleet(P0, D0)
    for now in (1.0, 1.5):
        assert fleet.heartbeat(beat(D0, P0), now).sends == [Send(D0.id, WELCOME)]


def test_a_heartbeat_of_a_stranger_is_not_answered() -> None:
    fleet = new_fleet(P0, D0)
    assert fleet.heartbeat(beat(D1), 1.0).sends == []
    assert fleet.heartbeat(beat(instance("d0", "decode", incarnation="0")), 1.0).sends == []
    assert fleet.stale == 2


def test_a_new_detokenizer_is_named_to_every_member_and_to_those_that_come() -> None:
    fleet = new_fleet(P0, D0)
    moved = msgspec.structs.replace(WELCOME, detokenizer="tcp://detokenizer:2")
    assert fleet.detokenizer_moved("tcp://detokenizer:2") == [Send(P0.id, moved), Send(D0.id, moved)]
    assert fleet.register(Register(instance=D1), 1.0).sends[0] == Send(D1.id, moved)


@pytest.mark.parametrize("more", [beat(D0, P0), beat(P0, D0)])
def test_only_a_report_that_lets_more_members_serve_says_so(more: Heartbeat) -> None:
    fleet = new_fleet(P0, D0)
    assert fleet.heartbeat(more, 1.0).more_can_serve, "a link"
    assert not fleet.heartbeat(more, 1.5).more_can_serve
    assert not fleet.heartbeat(msgspec.structs.replace(more, draining=True), 2.0).more_can_serve
    assert fleet.heartbeat(more, 2.5).more_can_serve, "it drains no more"
    assert not fleet.heartbeat(msgspec.structs.replace(more, links=()), 3.0).more_can_serve
    assert fleet.register(Register(instance=D1), 3.5).more_can_serve
    assert not fleet.register(Register(instance=D1), 3.5).more_can_serve


STUCK = Load(oldest_step_s=31.0)


def test_a_member_that_gets_stuck_is_lost_for_its_requests_once_and_stays_a_member() -> None:
    fleet = new_fleet(P0, D0)
    assert fleet.heartbeat(beat(D0, P0, load=Load(oldest_step_s=29.0)), 1.0).lost == []
    assert [member.info for member in fleet.heartbeat(beat(D0, P0, load=STUCK), 2.0).lost] == [D0]
    assert fleet.heartbeat(beat(D0, P0, load=STUCK), 2.5).lost == []
    assert ids(fleet) == ["p0", "d0"]
    fleet.heartbeat(beat(D0, P0), 3.0)
    assert [member.info for member in fleet.heartbeat(beat(D0, P0, load=STUCK), 3.5).lost] == [D0]


# --- draining ------------------------------------------------------------------------------------------------------------


def test_a_member_is_told_to_drain_until_it_says_that_it_does() -> None:
    fleet = new_fleet(P0, D0)
    assert fleet.drain(D0.id) == [Send(D0.id, Drain())]
    (_, member) = fleet.members()
    assert (member.draining, member.trouble is None) == (True, False)
    for now in (1.0, 1.5):
        assert Send(D0.id, Drain()) in fleet.heartbeat(beat(D0, P0), now).sends, "the message was lost, or is on its way"
    assert fleet.heartbeat(beat(D0, P0, draining=True), 2.0).sends == [Send(D0.id, WELCOME)]
    assert Send(D0.id, Drain()) in fleet.heartbeat(beat(D0, P0), 2.5).sends
    assert member.trouble is not None


def test_a_member_that_was_told_to_drain_and_was_silent_for_a_while_is_told_again() -> None:
    fleet = new_fleet(P0, D0)
    fleet.drain(D0.id)
    fleet.heartbeat(beat(P0), 2.0)
    fleet.tick(DEAD_AFTER_S)
    assert Send(D0.id, Drain()) in fleet.heartbeat(beat(D0), 5.0).sends
    assert [member.trouble is None for member in fleet.members("decode")] == [False]


def test_the_successor_of_a_draining_incarnation_takes_requests() -> None:
    fleet = new_fleet(P0, D0)
    fleet.drain(D0.id)
    fleet.register(Register(instance=instance("d0", "decode", incarnation="2")), 1.0)
    assert [member.trouble is None for member in fleet.members("decode")] == [True]


def test_an_instance_that_is_not_a_member_cannot_be_drained() -> None:
    with pytest.raises(UnknownInstance, match="'d1'") as raised:
        new_fleet(P0, D0).drain(D1.id)
    assert raised.value.status == 404


# --- refusals ----------------------------------------------------------------------------------------------------------


def renamed(name: str) -> InstanceInfo:
    return msgspec.structs.replace(D1, id=InstanceId(name))


def other_pool(**changes: object) -> InstanceInfo:
    return msgspec.structs.replace(D1, pool=msgspec.structs.replace(D1.pool, **changes))


@pytest.mark.parametrize(
    ("asking", "names"),
    [
        (renamed("detokenizer"), "detokenizer"),
        (renamed("router"), "router"),
        (renamed(""), "name must be"),
        (renamed("a b"), "'a b'"),
        (renamed("d1\n"), "name must be"),
        (renamed("d" * 65), "1 to 64"),
        (renamed("é"), "letters"),
        (msgspec.structs.replace(D1, incarnation=Incarnation("")), "incarnation"),
        (msgspec.structs.replace(D1, incarnation=Incarnation("x" * 100_000)), "incarnation"),
        (msgspec.structs.replace(D1, max_running=0), "max_running must be between 1 and"),
        (other_pool(total_pages=0), "total_pages must be between 1 and"),
        (other_pool(total_pages=-(2**63)), "total_pages must be between 1 and"),
        (other_pool(total_pages=2**64 - 1), "total_pages must be between 1 and"),
        (other_pool(address=-1), "address -1"),
        (other_pool(address=2**63 - 1), f"address {2**63 - 1}"),
        (other_pool(device="cuda"), "device must be cpu or cuda:N, is 'cuda'"),
        (other_pool(device="cuda:-1"), "device must be"),
        (other_pool(device="tpu:0"), "device must be"),
        (other_pool(device="x" * 100_000), "device must be"),
        (other_pool(wire=bytes(2**20 + 1)), "transport descriptor"),
        (msgspec.structs.replace(D1, model=msgspec.structs.replace(D1.model, context_tokens=0)), "context must be between"),
        (msgspec.structs.replace(D1, model=msgspec.structs.replace(D1.model, vocab_size=2**31)), "vocabulary must be between"),
    ],
)
def test_an_instance_with_an_absurd_description_is_refused_and_told_which_part(asking: InstanceInfo, names: str) -> None:
    fleet = new_fleet()
    change = fleet.register(Register(instance=asking), 1.0)
    (refusal,) = change.sends
    assert isinstance(refusal.message, Refused) and names in refusal.message.reason and len(refusal.message.reason) <= 500
    assert refusal.to not in ("detokenizer", "router") and len(refusal.to) <= 129
    assert fleet.addresses() == {refusal.to: asking.inbox}
    assert (ids(fleet), fleet.refusals) == ([], 1)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "page_size"])
@pytest.mark.parametrize("value", [2**30, 2**63 - 1, 2**64 - 1])
def test_a_layout_of_huge_numbers_is_refused(field: str, value: int) -> None:
    fleet = new_fleet()
    layout = msgspec.structs.replace(D1.pool.layout, **{field: value})
    pool = msgspec.structs.replace(D1.pool, layout=layout, total_pages=2**31 - 1, address=2**62)
    asking = msgspec.structs.replace(D1, pool=pool)
    (refusal,) = fleet.register(Register(instance=asking), 1.0).sends
    assert isinstance(refusal.message, Refused)
    assert ("64-bit" if value == 2**30 else field) in refusal.message.reason


def test_a_layout_without_size_is_not_a_valid_message() -> None:
    register = msgspec.to_builtins(Register(instance=D1))
    register["instance"]["pool"]["layout"]["kv_heads"] = 0
    with pytest.raises(TandemError, match="kv_heads"):  # which the mailbox counts as a refused frame
        msgspec.convert(register, Register)


def test_a_newcomer_that_is_absurd_does_not_evict_the_member_of_its_name() -> None:
    fleet = new_fleet(P0, D0)
    absurd = msgspec.structs.replace(other_pool(total_pages=0), id=D0.id, incarnation=Incarnation("2"))
    assert fleet.register(Register(instance=absurd), 1.0).lost == []
    assert ids(fleet) == ["p0", "d0"]


@pytest.mark.parametrize("inbox", ["", "tcp://", "tcp://host", "tcp://host:70000", "ipc:///tmp/x", "tcp://[::1]:5", "x" * 10_000])
def test_an_instance_without_a_valid_address_is_refused_where_people_see_it(inbox: str) -> None:
    fleet = new_fleet(P0)
    change = fleet.register(Register(instance=msgspec.structs.replace(D1, inbox=inbox)), 1.0)
    assert (change.sends, ids(fleet), fleet.refusals) == ([], ["p0"], 1)
    assert fleet.addresses() == {P0.id: P0.inbox}
    assert ["is not an address" in refusal.reason or len(refusal.reason) == 500 for refusal in fleet.refused.values()] == [True]


def other_model(**changes: object) -> InstanceInfo:
    fields = msgspec.structs.asdict(D1.model) | changes
    return msgspec.structs.replace(D1, model=msgspec.convert(fields, ModelIdentity))


def other_layout(**changes: object) -> InstanceInfo:
    layout = msgspec.structs.replace(D1.pool.layout, **changes)
    return msgspec.structs.replace(D1, pool=msgspec.structs.replace(D1.pool, layout=layout))


@pytest.mark.parametrize(
    ("asking", "names"),
    [
        (other_model(fingerprint="g"), "model fingerprint is g"),
        (other_model(dtype="bfloat16"), "dtype is bfloat16"),
        (other_model(vocab_size=5), "vocabulary is 5"),
        (other_model(context_tokens=64), "context is 64"),
        (other_layout(page_size=8), "page size is 8"),
        (other_layout(version=9), "layout version is 9"),
        (other_layout(order="head"), "page order is head"),
        (other_layout(kv_heads=4), "KV layout is (2, 4, 4)"),
        (msgspec.structs.replace(D1, pool=msgspec.structs.replace(D1.pool, backend="other")), "transport is other"),
        (msgspec.structs.replace(D1, wire_version=WIRE_VERSION + 2), f"wire version {WIRE_VERSION + 2}"),
    ],
)
def test_an_instance_that_does_not_match_is_refused_and_told_what_differs(asking: InstanceInfo, names: str) -> None:
    fleet = new_fleet(P0)
    (refusal,) = fleet.register(Register(instance=asking), 1.0).sends
    assert isinstance(refusal.message, Refused) and names in refusal.message.reason
    assert fleet.addresses()[refusal.to] == asking.inbox
    assert ids(fleet) == ["p0"]


def test_an_instance_whose_vocabulary_is_not_the_routers_is_refused() -> None:
    fleet = Fleet(Incarnation("r"), "tcp://detokenizer:1", heartbeat_s=0.5, dead_after_s=DEAD_AFTER_S, vocab_size=5)
    (refusal,) = fleet.register(Register(instance=P0), 1.0).sends
    assert isinstance(refusal.message, Refused) and "the router's model is 5" in refusal.message.reason
    fleet.register(Register(instance=other_model(vocab_size=5)), 1.0)
    assert ids(fleet) == ["d1"]


def test_a_neighbouring_wire_version_is_welcome() -> None:
    fleet = new_fleet(P0, msgspec.structs.replace(D0, wire_version=WIRE_VERSION + 1))
    assert ids(fleet) == ["p0", "d0"]


def test_when_everyone_has_left_another_model_may_come() -> None:
    fleet = new_fleet(P0)
    fleet.tick(DEAD_AFTER_S)
    fleet.register(Register(instance=other_model(fingerprint="g")), 5.0)
    assert fleet.model is not None and fleet.model.fingerprint == "g"


def test_the_fleet_remembers_a_bounded_number_of_strangers() -> None:
    fleet = new_fleet(P0)
    for number in range(3 * REMEMBERED):
        stranger = msgspec.structs.replace(other_layout(page_size=8), incarnation=Incarnation(str(number)))
        fleet.register(Register(instance=stranger), 1.0)
    assert len(fleet.addresses()) == REMEMBERED + 1


def test_a_heartbeat_of_a_stranger_is_stale() -> None:
    fleet = new_fleet(P0)
    assert fleet.heartbeat(beat(D0), 1.0).sends == []
    assert (ids(fleet), fleet.stale) == (["p0"], 1)


def test_a_member_whose_connection_broke_is_dead_when_two_heartbeats_pass_without_one() -> None:
    fleet = new_fleet(P0, D0)
    for member in (P0, D0):
        fleet.heartbeat(beat(member), 10.0)
    fleet.connection_broken(P0.id, 10.1)
    assert fleet.next_deadline() == 11.1
    assert [member.info.id for member in fleet.tick(11.1).lost] == ["p0"]
    assert ids(fleet) == ["d0"]


def test_a_member_that_beats_after_its_connection_broke_lives() -> None:
    fleet = new_fleet(P0)
    fleet.connection_broken(P0.id, 1.0)
    fleet.heartbeat(beat(P0), 1.4)
    assert fleet.tick(2.1).lost == [] and fleet.next_deadline() == 1.4 + DEAD_AFTER_S


def test_a_broken_connection_gives_no_member_more_time_and_a_stranger_none() -> None:
    fleet = new_fleet(P0)
    deadline = fleet.next_deadline()
    assert deadline is not None
    fleet.connection_broken(P0.id, deadline - 0.1)
    fleet.connection_broken(D0.id, deadline - 0.1)
    assert fleet.next_deadline() == deadline
