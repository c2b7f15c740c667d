"""The page pool: which pages are free, and the leases that hold the others.

Owns page ids. Knows no tensors, tokens, requests or time. Pages leave only inside a lease and come home only by it,
so at any time  free + sum(len(lease) for open leases) == total.
"""

import numpy as np

from common.ids import Int32Array


class PageLease:
    """The right to some pages, and the only way to give them back."""

    def __init__(self, pool: "PagePool", pages: Int32Array) -> None:
        self._pool = pool
        self._pages = pages
        self._open = True

    @property
    def pages(self) -> Int32Array:
        """Page ids in token order, [pages] int32. `extend` makes a new array. Raises RuntimeError once the lease is closed."""
        if not self._open:
            raise RuntimeError("the lease is closed: its pages may belong to another request")
        return self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def extend(self, page_count: int) -> Int32Array | None:
        """Take `page_count` more pages from the pool and append them. Raises ValueError when `page_count` is negative.

        Returns their ids, [page_count] int32; None, and changes nothing, when fewer are free. Raises RuntimeError once the lease
        is closed.
        """
        if not self._open:
            raise RuntimeError("a closed lease takes no pages: nothing would give them back")
        more = self._pool._take(page_count)
        if more is not None:
            self._pages = np.concatenate([self._pages, more])
        return more

    def give_back(self, page_count: int) -> None:
        """Give back the first `page_count` pages and keep the others. Raises ValueError when `page_count` is negative or too
        large, and RuntimeError once the lease is closed."""
        if not self._open:
            raise RuntimeError("a closed lease has no pages")
        if not 0 <= page_count <= len(self._pages):
            raise ValueError(f"{page_count} of {len(self._pages)} pages")
        self._pool._take_back(self._pages[:page_count])
        self._pages = self._pages[page_count:]

    def close(self) -> None:
        """Give the pages back. A second close is a bug in the caller and raises RuntimeError."""
        if not self._open:
            raise RuntimeError("a lease is closed once")
        self._open = False
        self._pool._take_back(self._pages)


class PagePool:
    """`total_pages` pages, handed out in leases. The pages returned last are used first, because they are warm in the cache.
    most_used: the most pages that were out at once."""

    def __init__(self, total_pages: int) -> None:
        self.total_pages = total_pages
        self._free = np.arange(total_pages - 1, -1, -1, dtype=np.int32)
        self._free_count = total_pages
        self.most_used = 0

    @property
    def free_pages(self) -> int:
        return self._free_count

    def lease(self, page_count: int) -> PageLease | None:
        """A lease of `page_count` pages, or None when fewer are free. Raises ValueError when `page_count` is negative."""
        pages = self._take(page_count)
        return None if pages is None else PageLease(self, pages)

    def _take(self, page_count: int) -> Int32Array | None:
        if page_count < 0:
            raise ValueError(f"a lease of {page_count} pages")
        if page_count > self._free_count:
            return None
        rest = self._free_count - page_count
        pages = self._free[rest : self._free_count][::-1].copy()
        self._free_count = rest
        self.most_used = max(self.most_used, self.total_pages - rest)
        return pages

    def _take_back(self, pages: Int32Array) -> None:
        end = self._free_count + len(pages)
        assert end <= self.total_pages, "more pages came home than left"
        self._free[self._free_count : end] = pages[::-1]
        self._free_count = end
