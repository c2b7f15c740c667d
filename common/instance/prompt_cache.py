"""The prefix cache as requests use it: what of a prompt is there already, what others wait for, and what routers are told.

Owns which pages the prompts that are computed here will put into the cache, which routers want to know what is in it, and the
version of what they were told. Knows requests and their keys. Does not know rows, plans, pushes or sockets.

A waiting request whose next missing page is being computed for another one would compute it again. It is passed by the others
until the last page that the two share is there, or the other one has ended: an admitted prompt waits for nothing but its turn.

What routers are told:

    TellCache ─► all blocks at this version, in parts, to the router that asks
    a change  ─► gathered for GATHER_S ─► one message to all who follow, encoded once
    too many changes at once, or a flush ─► all blocks, to all

While no router follows, nothing is noted.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from common.ids import Digest, InstanceId
from common.instance.ports import Send
from common.instance.request import Request
from common.messages import CacheChanges, InstanceInfo
from common.pages.pool import PagePool
from common.pages.radix_cache import BlockLog, Hit, RadixCache, pages_of_block

GATHER_S = 0.2
"""Changes within this long are told together."""
PART_NAMES = 2**16
"""Most names in one part of all blocks: half a MiB."""


class CacheReporter:
    """Reports to routers which blocks are in the prefix cache. A router that was wrongly taken for lost sees by the version that
    it must ask again."""

    def __init__(self, me: InstanceInfo, cache: RadixCache, weights: Digest) -> None:
        self._page_size = me.page_size
        self._message = partial(CacheChanges, id=me.id, incarnation=me.incarnation)
        self._cache = cache
        cache.log = None  # nobody follows this life yet
        self._followers: dict[InstanceId, None] = {}
        self._asking: dict[InstanceId, None] = {}
        """Followers that get everything with the next report."""
        self._reported_s = 0.0
        self._version = 0
        self.weights = weights
        """What computed the blocks that are there now."""

    @property
    def version(self) -> int:
        """The version of the cache as it was last reported; 0 while nobody follows."""
        return 0 if self._cache.log is None else self._version

    def ask(self, router: InstanceId) -> None:
        """This life of a router wants to know everything now, and what changes from now on."""
        if self._cache.log is None:
            self._cache.log = BlockLog(pages_of_block(self._page_size))
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
        return self._reported_s if self._asking else self._reported_s + GATHER_S

    def tick(self, now: float) -> list[Send]:
        log, due_s = self._cache.log, self.next_deadline()
        if log is None or due_s is None or now < due_s:
            return []
        sends: list[Send] = []
        if log:
            sends = self._changes(log)
            self._reported_s = now
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
        changes = self._message(version=self._version, since=self._version - 1, stored=stored, gone=gone, weights=self.weights)
        return [Send(router, changes) for router in self._followers if router not in self._asking]

    def _everything(self, each: int) -> Iterator[CacheChanges]:
        """All blocks at this version. At least one part, which may be empty."""
        names = self._cache.blocks(each)
        for part, begin in enumerate(range(0, max(1, len(names)), PART_NAMES)):
            stored, more = _pack(names[begin : begin + PART_NAMES]), begin + PART_NAMES < len(names)
            yield self._message(version=self._version, stored=stored, part=part, more=more, weights=self.weights)


def _pack(names: Iterable[int]) -> bytes:
    return np.fromiter(names, dtype="<u8").tobytes()


class PromptCache:
    """What of the prompts of requests is in the prefix cache, and what will be."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._cache = pool.cache
        self._page_size = page_size
        self._promised: dict[bytes, Request] = {}
        """The request that computes the page of this digest, as long as it is not there."""

    def find(self, request: Request) -> Hit:
        """The pages of its prompt that need not be computed. To be leased before anything else happens to the pool."""
        request.hit = self._cache.match(request.keys, self._most_hits(request), request.hit)
        return request.hit

    def missing_tokens(self, request: Request) -> int:
        """How many tokens of its prompt were not cached when it was last looked at."""
        return len(request.prompt) - len(request.hit.pages) * self._page_size

    def is_promised(self, request: Request) -> bool:
        """Whether the next page that it lacks is being computed for another one."""
        if request.awaits in self._promised:
            return True
        request.awaits = None
        if self._promised:  # it waits for the last of the pages that it lacks and that another one computes
            for key in request.keys.pages[len(self.find(request)) : self._most_hits(request)]:
                if key.digest not in self._promised:
                    break
                request.awaits = key.digest
        return request.awaits is not None

    def begin(self, request: Request) -> None:
        """It has leased its hit and the rest of its pages, and will be computed."""
        hit = len(request.hit)
        request.cached_tokens = hit * self._page_size
        request.published = hit
        if self._cache.enabled:
            for key in request.keys.pages[hit:]:
                self._promised.setdefault(key.digest, request)

    def keep_promises(self, request: Request, upto_pages: int) -> None:
        """Nobody waits for these pages of its prompt any more. Idempotent."""
        if not self._promised:
            return
        for key in request.keys.pages[request.published : upto_pages]:
            if self._promised.get(key.digest) is request:
                del self._promised[key.digest]
        request.published = max(request.published, upto_pages)

    def _most_hits(self, request: Request) -> int:
        """Most pages of its prompt that need not be computed. Its last token always is: the answer follows from it. All are if
        something of each is asked for. A prompt that another instance computes may be there whole."""
        sampling = request.asked.sampling
        if request.peer is not None:
            return len(request.prompt) // self._page_size
        needs_all = sampling.prompt_logprobs is not None or sampling.pooling is not None
        return 0 if needs_all else (len(request.prompt) - 1) // self._page_size
