"""The page pool: in which order pages leave, and what is refused.

That no page is in two places, and that what leaves comes home through its lease, are laws of `test_radix_cache.py`.
"""

import pytest

from common.pages.pool import PageLease, PagePool

TOTAL = 12


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


def test_a_closed_lease_is_closed_once_and_has_no_pages() -> None:
    lease = leased(PagePool(4), 2)
    lease.close()
    with pytest.raises(RuntimeError, match="closed once"):
        lease.close()
    with pytest.raises(RuntimeError, match="takes no pages"):
        lease.extend(1)
    with pytest.raises(RuntimeError, match="may belong to another"):
        _ = lease.pages


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
