"""The prefix cache: which pages hold the KV of which tokens, so that a prompt which begins alike need not be computed again.

Owns the index of whole pages whose KV is final, who holds each, the order in which those that nobody holds are given up, and the
blocks by which routers know the cache. Knows page ids and tokens. Does not know tensors, requests, leases, messages or time:
`pool.py` moves pages between it, leases and free memory.

    keys:      page 0            page 1            page 2          a page's digest is that of its tokens and of the digest before
               root ─► d0 ─────► d1 ─────────────► d2              it, so it stands for all tokens up to the page's end; the root
                                                                   is the digest of the variant that computes, and the salt
    index:     d0 ─► (page 7)◄──(page 3)◄──────────(page 9)        each cached page knows the one before it

Who holds a cached page holds all pages before it. So those that nobody holds stand in one order: a lease that closes puts its
pages behind all others, the deepest first. A page always stands before the one that it follows, and the first in the order is the
least recently used one that no other cached page follows.

Blocks are the cache as routers see it, in steps of about 128 tokens instead of pages:

    pages of 16:    0  1  2  3  4  5  6  7 | 8  9 10 11 12 13 14 15 | 16 ...
                                        block 0                  block 1

The last page of a block stands for the block. Who has a page has all before it, so who has a block has all tokens up to its end.
The name is a part of that page's digest: two blocks of one name make an estimate wrong, never an answer.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from common.ids import ID_BYTES, Variant

BLOCK_TOKENS, BLOCK_PAGES = 128, 8
"""A block has as many tokens, if these are whole pages, and at most as many pages."""
NAME_BYTES = 8
MOST_CHANGES = 2**16
"""So many changes are remembered between two reports. After more, a report names all blocks that are there."""


def pages_of_block(page_size: int) -> int:
    """page_size: tokens of a page."""
    return min(max(1, BLOCK_TOKENS // page_size), BLOCK_PAGES)


def block_name(digest: bytes) -> int:
    """The name of the block that the page with this digest ends."""
    return int.from_bytes(digest[:NAME_BYTES], "little")


class BlockLog:
    """Which blocks have come into a cache and gone from it since the log was cleared. each: pages of a block."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.overflowed = False
        """It is not known any more what has changed."""
        self._is_stored: dict[int, bool] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to report."""
        return self.overflowed or bool(self._is_stored)

    def note(self, number: int, digest: bytes, *, stored: bool) -> None:
        """The page of this number in its prompt, counted from 0, has come (stored) or gone. What comes and goes again has not
        changed."""
        if self.overflowed or (number + 1) % self.each:
            return
        name = block_name(digest)
        if self._is_stored.pop(name, stored) is stored:
            self._is_stored[name] = stored
        if len(self._is_stored) > MOST_CHANGES:
            self.overflow()

    def names(self, *, stored: bool) -> Iterator[int]:
        """The names of the blocks that have come, or gone."""
        return (name for name, is_stored in self._is_stored.items() if is_stored is stored)

    def overflow(self) -> None:
        """Too much has changed."""
        self.overflowed = True
        self._is_stored.clear()

    def clear(self) -> None:
        """A report was made."""
        self.overflowed = False
        self._is_stored.clear()


DIGEST_BYTES = 16


class PageKey(NamedTuple):
    """What a whole page is known by."""

    digest: bytes
    tokens: bytes
    """The page's tokens, packed (`pack_ids`)."""


class PageKeys:
    """The keys of a request's whole pages, in order. Each page is sliced and hashed once, when `pages` is first asked for it.

    page_tokens: of a page. variant: what computes them; different ones share no page. salt: nor do requests with different salts.
    packed: token ids (`pack_ids`).
    """

    def __init__(self, page_tokens: int, variant: Variant = Variant(), salt: str = "", packed: bytes = b"") -> None:  # noqa: B008
        self._page_bytes = page_tokens * ID_BYTES
        self.variant = variant
        self._last = _root(variant, salt)
        self._pages: list[PageKey] = []
        self._rest = packed

    @property
    def pages(self) -> Sequence[PageKey]:
        """The keys of the whole pages."""
        rest, size = self._rest, self._page_bytes
        if len(rest) >= size:
            last, end = self._last, len(rest) - len(rest) % size
            for begin in range(0, end, size):
                tokens = rest[begin : begin + size]
                last = _digest(last, tokens)
                self._pages.append(PageKey(last, tokens))
            self._last, self._rest = last, rest[end:]
        return self._pages

    def extend(self, packed: bytes) -> None:
        """More tokens follow, such as those of the answer."""
        self._rest += packed


@dataclass(frozen=True, slots=True)
class BlockNames:
    """The names of a prompt's whole blocks, in order, and what it takes to go on when the prompt grows."""

    page_size: int
    """Tokens of a page."""
    names: Sequence[int]
    tokens: int
    """How many tokens the prompt has."""
    variant: Variant
    """What computes them."""
    _last: bytes
    """The digest of the last whole page."""
    _rest: bytes
    """The token ids behind it."""

    @classmethod
    def of(cls, packed: bytes, page_size: int, variant: Variant = Variant(), salt: str = "") -> "BlockNames":  # noqa: B008
        """packed: the prompt's token ids (`pack_ids`). variant, salt: see `PageKeys`."""
        return cls(page_size, (), 0, variant, _root(variant, salt), b"").extended(packed)

    def extended(self, packed: bytes) -> "BlockNames":
        """These token ids follow."""
        names, last, rest = list(self.names), self._last, self._rest + packed
        size, each = self.page_size * ID_BYTES, pages_of_block(self.page_size)
        page, end = (self.tokens * ID_BYTES - len(self._rest)) // size, len(rest) - len(rest) % size
        for begin in range(0, end, size):
            last, page = _digest(last, rest[begin : begin + size]), page + 1
            if page % each == 0:
                names.append(block_name(last))
        tokens = self.tokens + len(packed) // ID_BYTES
        return BlockNames(self.page_size, names, tokens, self.variant, last, rest[end:])


