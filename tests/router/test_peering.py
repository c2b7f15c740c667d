"""Which pairs link, what their members are told of each other, and when a pair can be used.

The choice is held against a plain definition of favourites, and against what joins and losses change.
"""

from functools import cache
from hashlib import blake2b
from random import Random

import pytest

from common.ids import ROUTER, InstanceId
from common.instance.membership import PeerSets
from common.instance.ports import Send
from common.messages import Goodbye, InstanceInfo, LinkInfo, LinkReport, Peers, Register
from router import peering
from router.fleet import Members
from router.peering import AT_LEAST, Pair, Partners
from tests.builders import instance
from tests.router.bench import D0, D1, P0, new_fleet
from tests.router.fakes import beat, hear


class Pairs:
    """Partners, and the pairs that they have made and not dropped."""

    def __init__(self, limit: int) -> None:
        self.partners = Partners(limit)
        self.prefill: set[InstanceId] = set()
        self.decode: set[InstanceId] = set()
        self.linked: set[Pair] = set()

    def join(self, *names: str) -> "Pairs":
        for name in map(InstanceId, names):
            self.partners.join(name, "prefill" if name.startswith("p") else "decode")
            (self.prefill if name.startswith("p") else self.decode).add(name)
        return self

    def leave(self, *names: str) -> "Pairs":
        for name in map(InstanceId, names):
            self.partners.leave(name, "prefill" if name.startswith("p") else "decode")
            (self.prefill if name.startswith("p") else self.decode).discard(name)
            self.linked = {pair for pair in self.linked if name not in pair}
        return self

    def settle(self) -> tuple[set[Pair], set[Pair]]:
        """What was made and what was dropped."""
        new, gone = self.partners.settle()
        made, dropped = set(new), set(gone)
        assert len(made) == len(new) and not made & self.linked
        assert dropped <= self.linked
        self.linked = (self.linked | made) - dropped
        return made, dropped

    def partners_of(self, name: str) -> int:
        return sum(name in pair for pair in self.linked)


def names(role: str, count: int) -> list[str]:
    return [f"{role}{number}" for number in range(count)]


def test_up_to_the_limit_all_pairs_are_linked_and_without_a_limit_always() -> None:
    for limit, count in ((5, 5), (0, 40)):
        pairs = Pairs(limit).join(*names("p", count), *names("d", count))
        pairs.settle()
        assert len(pairs.linked) == count * count
    pairs.join("p-late", "d-late").settle()
    assert len(pairs.linked) == 41 * 41


def test_beyond_the_limit_each_prefill_instance_has_so_many_partners_and_each_decode_instance_some() -> None:
    pairs = Pairs(limit=8).join(*names("p", 20), *names("d", 100))
    pairs.settle()
    assert all(pairs.partners_of(name) >= 8 for name in names("p", 20))
    assert all(pairs.partners_of(name) >= AT_LEAST for name in names("d", 100))
    assert len(pairs.linked) <= 20 * 8 + 100 * AT_LEAST


def test_two_routers_choose_alike_in_whatever_order_they_meet_the_instances() -> None:
    everyone = [*names("p", 30), *names("d", 30)]
    one, other = Pairs(6).join(*everyone), Pairs(6).join(*Random(1).sample(everyone, len(everyone)))
    one.settle(), other.settle()
    assert one.linked == other.linked


def test_those_that_lose_partners_get_others_at_once_and_nothing_else_changes() -> None:
    pairs = Pairs(limit=8).join(*names("p", 40), *names("d", 40))
    pairs.settle()
    before = set(pairs.linked)
    gone = names("d", 10)
    made, dropped = pairs.leave(*gone).settle()
    kept = {pair for pair in before if pair.decode not in gone}
    assert pairs.linked == kept | made and not dropped
    assert all(pairs.partners_of(name) >= 8 for name in names("p", 40))
    assert {pair.prefill for pair in made} <= {pair.prefill for pair in before - kept}, "only they make new links"


def test_a_newcomer_changes_little_and_takes_no_link_away() -> None:
    pairs = Pairs(limit=8).join(*names("p", 100), *names("d", 100))
    pairs.settle()
    made, dropped = pairs.join("d100").settle()
    assert not dropped and AT_LEAST <= len(made) <= 4 * 8 and {pair.decode for pair in made} == {"d100"}


def test_each_newcomer_takes_one_link_at_most_from_those_that_link_to_it_and_that_of_the_lowest_rank() -> None:
    pairs = Pairs(limit=4).join(*names("p", 12))
    drops = 0
    for number in range(100):
        before = set(pairs.linked)
        made, dropped = pairs.join(f"d{number}").settle()
        spare = (before | made) - wanted(pairs)
        drops += len(dropped)
        for name in pairs.prefill:
            ranked = sorted((pair for pair in spare if pair.prefill == name), key=lambda pair: rank(*pair))
            gone = {pair for pair in dropped if pair.prefill == name}
            assert gone == set(ranked[: len(gone)]) and len(gone) <= sum(pair.prefill == name for pair in made)
    assert drops


def favourites_of_prefill(pairs: Pairs, prefill: str, limit: int) -> list[InstanceId]:
    return sorted(pairs.decode, key=lambda decode: rank(prefill, decode), reverse=True)[:limit]


