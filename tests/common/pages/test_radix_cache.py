"""The prefix cache with its pool and leases, against a plain model: a hit holds the KV of exactly these tokens, every page is in
one place, and what is given up first is what nobody holds, nothing follows, and was used least recently."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.ids import Variant, pack_ids
from common.pages.pool import Closing, PageLease, PagePool, count_pages
from common.pages.radix_cache import NO_HIT, CachedPage, Hit, PageKey, PageKeys

TOTAL = 10
PAGE_TOKENS = 2
Path = tuple[object, ...]
"""A salt, and the tokens of each page up to the one that is meant."""

prompts = st.tuples(st.sampled_from(["", "a"]), st.lists(st.sampled_from([1, 2]), max_size=5))


def keys_of(salt: str, pages: list[int]) -> PageKeys:
    """Page `n` holds token n, again and again."""
    return PageKeys(PAGE_TOKENS, Variant(), salt, pack_ids([page for page in pages for _ in range(PAGE_TOKENS)]))


@dataclass
class Held:
    """A lease, and what the model knows of it. paths: of its whole prompt. published: paths that it holds in the cache."""

    lease: PageLease
    keys: PageKeys
    paths: list[Path]
    pages: list[int]
    published: int = 0
    given_back: int = 0
    flushed: bool = False
    shared: list[int] = field(default_factory=list)
    """The ids of the pages that the cache has under the published paths."""

    @property
    def held(self) -> set[int]:
        own = self.pages[max(self.published, self.given_back) :]
        doubles = [
            page for at, page in enumerate(self.pages) if self.given_back <= at < self.published and page != self.shared[at]
        ]
        return {*own, *doubles, *self.shared}


class CacheLaws(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TOTAL)
        self.held: list[Held] = []
        self.index: dict[Path, int] = {}
        self.used: dict[Path, int] = {}
        self.content: dict[int, Path] = {}
        """What was computed into each page."""
        self.hits: dict[Path, Hit] = {}
        """By what was asked for: what the last match has found. It may be long ago."""
        self.now = 0

    # --- what happens ------------------------------------------------------------------------------------------------------

    @rule(prompt=prompts, more=st.integers(0, 4), cap=st.integers(0, 5))
    def begin(self, prompt: tuple[str, list[int]], more: int, cap: int) -> None:
        keys, paths = keys_of(*prompt), self.paths_of(*prompt)
        asked = (*paths[-1:], cap)
        hit = self.hits[asked] = self.pool.cache.match(keys, cap, self.hits.get(asked, NO_HIT))
        expected = [path for path in paths[:cap] if path in self.index]
        assert [cached.page for cached in hit.pages] == [self.index[path] for path in expected]
        assert [self.content[cached.page] for cached in hit.pages] == expected, "a hit holds the KV of other tokens"
        hits = {self.index[path] for path in expected}
        count = max(len(hit), len(paths)) + more
        room = TOTAL - len(self.all_held() | hits)
        lease = self.pool.lease(count, hit)
        assert (lease is None) == (count - len(hit) > room)
        if lease is not None:
            self.evict(count - len(hit), hits)
            held = Held(lease, keys, paths, lease.pages.tolist(), published=len(hit), shared=[self.index[p] for p in expected])
            assert held.pages[: len(hit)] == held.shared
            self.held.append(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, 3))
    def extend(self, data: st.DataObject, count: int) -> None:
        held = data.draw(st.sampled_from(self.held))
        room = TOTAL - len(self.all_held())
        more = held.lease.extend(count)
        assert (more is None) == (count > room)
        if more is not None:
            self.evict(count, set())
            held.pages += more.tolist()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), upto=st.integers(0, 5), replaces=st.booleans())
    def publish(self, data: st.DataObject, upto: int, replaces: bool) -> None:
        """One of two copies goes: that in the cache, if nobody holds it, or else ours if nobody has used it."""
        held = data.draw(st.sampled_from(self.held))
        upto = min(upto, len(held.paths))
        if held.given_back > held.published:
            return
        held.lease.publish(held.keys, upto, replaces=replaces)
        if held.flushed:
            return
        for at in range(held.published, upto):
            path, page = held.paths[at], held.pages[at]
            self.content[page] = path
            if self.index.get(path) not in self.all_held():
                self.index[path] = page
            held.shared.append(self.index[path])
            held.published = at + 1
        if replaces:
            held.pages[held.given_back : held.published] = held.shared[held.given_back :]
        assert held.lease.pages.tolist() == held.pages[held.given_back :]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, 3))
    def give_back(self, data: st.DataObject, count: int) -> None:
        held = data.draw(st.sampled_from(self.held))
        count = min(count, len(held.pages) - held.given_back)
        held.lease.give_back(count)
        held.given_back += count
        assert held.lease.pages.tolist() == held.pages[held.given_back :] and len(held.lease) == len(held.lease.pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        held.lease.close()
        self.now += 1
        self.used.update(dict.fromkeys(held.paths[: held.published], self.now))

    @rule()
    def flush(self) -> None:
        cached = set(self.index.values()) - self.all_held()
        assert self.pool.flush() == len(cached)
        self.index.clear()
        for held in self.held:
            held.flushed = True

    # --- the model ---------------------------------------------------------------------------------------------------------

    def paths_of(self, salt: str, pages: list[int]) -> list[Path]:
        return [(salt, *pages[: at + 1]) for at in range(len(pages))]

    def all_held(self) -> set[int]:
        return {page for held in self.held for page in held.held}

    def evict(self, wanted: int, hits: set[int]) -> None:
        """`wanted` pages were taken, after `hits` were: until there are so many, one cached page after the other was given up."""
        held = self.all_held() | hits
        while wanted > TOTAL - len(held | set(self.index.values())):
            leaves = [path for path in self.index if self.index[path] not in held and not self.has_followers(path)]
            del self.index[min(leaves, key=lambda path: self.used[path])]

    def has_followers(self, path: Path) -> bool:
        return any(len(other) > len(path) and other[: len(path)] == path for other in self.index)

    # --- what holds --------------------------------------------------------------------------------------------------------

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        held, cached = self.all_held(), set(self.index.values()) - self.all_held()
        free = set(self.pool._free[: self.pool.free_pages].tolist())
        assert self.pool.leased_pages == len(held) == count_pages(each.lease for each in self.held)
        assert self.pool.cached_pages == len(cached)
        assert free == set(range(TOTAL)) - held - cached and len(free) == self.pool.free_pages

    @invariant()
    def what_leases_would_bring_is_known(self) -> None:
        """One closed after the other, the youngest first."""
        closing, brought = Closing(), 0
        for at in reversed(range(len(self.held))):
            rest = {page for other in self.held[:at] for page in other.held}
            brought += closing.add(self.held[at].lease)
            closed = self.held[at:]
            assert brought == len({page for each in closed for page in each.held} - rest)
            assert [closing.brings(each.lease) for each in closed] == [len(each.held - rest) for each in closed]

    @invariant()
    def no_page_is_computed_under_a_reader(self) -> None:
        for held in self.held:
            for at, path in enumerate(held.paths[: held.published]):
                assert self.content[held.shared[at]] == path


TestCacheLaws = CacheLaws.TestCase
TestCacheLaws.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def published(pool: PagePool, keys: PageKeys) -> PageLease:
    lease = pool.lease(len(keys.pages))
    assert lease is not None
    lease.publish(keys, len(keys.pages))
    return lease


def with_digests(keys: PageKeys, *digests: bytes) -> PageKeys:
    """The same pages under other digests."""
    keys._pages = [PageKey(digest, key.tokens) for digest, key in zip(digests, keys.pages, strict=True)]
    return keys


def test_digests_that_collide_are_a_miss() -> None:
    pool = PagePool(TOTAL)
    published(pool, with_digests(keys_of("", [1, 2]), b"first", b"second"))
    others = with_digests(keys_of("", [2, 2]), b"first", b"second")
    assert len(pool.cache.match(others, 2)) == 0, "other tokens"
    follower = with_digests(keys_of("", [2]), b"second")
    assert len(pool.cache.match(follower, 1)) == 0, "the same tokens, but behind others"
    lease = published(pool, others)
    assert len(pool.cache.match(others, 2)) == 0 and pool.cached_pages == 0
    lease.close()
    assert pool.free_pages == TOTAL - 2, "what cannot be cached is free"


def test_keys_grow_with_the_answer() -> None:
    at_once, in_parts = keys_of("a", [1, 2, 3]), PageKeys(PAGE_TOKENS, Variant(), "a", pack_ids([1, 1, 2]))
    assert len(in_parts.pages) == 1
    in_parts.extend(pack_ids([2]))
    in_parts.extend(pack_ids([3, 3, 4]))
    assert in_parts.pages == at_once.pages


class CountedLookups(dict[bytes, CachedPage]):
    lookups = 0

    def get(self, digest: bytes, default: Any = None) -> Any:
        self.lookups += 1
        return super().get(digest, default)


def test_who_waits_looks_only_for_what_it_did_not_know() -> None:
    """Also where the last of it was given up since: that happens in every step while memory is short."""
    pool, keys = PagePool(8), keys_of("", [1] * 8)
    published(pool, keys).close()
    hit, growing = pool.cache.match(keys, 8), pool.lease(0)
    index = pool.cache._index = CountedLookups(pool.cache._index)
    for left in range(7, 0, -1):
        assert growing is not None and growing.extend(1) is not None
        hit = pool.cache.match(keys, 8, hit)
        assert len(hit) == left and index.lookups == 8 - left


def test_a_hit_of_earlier_is_refused() -> None:
    pool, keys = PagePool(TOTAL), keys_of("", [1, 2])
    published(pool, keys).close()
    hit = pool.cache.match(keys, 2)
    assert (hit.held, pool.available_pages, pool.free_pages) == (0, TOTAL, TOTAL - 2)
    everything = pool.lease(TOTAL)
    assert everything is not None and pool.cache.evicted == 2
    everything.close()
    with pytest.raises(ValueError, match="before anything else"):
        pool.lease(4, hit)
    with pytest.raises(ValueError, match="a lease of 1 pages"):
        pool.lease(1, hit)


def test_a_pool_without_a_cache_hits_nothing() -> None:
    pool, keys = PagePool(TOTAL, caches=False), keys_of("", [1, 2])
    published(pool, keys).close()
    assert len(pool.cache.match(keys, 2)) == 0 and pool.free_pages == TOTAL
