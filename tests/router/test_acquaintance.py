"""What members are told of each other, and when a pair can be used: messages to the fleet, and its answers."""

import pytest

from common.ids import ROUTER, InstanceId
from common.instance.membership import PeerSets
from common.instance.ports import Send
from common.messages import Goodbye, InstanceInfo, LinkInfo, LinkReport, Peers, Register
from router import peering
from router.fleet import Fleet
from tests.builders import instance
from tests.router.bench import D0, D1, P0, new_fleet
from tests.router.fakes import beat, hear


@pytest.fixture
def fleet() -> Fleet:
    return new_fleet(P0, D0, linked=False)


def test_what_changes_within_a_moment_is_told_together_and_as_one_message_to_all_who_are_told_the_same() -> None:
    decodes = [instance(f"d{number}", "decode") for number in range(9)]
    prefills = [instance(f"p{number}", "prefill") for number in range(9)]
    fleet = new_fleet(*decodes, *prefills, linked=False)
    sends = fleet.flush(0.0)
    assert len(sends) == 18 and len({id(send.message) for send in sends}) == 2
    fleet.goodbye(Goodbye(id=decodes[0].id, incarnation=decodes[0].incarnation), 1.0)
    fleet.goodbye(Goodbye(id=decodes[1].id, incarnation=decodes[1].incarnation), 1.0)
    assert fleet.flush(0.1) == [], "more may change"
    assert {send.to for send in fleet.flush(0.3)} == {info.id for info in prefills}
    assert fleet.flush(9.0) == []


def test_a_member_that_does_not_confirm_what_it_was_told_is_told_the_whole_set_again(fleet: Fleet) -> None:
    fleet.flush(0.0)
    fleet.heartbeat(beat(P0), 0.4)
    assert fleet.flush(0.4) == [], "its answer may be under way"
    fleet.heartbeat(beat(P0), 0.9)
    (send,) = fleet.flush(0.9)
    assert isinstance(send.message, Peers)
    assert (send.to, send.message.since, send.message.joined) == (P0.id, None, (D0,))
    fleet.heartbeat(beat(P0, peers_version=send.message.version), 2.0)
    assert fleet.flush(2.0) == []


@pytest.mark.parametrize(("one", "other"), [(D0, P0), (P0, D0)], ids=["decode", "prefill"])
def test_only_a_report_that_lets_more_members_serve_says_so(fleet: Fleet, one: InstanceInfo, other: InstanceInfo) -> None:
    hear(fleet, other, one, now=0.5)
    assert hear(fleet, one, other, now=1.0).more_can_serve, "a link"
    assert not hear(fleet, one, other, now=1.5).more_can_serve
    assert not hear(fleet, one, other, draining=True, now=2.0).more_can_serve
    assert hear(fleet, one, other, now=2.5).more_can_serve, "it drains no more"
    assert not hear(fleet, one, now=3.0).more_can_serve
    assert fleet.register(Register(instance=D1), 3.5).more_can_serve
    assert not fleet.register(Register(instance=D1), 3.5).more_can_serve


def test_a_large_fleet_is_told_over_several_turns_and_those_who_leave_meanwhile_are_nobodys_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peering, "PAIRS_AT_ONCE", 7)
    monkeypatch.setattr(peering, "INFOS_AT_ONCE", 5)
    prefills = [instance(f"p{number}", "prefill") for number in range(6)]
    decodes = [instance(f"d{number}", "decode") for number in range(6)]
    fleet = new_fleet(*prefills, *decodes, linked=False)
    sets: dict[InstanceId, PeerSets] = {info.id: PeerSets() for info in (*prefills, *decodes)}
    known: dict[InstanceId, set[InstanceId]] = {name: set() for name in sets}

    def apply(sends: list[Send]) -> None:
        for send in sends:
            assert isinstance(send.message, Peers)
            change = sets[send.to].receive(ROUTER, send.message)
            if change is not None:
                known[send.to] -= set(change.left)
                known[send.to] |= {info.id for info in change.joined}

    turns = [fleet.flush(0.0) for _ in range(6)]
    assert not any(turns[:5]), "pairs are made first: seven in a turn"
    fleet.goodbye(Goodbye(id=decodes[0].id, incarnation=decodes[0].incarnation), 1.0)
    fleet.register(Register(instance=instance("d1", "decode", incarnation="d1-2")), 0.0)
    turns += [fleet.flush(0.0) for _ in range(12)]
    assert max(len(turn) for turn in turns) == 1
    turns += [fleet.flush(0.5) for _ in range(40)]
    assert fleet.settled
    for turn in turns:
        apply(turn)
    there = {info.id for info in decodes[1:]}
    assert all(known[info.id] == there for info in prefills)
    assert all(known[name] == {info.id for info in prefills} for name in there)


def test_a_pair_whose_reader_is_still_to_be_told_of_its_writer_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peering, "INFOS_AT_ONCE", 1)
    fleet = new_fleet(P0, D0, linked=False)
    (send,) = fleet.flush(0.0)
    assert send.to == P0.id, "the decode instance comes in the next turn"
    link = LinkInfo(peer=D0.id, incarnation=D0.incarnation, state="ready")
    report = LinkReport(id=P0.id, incarnation=P0.incarnation, version=1, since=0, links=(link,))
    assert not fleet.links_reported(report).more_can_serve
    (send,) = fleet.flush(0.0)
    assert isinstance(send.message, Peers)
    assert not fleet.heartbeat(beat(D0), 0.1).more_can_serve
    assert fleet.heartbeat(beat(D0, peers_version=send.message.version), 0.2).more_can_serve