def favourites_of_decode(pairs: Pairs, decode: str) -> list[InstanceId]:
    return sorted(pairs.prefill, key=lambda prefill: rank(prefill, decode), reverse=True)[:AT_LEAST]


def wanted(pairs: Pairs) -> set[Pair]:
    """By definition: the favourites of each, where a prefill instance has four."""
    theirs = {Pair(prefill, decode) for decode in pairs.decode for prefill in favourites_of_decode(pairs, decode)}
    return theirs | {Pair(prefill, decode) for prefill in pairs.prefill for decode in favourites_of_prefill(pairs, prefill, 4)}


@cache
def rank(prefill: str, decode: str) -> int:
    """The splitmix64 finalizer over both names' hashes, in plain integers."""
    mask = 2**64 - 1

    def of(name: str) -> int:
        return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") | 1

    theirs = of(decode)
    bits = of(prefill) ^ (((theirs << 31) | (theirs >> 33)) & mask)
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    return (bits ^ (bits >> 31)) | 1


@pytest.mark.parametrize("seed", range(6))
def test_after_any_joins_and_losses_every_favourite_is_linked(seed: int) -> None:
    random, pairs = Random(seed), Pairs(4)
    for _ in range(80):
        there = sorted(pairs.prefill | pairs.decode)
        if there and random.random() < 0.4:
            pairs.leave(random.choice(there))
        else:
            pairs.join(*{f"{random.choice('pd')}{random.randrange(40)}"} - set(there))
        if random.random() < 0.3:
            pairs.settle()
            should = wanted(pairs)
            assert should <= pairs.linked
            assert all(pair.prefill in pairs.prefill and pair.decode in pairs.decode for pair in pairs.linked)
            for name in pairs.prefill:
                assert pairs.partners_of(name) <= max(8, sum(name in pair for pair in should))


@pytest.fixture
def fleet() -> Members:
    return new_fleet(P0, D0, linked=False)


def test_what_changes_within_a_moment_is_told_together_and_as_one_message_to_all_who_are_told_the_same() -> None:
    decodes = [instance(f"d{number}", "decode") for number in range(9)]
    prefills = [instance(f"p{number}", "prefill") for number in range(9)]
    fleet = new_fleet(*decodes, *prefills, linked=False)
    sends = fleet.peering.flush(0.0)
    assert len(sends) == 18 and len({id(send.message) for send in sends}) == 2
    fleet.goodbye(Goodbye(id=decodes[0].id, incarnation=decodes[0].incarnation), 1.0)
    fleet.goodbye(Goodbye(id=decodes[1].id, incarnation=decodes[1].incarnation), 1.0)
    assert fleet.peering.flush(0.1) == [], "more may change"
    assert {send.to for send in fleet.peering.flush(0.3)} == {info.id for info in prefills}
    assert fleet.peering.flush(9.0) == []


def test_a_member_that_does_not_confirm_what_it_was_told_is_told_the_whole_set_again(fleet: Members) -> None:
    fleet.peering.flush(0.0)
    fleet.heartbeat(beat(P0), 0.4)
    assert fleet.peering.flush(0.4) == [], "its answer may be under way"
    fleet.heartbeat(beat(P0), 0.9)
    (send,) = fleet.peering.flush(0.9)
    assert isinstance(send.message, Peers)
    assert (send.to, send.message.since, send.message.joined) == (P0.id, None, (D0,))
    fleet.heartbeat(beat(P0, peers_version=send.message.version), 2.0)
    assert fleet.peering.flush(2.0) == []


@pytest.mark.parametrize(("one", "other"), [(D0, P0), (P0, D0)], ids=["decode", "prefill"])
def test_only_a_report_that_lets_more_members_serve_says_so(fleet: Members, one: InstanceInfo, other: InstanceInfo) -> None:
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

    turns = [fleet.peering.flush(0.0) for _ in range(6)]
    assert not any(turns[:5]), "pairs are made first: seven in a turn"
    fleet.goodbye(Goodbye(id=decodes[0].id, incarnation=decodes[0].incarnation), 1.0)
    fleet.register(Register(instance=instance("d1", "decode", incarnation="d1-2")), 0.0)
    turns += [fleet.peering.flush(0.0) for _ in range(12)]
    assert max(len(turn) for turn in turns) == 1
    turns += [fleet.peering.flush(0.5) for _ in range(40)]
    assert fleet.peering.settled
    for turn in turns:
        apply(turn)
    there = {info.id for info in decodes[1:]}
    assert all(known[info.id] == there for info in prefills)
    assert all(known[name] == {info.id for info in prefills} for name in there)


def test_a_pair_whose_reader_is_still_to_be_told_of_its_writer_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peering, "INFOS_AT_ONCE", 1)
    fleet = new_fleet(P0, D0, linked=False)
    (send,) = fleet.peering.flush(0.0)
    assert send.to == P0.id, "the decode instance comes in the next turn"
    link = LinkInfo(peer=D0.id, incarnation=D0.incarnation, state="ready")
    report = LinkReport(id=P0.id, incarnation=P0.incarnation, version=1, since=0, links=(link,))
    assert not fleet.told(report, 0.0).more_can_serve
    (send,) = fleet.peering.flush(0.0)
    assert isinstance(send.message, Peers)
    assert not fleet.heartbeat(beat(D0), 0.1).more_can_serve
    assert fleet.heartbeat(beat(D0, peers_version=send.message.version), 0.2).more_can_serve
