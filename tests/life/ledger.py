"""The ledger of a simulated instance's pages: who writes into a page that has changed hands is found out.

Owns a number for each page, its tenancy, which changes when the page comes home, and the poison that is left in it then. Knows no
requests.
"""

from collections.abc import Sequence

import numpy as np

from common.executor import Chunk, RowStart, StepPlan
from common.ids import Int32Array, unpack_ids
from common.pages.pool import PageLease, PagePool
from common.pages.radix_cache import CachedPage, Hit
from common.sampling_params import SamplingParams
from tests.engine.toy import ToyExecutor

POISON = 0xA5


class Ledger:
    """Keeps watch over one pool and the memory of all ranks from the moment of its making."""

    def __init__(self, pool: PagePool, toys: Sequence[ToyExecutor]) -> None:
        self._pool = pool
        self._toys = toys
        self._tenancies = [0] * pool.total_pages
        self._leases: list[PageLease] = []
        self._lease, self._put = pool.lease, pool._put
        for toy in toys:
            toy.pages[:] = POISON
        pool.lease, pool._put = self._goes_out, self._comes_home  # type: ignore[method-assign]

    @property
    def leased_pages(self) -> int:
        return self._pool.leased_pages

    def tenancy(self, page: int) -> int:
        """The number of the page's present tenancy; -1 when it is free."""
        return -1 if page in self._free() else self._tenancies[page]

    def leases_of(self, page: int) -> list[PageLease]:
        """The leases that hold the page."""
        return [lease for lease in self._leases if lease._open and page in lease.held]

    def spoiled(self) -> list[int]:
        """Free pages that somebody has written to."""
        free, pages = self._free(), self._pool.total_pages
        clean = np.all([(toy.pages.reshape(pages, -1)[free] == POISON).all(axis=1) for toy in self._toys], axis=0)
        return [int(page) for page in free[~clean]]

    def miscached(self) -> list[int]:
        """Pages in the prefix cache that do not hold what an instance without one computes for their tokens."""
        wrong: list[int] = []
        for cached in self._pool.cache._index.values():
            tokens = list[Int32Array]()
            at: CachedPage | None = cached
            while at is not None:
                tokens.insert(0, unpack_ids(at.key.tokens))
                at = at.before
            alone = ToyExecutor(len(tokens), 1)
            start = RowStart(0, np.arange(len(tokens), dtype=np.int32), SamplingParams(max_new_tokens=1))
            alone.launch(StepPlan(1, (start,), (Chunk(0, 0, np.concatenate(tokens), last=False),)))
            whole = alone.pages[-1]
            if not all(np.array_equal(whole[:, :, toy.heads], toy.pages[cached.page]) for toy in self._toys):
                wrong.append(cached.page)
        return wrong

    def _free(self) -> Int32Array:
        return self._pool._free[: self._pool.free_pages]

    def _goes_out(self, page_count: int, hit: Hit | None = None) -> PageLease | None:
        lease = self._lease(page_count, hit)
        if lease is not None:
            self._leases.append(lease)
        return lease

    def _comes_home(self, pages: Int32Array | list[int]) -> None:
        for page in pages:
            self._tenancies[page] += 1
        for toy in self._toys:
            toy.pages[pages] = POISON
        self._leases = [lease for lease in self._leases if lease._open]
        self._put(pages)
