"""How full the page pool of a simulated instance was, over its life.

Owns the sum over time. Pages change only when their instance acts, so it is exact if each act is preceded by `look`.
"""

from common.pages.pool import PagePool


class PageUse:
    """page_s: pages in use times the seconds they were. seconds: counted so far. now: simulated time at which counting begins."""

    def __init__(self, pool: PagePool, now: float) -> None:
        self._pool = pool
        self._looked_s = now
        self.page_s = self.seconds = 0.0

    @property
    def most(self) -> float:
        """The largest share of the pages that was in use at any moment."""
        return self._pool.most_used / self._pool.total_pages

    def look(self, now: float) -> None:
        """The pages in use now have been in use since the last look."""
        passed_s = now - self._looked_s
        self.page_s += passed_s * (self._pool.leased_pages)
        self.seconds += passed_s
        self._looked_s = now
