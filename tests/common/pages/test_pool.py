"""The page pool: no page is in two places, and what leaves comes home only through its lease."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.pages.pool import PageLease, PagePool

TOTAL = 12


class PoolLaws(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TOTAL)
        self.leases: list[PageLease] = []

    @rule(page_count=st.integers(0, TOTAL + 2))
    def lease(self, page_count: int) -> None:
        free = self.pool.free_pages
        lease = self.pool.lease(page_count)
        assert (lease is None) == (page_count > free)
        if lease is not None:
            assert len(lease) == page_count
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), page_count=st.integers(0, TOTAL + 2))
    def extend(self, data: st.DataObject, page_count: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        free, before = self.pool.free_pages, lease.pages.tolist()
        more = lease.extend(page_count)
        assert (more is None) == (page_count > free)
        assert lease.pages.tolist() == before + ([] if more is None else more.tolist())
        assert len(lease) == len(before) + (0 if more is None else page_count)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.close()
        with pytest.raises(RuntimeError, match="closed once"):
            lease.close()
        with pytest.raises(RuntimeError, match="takes no pages"):
            lease.extend(1)
        with pytest.raises(RuntimeError, match="may belong to another"):
            _ = lease.pages

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        leased = [page for lease in self.leases for page in lease.pages.tolist()]
        assert self.pool.free_pages + len(leased) == TOTAL
        assert len(set(leased)) == len(leased)
        assert set(leased) <= set(range(TOTAL))

    @invariant()
    def every_free_page_can_be_had(self) -> None:
        rest = self.pool.lease(self.pool.free_pages)
        assert rest is not None
        leased = {page for lease in self.leases for page in lease.pages.tolist()}
        assert set(rest.pages.tolist()) == set(range(TOTAL)) - leased
        rest.close()


TestPoolLaws = PoolLaws.TestCase
TestPoolLaws.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def leased(pool: PagePool, page_count: int) -> PageLease:
    lease = pool.lease(page_count)
    assert lease is not None
    return lease


def test_pages_are_handed_out_from_the_first_on() -> None:
    pool = PagePool(4)
    lease = leased(pool, 3)
    assert lease.pages.tolist() == [0, 1, 2]
    assert str(lease.pages.dtype) == "int32"


def test_what_came_home_last_is_used_first() -> None:
    pool = PagePool(8)
    first = leased(pool, 2)
    leased(pool, 3)
    pages = first.pages.tolist()
    first.close()
    assert leased(pool, 2).pages.tolist() == pages


def test_the_pages_of_a_lease_are_its_own_copy() -> None:
    pool = PagePool(4)
    first = leased(pool, 2)
    pages = first.pages
    first.close()
    second = leased(pool, 4)
    pages[:] = 9
    assert sorted(second.pages.tolist()) == [0, 1, 2, 3]


def test_a_lease_that_grew_brings_everything_home() -> None:
    pool = PagePool(8)
    lease = leased(pool, 2)
    leased(pool, 1)
    before = lease.pages
    more = lease.extend(3)
    assert more is not None
    assert more.dtype == lease.pages.dtype == "int32"
    assert lease.pages.tolist() == [0, 1, 3, 4, 5]
    assert before.tolist() == [0, 1], "what was read before stays as it was"
    assert lease.extend(3) is None
    assert (len(lease), pool.free_pages) == (5, 2)
    lease.close()
    assert pool.free_pages == 7


def test_the_first_pages_of_a_lease_can_come_home_before_the_others() -> None:
    pool = PagePool(8)
    lease = leased(pool, 5)
    first, rest = lease.pages[:2].tolist(), lease.pages[2:].tolist()
    lease.give_back(2)
    assert lease.pages.tolist() == rest and len(lease) == 3 and pool.free_pages == 5
    assert leased(pool, 2).pages.tolist() == first
    for pages in (-1, 4):
        with pytest.raises(ValueError, match="of 3 pages"):
            lease.give_back(pages)
    lease.close()
    assert pool.free_pages == 6
    with pytest.raises(RuntimeError):
        lease.give_back(0)


def test_fewer_pages_than_none_are_refused() -> None:
    pool = PagePool(4)
    with pytest.raises(ValueError, match="-1 pages"):
        pool.lease(-1)
    lease = leased(pool, 1)
    with pytest.raises(ValueError, match="-1 pages"):
        lease.extend(-1)
    assert pool.free_pages == 3


def test_an_empty_pool_leases_nothing_but_nothing() -> None:
    pool = PagePool(0)
    assert pool.lease(1) is None
    lease = leased(pool, 0)
    assert len(lease) == 0
    lease.close()


def test_the_most_used_pages_are_those_of_the_fullest_moment() -> None:
    pool = PagePool(TOTAL)
    assert pool.most_used == 0
    first, second = pool.lease(5), pool.lease(2)
    assert first is not None and second is not None
    second.close()
    assert first.extend(4) is not None and pool.lease(TOTAL) is None
    first.close()
    assert (pool.free_pages, pool.most_used) == (TOTAL, 9)
