"""The peer sets of an instance: versions, whole sets in parts, several routers, and routers that start again."""

from random import Random

import pytest

from common.ids import InstanceId
from common.instance.membership import KEEP_S, PeerSets
from common.instance.ports import PeersChanged
from common.messages import Peers
from tests.builders import instance

A, B = InstanceId("router-a"), InstanceId("router-b")
P0, P1, P0_NEXT = instance("p0", "prefill"), instance("p1", "prefill"), instance("p0", "prefill", "2")


def test_changes_follow_the_version_that_they_name_and_others_are_dropped() -> None:
    sets = PeerSets()
    assert sets.receive(A, Peers(version=5, joined=(P0,))) == PeersChanged((P0,), ())
    assert sets.receive(A, Peers(version=7, since=6, joined=(P1,))) is None, "6 was lost"
    assert sets.version(A) == 5
    assert sets.receive(A, Peers(version=8, joined=(P0, P1))) == PeersChanged((P1,), ())
    assert sets.receive(A, Peers(version=8, joined=(P0, P1))) is None, "it came twice"
    assert sets.receive(A, Peers(version=9, since=8, left=(P0.id,))) == PeersChanged((), (P0.id,))


def test_a_whole_set_in_parts_counts_when_it_is_complete() -> None:
    sets = PeerSets()
    sets.receive(A, Peers(version=1, joined=(P0,)))
    assert sets.receive(A, Peers(version=2, joined=(P1,), more=True)) is None
    assert sets.receive(A, Peers(version=3, since=2, joined=(P0_NEXT,))) == PeersChanged((P0_NEXT, P1), ())


def test_a_peer_leaves_when_no_router_names_it_and_the_latest_incarnation_counts() -> None:
    sets = PeerSets()
    sets.receive(A, Peers(version=1, joined=(P0,)))
    assert sets.receive(B, Peers(version=1, joined=(P0,))) is None
    assert sets.receive(A, Peers(version=2, since=1, left=(P0.id,))) is None, "the other router sees it"
    assert sets.receive(B, Peers(version=2, since=1, joined=(P0_NEXT,))) == PeersChanged((P0_NEXT,), ())
    assert sets.receive(B, Peers(version=3, since=2, left=(P0.id,))) == PeersChanged((), (P0.id,))


def test_a_router_that_starts_again_costs_no_link_while_it_meets_its_members() -> None:
    sets = PeerSets()
    sets.receive(A, Peers(version=1, joined=(P0, P1)))
    sets.retire(A, 100.0)
    assert sets.version(A) == 0
    assert sets.receive(B, Peers(version=900, joined=(P0,))) is None
    assert sets.tick(500.0) is None, "the new one has just spoken"
    assert sets.tick(500.0 + KEEP_S) == PeersChanged((), (P1.id,)), "it has not come back"


def test_only_the_successor_of_a_former_life_says_who_has_left_it() -> None:
    sets = PeerSets()
    for router, place in ((A, "a"), (B, "b")):
        sets.receive(router, Peers(version=1, joined=(P0,)), place)
    sets.retire(A, 100.0)
    assert sets.receive(B, Peers(version=2, since=1, left=(P0.id,)), "b") is None, "it counts with the other router"
    successor = InstanceId("router-a2")
    sets.receive(successor, Peers(version=1, joined=(P0,)), "a")
    assert sets.receive(successor, Peers(version=2, since=1, left=(P0.id,)), "a") == PeersChanged((), (P0.id,))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_lost_late_or_twice_the_union_is_that_of_the_routers_when_each_has_sent_its_whole_set(seed: int) -> None:
    random, sets = Random(seed), PeerSets()
    known: dict[InstanceId, str] = {}
    truth: dict[InstanceId, dict[InstanceId, str]] = {A: {}, B: {}}
    versions, waiting = {A: 0, B: 0}, list[tuple[InstanceId, Peers]]()

    def hear(router: InstanceId, message: Peers) -> None:
        change = sets.receive(router, message)
        if change is not None:
            known.update((info.id, info.incarnation) for info in change.joined)
            for gone in change.left:
                del known[gone]

    for life in range(200):
        router, name = random.choice((A, B)), InstanceId(f"p{random.randrange(6)}")
        since = versions[router]
        versions[router] += 1
        if truth[router].pop(name, None) is None:
            truth[router][name] = str(life)
            message = Peers(version=versions[router], since=since, joined=(instance(name, "prefill", str(life)),))
        else:
            message = Peers(version=versions[router], since=since, left=(name,))
        waiting += [(router, message)] * random.choice((0, 1, 1, 1, 2))
        random.shuffle(waiting)
        while waiting and random.random() < 0.7:
            hear(*waiting.pop())
    for router in (A, B):
        whole = tuple(instance(name, "prefill", life) for name, life in truth[router].items())
        hear(router, Peers(version=versions[router] + 1, joined=whole))
    assert known.keys() == truth[A].keys() | truth[B].keys()
    assert all(life in (truth[A].get(name), truth[B].get(name)) for name, life in known.items())
