"""Which pairs link: against a plain definition of favourites, and what joins and losses change."""

from functools import cache
from hashlib import blake2b
from random import Random

import pytest

from common.ids import InstanceId
from router.peering import AT_LEAST, Pair, Partners


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
        made, dropped = map(set, done := self.partners.settle())
        assert len(made) == len(done.made) and not made & self.linked
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


def test_a_set_grows_to_twice_the_limit_at_most_or_to_the_favourites() -> None:
    pairs = Pairs(limit=4)
    pairs.join("p0").settle()
    for number in range(120):
        pairs.join(f"d{number}", f"p{1 + number}").settle()
        wanting = {d for d in pairs.decode if "p0" in favourites_of_decode(pairs, d)} - set(favourites_of_prefill(pairs, "p0", 4))
        assert pairs.partners_of("p0") <= max(8, 4 + len(wanting))


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