def _root(variant: Variant, salt: str) -> bytes:
    """What stands for all that is before the first page."""
    return blake2b("\0".join((*variant, salt)).encode(), digest_size=DIGEST_BYTES, person=b"root").digest()


def _digest(before: bytes, tokens: bytes) -> bytes:
    """The digest of a page. before: that of the page before it."""
    return blake2b(before + tokens, digest_size=DIGEST_BYTES).digest()


@dataclass(slots=True, eq=False)
class CachedPage:
    """A page whose KV is final; nobody writes it any more."""

    key: PageKey
    before: "CachedPage | None"
    """The page that it follows."""
    page: int
    number: int
    """The page's place in its prompt, counted from 0."""
    leases: int = 1
    """How many leases hold it."""
    is_indexed: bool = True
    """It can be hit; False once the cache was flushed."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached pages that a prompt begins with. To be leased before anything else happens to the pool."""

    pages: tuple[CachedPage, ...] = ()

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def held(self) -> int:
        """How many of them some lease holds: they are the first ones. A lease with the hit takes none of the available pages for
        them."""
        return bisect_left(self.pages, True, key=lambda cached: cached.leases == 0)

    @property
    def indexed(self) -> "Hit":
        """Those that can still be hit: they are the first ones."""
        if not self.pages or self.pages[-1].is_indexed:
            return self
        return Hit(self.pages[: bisect_left(self.pages, True, key=lambda cached: not cached.is_indexed)])


NO_HIT = Hit()


class RadixCache:
    """The index of one pool. enabled: when False, nothing is ever hit."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._index: dict[bytes, CachedPage] = {}
        self.unheld: OrderedDict[bytes, CachedPage] = OrderedDict()
        """The pages that no lease holds, by their digests, in the order in which they are given up."""
        self.epoch = 0
        """How often the cache was flushed."""
        self.evicted = 0
        """Pages given up for other requests so far."""
        self.log: BlockLog | None = None
        """Which blocks have come and gone; None: no router follows the cache."""

    def match(self, keys: PageKeys, most_pages: int, known: Hit = NO_HIT) -> Hit:
        """The cached pages that these begin with, at most `most_pages`. known: what an earlier call has returned for the same:
        only what comes behind it is looked up. Changes nothing."""
        if not self.enabled:
            return NO_HIT
        found: list[CachedPage] = []
        known = known.indexed
        before, pages = known.pages[-1] if known.pages else None, keys.pages
        for at in range(len(known), min(most_pages, len(pages))):
            cached = self._index.get(pages[at].digest)
            if cached is None or not _is(cached, pages[at], before):
                break
            found.append(cached)
            before = cached
        return Hit((*known.pages, *found)) if found else known

    # --- for the pool ------------------------------------------------------------------------------------------------------

    def hold(self, pages: Sequence[CachedPage]) -> int:
        """One more lease holds these. Returns how many of them nobody held before. Raises ValueError when one is cached no
        longer."""
        if pages and not pages[-1].is_indexed:
            raise ValueError("a hit is leased before anything else happens to the pool")
        fresh = 0
        for cached in pages:
            if not cached.leases:
                del self.unheld[cached.key.digest]
                fresh += 1
            cached.leases += 1
        return fresh

    def release(self, pages: Sequence[CachedPage]) -> list[int]:
        """A lease holds these no longer, from its first page on. Returns the ids of those that nobody holds now and that were
        flushed: they are free."""
        flushed: list[int] = []
        for cached in reversed(pages):
            cached.leases -= 1
            if not cached.leases and cached.is_indexed:
                self.unheld[cached.key.digest] = cached
            elif not cached.leases:
                flushed.append(cached.page)
        return flushed

    def insert(self, key: PageKey, before: CachedPage | None, page: int) -> CachedPage | None:
        """Find the page of this key, or let `page` be it, held by one lease. None: it cannot be cached."""
        if not self.enabled:
            return None
        cached = self._index.get(key.digest)
        if cached is None:
            number = 0 if before is None else before.number + 1
            cached = self._index[key.digest] = CachedPage(key, before, page, number)
            if self.log is not None:
                self.log.note(number, key.digest, stored=True)
            return cached
        return cached if _is(cached, key, before) else None

    def evict(self, page_count: int) -> list[int]:
        """Give up the pages that nobody holds and that were used least recently, at most so many. Returns their ids."""
        pages: list[int] = []
        while self.unheld and len(pages) < page_count:
            digest, cached = self.unheld.popitem(last=False)
            del self._index[digest]
            cached.is_indexed = False
            if self.log is not None:
                self.log.note(cached.number, digest, stored=False)
            pages.append(cached.page)
        self.evicted += len(pages)
        return pages

    def flush(self) -> list[int]:
        """Nothing can be hit any more. Returns the ids of the pages that nobody held."""
        pages = [cached.page for cached in self.unheld.values()]
        for cached in self._index.values():
            cached.is_indexed = False
        self._index.clear()
        self.unheld.clear()
        self.epoch += 1
        if self.log is not None:
            self.log.overflow()
        return pages

    def blocks(self, each: int) -> list[int]:
        """The names of all blocks that can be hit. each: pages of a block."""
        ends = (cached for cached in self._index.values() if (cached.number + 1) % each == 0)
        return [block_name(cached.key.digest) for cached in ends]


def _is(cached: CachedPage, key: PageKey, before: CachedPage | None) -> bool:
    """Digests that collide give a miss, never the KV of other tokens."""
    return cached.before is before and cached.key.tokens == key.tokens
