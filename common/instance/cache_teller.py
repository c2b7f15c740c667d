"""The cache teller: tells routers which blocks are in the prefix cache.

Owns who wants to know, and the version of what was said. Does not know requests, leases or sockets.

    TellCache ─► all blocks at this version, in parts, to the router that asks
    a change  ─► gathered for GATHER_S ─► one message to all who follow, encoded once
    too many changes at once, or a flush ─► all blocks, to all

While nobody follows, nothing is noted.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from common.ids import InstanceId
from common.instance.ports import Send
from common.messages import CacheChanges, InstanceInfo
from common.pages.blocks import BlockLog, pages_of_block
from common.pages.radix_cache import RadixCache

GATHER_S = 0.2
"""Changes within this long are told together."""
PART_NAMES = 2**16
"""Most names in one part of all blocks: half a MiB."""


class CacheTeller:
    """Routers that were taken for lost, and live, see by the version that they must ask again."""

    def __init__(self, me: InstanceInfo, cache: RadixCache) -> None:
        self._me = me
        self._cache = cache
        self._followers: dict[InstanceId, None] = {}
        self._asking: dict[InstanceId, None] = {}
        """Followers that are to be told everything."""
        self._told_s = 0.0
        self._version = 0

    @property
    def version(self) -> int:
        """Of the cache as it was told last; 0 while nobody follows."""
        return 0 if self._cache.log is None else self._version

    def ask(self, router: InstanceId) -> None:
        """This life of a router wants to know everything now, and what changes from now on."""
        if self._cache.log is None:
            self._cache.log = BlockLog(pages_of_block(self._me.page_size))
            self._version += 1  # nobody knows what has changed meanwhile
        self._followers[router] = self._asking[router] = None

    def forget(self, router: InstanceId) -> None:
        """This life of a router is gone."""
        self._followers.pop(router, None)
        self._asking.pop(router, None)
        if not self._followers:
            self._cache.log = None

    def next_deadline(self) -> float | None:
        """When `tick` has something to tell."""
        log = self._cache.log
        if log is None or not (log or self._asking):
            return None
        return self._told_s if self._asking else self._told_s + GATHER_S

    def tick(self, now: float) -> list[Send]:
        log, due_s = self._cache.log, self.next_deadline()
        if log is None or due_s is None or now < due_s:
            return []
        sends: list[Send] = []
        if log:
            sends = self._changes(log)
            self._told_s = now
        if self._asking:
            sends += [Send(router, part) for part in self._everything(log.each) for router in self._asking]
            self._asking = {}
        return sends

    def _changes(self, log: BlockLog) -> list[Send]:
        """What has changed, to all who need not be told everything."""
        self._version += 1
        if log.overflowed:
            self._asking = dict(self._followers)
        stored, gone = _pack(log.names(stored=True)), _pack(log.names(stored=False))
        log.clear()
        changes = CacheChanges(
            id=self._me.id,
            incarnation=self._me.incarnation,
            version=self._version,
            since=self._version - 1,
            stored=stored,
            gone=gone,
        )
        return [Send(router, changes) for router in self._followers if router not in self._asking]

    def _everything(self, each: int) -> Iterator[CacheChanges]:
        """All blocks at this version. At least one part, which may be empty."""
        names = self._cache.blocks(each)
        for part, begin in enumerate(range(0, max(1, len(names)), PART_NAMES)):
            end = begin + PART_NAMES
            yield CacheChanges(
                id=self._me.id,
                incarnation=self._me.incarnation,
                version=self._version,
                stored=_pack(names[begin:end]),
                part=part,
                more=end < len(names),
            )


def _pack(names: Iterable[int]) -> bytes:
    return np.fromiter(names, dtype="<u8").tobytes()
