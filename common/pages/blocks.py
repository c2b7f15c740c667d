"""Blocks: a prefix cache as routers see it, in steps of about 128 tokens instead of pages.

Owns the size and the names of blocks, and which have come and gone since somebody was told. Knows digests. Does not know pages,
instances, routers or messages.

    pages of 16:    0  1  2  3  4  5  6  7 | 8  9 10 11 12 13 14 15 | 16 ...
                                        block 0                  block 1

The last page of a block stands for the block. Who has a page has all before it, so who has a block has all tokens up to its end.
The name is a part of that page's digest: two blocks of one name make an estimate wrong, never an answer.
"""

from collections.abc import Iterator

BLOCK_TOKENS, BLOCK_PAGES = 128, 8
"""A block has as many tokens, if these are whole pages, and at most as many pages."""
NAME_BYTES = 8
MOST_CHANGES = 2**16
"""So many changes are remembered until somebody is told. Of more, all that is there is told instead."""


def pages_of_block(page_size: int) -> int:
    """page_size: tokens of a page."""
    return min(max(1, BLOCK_TOKENS // page_size), BLOCK_PAGES)


def block_name(digest: bytes) -> int:
    """Of the block that the page with this digest ends."""
    return int.from_bytes(digest[:NAME_BYTES], "little")


class BlockLog:
    """Which blocks have come into a cache and gone from it since the log was cleared. each: pages of a block. overflowed: it is
    not known any more."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.overflowed = False
        self._is_stored: dict[int, bool] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
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
        """Of the blocks that have come, or gone."""
        return (name for name, is_stored in self._is_stored.items() if is_stored is stored)

    def overflow(self) -> None:
        """Too much has changed."""
        self.overflowed = True
        self._is_stored.clear()

    def clear(self) -> None:
        """Somebody was told."""
        self.overflowed = False
        self._is_stored.clear()
