"""The page pool: which pages are free, which are cached, and the leases that hold the others.

Owns page ids. Knows no tensors, requests or time. Pages leave only inside a lease and come home only by it. A lease holds
pages of its own, and may share cached ones (`radix_cache.py`) with other leases. Each page counts once, so at any time

    free + cached + leased == total

where cached are those in the cache that no lease holds. A lease's first pages are the cached ones:

    |<-- hit, or published -->|<-------- own -------->|
    p0         p1             p2         p3           p4       page ids in token order
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from common.ids import Int32Array
from common.pages.radix_cache import CachedPage, Hit, PageKeys, RadixCache


class PageLease:
    """The right to some pages, and the only way to give them back."""

    def __init__(self, pool: "PagePool", pages: Int32Array, hit: Hit) -> None:
        self._pool = pool
        self._pages = pages
        self._cached = list(hit.pages)
        self.found = len(hit.pages)
        """How many of the first pages others have computed."""
        self._given_back = 0
        self._epoch = pool.cache.epoch
        self._open = True

    @property
    def pages(self) -> Int32Array:
        """Page ids in token order, [pages] int32. `extend` makes a new array. Raises RuntimeError once the lease is closed."""
        if not self._open:
            raise RuntimeError("the lease is closed: its pages may belong to another request")
        return self._pages

    @property
    def held(self) -> Int32Array:
        """All that cannot be given to others, in any order: `pages`, and the cached ones that were given back or have replaced
        some of them. [pages] int32. Raises RuntimeError once the lease is closed."""
        return np.concatenate([self.pages[self._own()], np.array([cached.page for cached in self._cached], dtype=np.int32)])

    def __len__(self) -> int:
        return len(self._pages)

    def extend(self, page_count: int) -> Int32Array | None:
        """Take `page_count` more pages from the pool and append them. Raises ValueError when `page_count` is negative.

        Returns their ids, [page_count] int32; None, and changes nothing, when fewer are available. Raises RuntimeError once the
        lease is closed.
        """
        if not self._open:
            raise RuntimeError("a closed lease takes no pages: nothing would give them back")
        more = self._pool._take(page_count)
        if more is not None:
            self._pages = np.concatenate([self._pages, more])
        return more

    def publish(self, keys: PageKeys, upto_pages: int, *, replaces: bool = False) -> None:
        """The KV of the first `upto_pages` pages is final: whoever asks for these tokens may share them from now on. keys: of the
        tokens in the lease's pages. replaces: no step or push has been told of the pages yet. Raises RuntimeError once the lease
        is closed.

        Of a page that somebody else has published meanwhile one copy goes, or both would take room: theirs, if nobody holds it;
        ours, if it `replaces`. Otherwise ours stays the lease's own, beside theirs. A lease from before a flush publishes nothing
        more.
        """
        if not self._open:
            raise RuntimeError("a closed lease has no pages")
        pool, cache = self._pool, self._pool.cache
        if not cache.enabled or self._epoch != cache.epoch:
            return
        begin, skipped = len(self._cached), self._given_back
        assert begin >= skipped or begin >= upto_pages, "a page that was given back may hold anything"
        before = self._cached[-1] if begin else None
        pages = self._pages[begin - skipped : max(begin, upto_pages) - skipped].tolist()
        for key, page in zip(keys.pages[begin:upto_pages], pages, strict=True):
            before = cache.insert(key, before, page)
            if before is None:
                return
            if before.page != page and cache.hold([before]):
                pool._put([before.page])  # nobody held it
                before.page = page
            self._cached.append(before)
        if replaces:
            self._use_found()

    def give_back(self, page_count: int) -> None:
        """Give back the first `page_count` pages and keep the others. Those that are cached are held until the lease is closed.
        Raises ValueError when `page_count` is negative or too large, and RuntimeError once the lease is closed."""
        if not self._open:
            raise RuntimeError("a closed lease has no pages")
        if not 0 <= page_count <= len(self._pages):
            raise ValueError(f"{page_count} of {len(self._pages)} pages")
        own = self._own()[:page_count]
        self._pool._put(self._pages[:page_count][own])
        self._pages = self._pages[page_count:]
        self._given_back += page_count

    def close(self) -> None:
        """Give the pages back. A second close is a bug in the caller and raises RuntimeError."""
        if not self._open:
            raise RuntimeError("a lease is closed once")
        self._open = False
        self._pool._put(self._pages[self._own()])
        self._pool._put(self._pool.cache.release(self._cached))

    def _use_found(self) -> None:
        """What others have published takes the place of own pages, which go home."""
        cached = np.array([cached.page for cached in self._cached[self._given_back :]], dtype=np.int32)
        doubles = np.flatnonzero(self._pages[: len(cached)] != cached)
        if len(doubles):
            self._pool._put(self._pages[doubles])
            self._pages = np.concatenate([cached, self._pages[len(cached) :]])
            self.found = max(self.found, self._given_back + int(doubles[-1]) + 1)

    def _own(self) -> NDArray[np.bool_]:
        """Which of `pages` no other lease can hold. [pages]."""
        own = np.ones(len(self._pages), dtype=np.bool_)
        cached = np.array([cached.page for cached in self._cached[self._given_back :]], dtype=np.int32)
        own[: len(cached)] = self._pages[: len(cached)] != cached
        return own


class PagePool:
    """`total_pages` pages, handed out in leases. The pages returned last are used first, because they are warm in the
    processor's cache. caches: whether published pages can be hit. most_used: the most pages that were leased at once."""

    def __init__(self, total_pages: int, caches: bool = True) -> None:
        self.total_pages = total_pages
        self.cache = RadixCache(caches)
        self._free = np.arange(total_pages - 1, -1, -1, dtype=np.int32)
        self._free_count = total_pages
        self.most_used = 0

    @property
    def free_pages(self) -> int:
        return self._free_count

    @property
    def cached_pages(self) -> int:
        """Those that can be hit, or given to others."""
        return len(self.cache.unheld)

    @property
    def available_pages(self) -> int:
        """What can be leased."""
        return self._free_count + len(self.cache.unheld)

    @property
    def leased_pages(self) -> int:
        """Those that some lease holds."""
        return self.total_pages - self._free_count - len(self.cache.unheld)

    def lease(self, page_count: int, hit: Hit | None = None) -> PageLease | None:
        """A lease of `page_count` pages, or None when fewer are available. Its first ones are those of the hit, which
        `cache.match` has just returned. Raises ValueError when `page_count` is negative or less than the hit, or the hit is of
        earlier."""
        hit = hit or Hit()
        if page_count < len(hit):
            raise ValueError(f"a lease of {page_count} pages")
        if page_count - hit.held > self.available_pages:
            return None
        self.cache.hold(hit.pages)
        own = self._take(page_count - len(hit))
        assert own is not None, "there was room"
        hits = np.array([cached.page for cached in hit.pages], dtype=np.int32)
        return PageLease(self, np.concatenate([hits, own]), hit)

    def flush(self) -> int:
        """Nothing that was published so far can be hit any more. Returns how many pages were cached."""
        pages = self.cache.flush()
        self._put(pages)
        return len(pages)

    # --- for leases --------------------------------------------------------------------------------------------------------

    def _take(self, page_count: int) -> Int32Array | None:
        """Free pages first, then the least recently used of the cached ones."""
        if page_count < 0:
            raise ValueError(f"a lease of {page_count} pages")
        lacking = page_count - self._free_count
        if lacking > len(self.cache.unheld):
            return None
        if lacking > 0:
            self._put(self.cache.evict(lacking))
        rest = self._free_count - page_count
        pages = self._free[rest : self._free_count][::-1].copy()
        self._free_count = rest
        self.most_used = max(self.most_used, self.total_pages - rest - len(self.cache.unheld))
        return pages

    def _put(self, pages: Int32Array | list[int]) -> None:
        """These are free."""
        end = self._free_count + len(pages)
        assert end + len(self.cache.unheld) <= self.total_pages, "more pages came home than left"
        self._free[self._free_count : end] = pages[::-1]
        self._free_count = end


class Closing:
    """What several leases bring when they are closed together: a page that they share comes with the last of them."""

    def __init__(self) -> None:
        self._released: Counter[CachedPage] = Counter()

    def add(self, lease: PageLease) -> int:
        """This one, too. Returns how many more pages others may have then."""
        self._released.update(lease._cached)
        return self.brings(lease)

    def brings(self, lease: PageLease) -> int:
        """How many of the pages of this one, which was added, others may have when all are closed."""
        return int(lease._own().sum()) + sum(self._released[cached] == cached.leases for cached in lease._cached)


def count_pages(leases: Iterable[PageLease]) -> int:
    """How many pages these hold together."""
    return len({page for lease in leases for page in lease.held.tolist()})
