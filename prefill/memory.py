"""The memory of a prefill instance: who gets pages next, what of a prompt is there already, and what others wait for.

Owns the page pool with its prefix cache, the pages that are never used again, and which new pages the admitted prompts will put
into the cache. Knows requests and their keys. Does not know rows, plans, pushes or messages.

A waiting request whose next missing page is being computed for another one would compute it again. It is passed by the others
until the last page that the two share is there, or the other one has ended: an admitted prompt waits for nothing but its turn.
"""

from collections.abc import Iterable

from common.engine.executor import EngineDescription
from common.pages.pool import PageLease, PagePool, count_pages
from prefill.request import PrefillRequest


class PromptMemory:
    """asked_tokens: prompt tokens of all requests that were admitted. hit_tokens: those of them that were cached."""

    def __init__(self, engine: EngineDescription, caches: bool) -> None:
        self.pool = PagePool(engine.total_pages, caches)
        self._page_size = engine.layout.page_size
        self._caches = caches
        self._promised: dict[bytes, PrefillRequest] = {}
        """Who computes the page of this digest, as long as it is not there."""
        self._quarantined: list[PageLease] = []
        self._lost_pages = 0
        self.asked_tokens = self.hit_tokens = 0

    def is_ready(self, request: PrefillRequest) -> bool:
        """Whether it may be admitted, once it has room. One whose grammar is being made ready is passed by the others, too."""
        if request.prepares:
            return False
        if request.awaits in self._promised:
            return False
        request.awaits = self._promised_to(request)
        return request.awaits is None

    def can_hold(self, request: PrefillRequest) -> bool:
        """Whether there is room for it when all others have ended."""
        return request.pages <= self.pool.total_pages - self._lost_pages

    def lease(self, request: PrefillRequest) -> bool:
        """Lease the pages for its prompt. False: there is no room for it now."""
        hit = self.pool.cache.match(request.keys, self._most_hits(request))
        request.lease = self.pool.lease(request.pages, hit)
        if request.lease is None:
            return False
        request.cached_tokens = len(hit) * self._page_size
        request.published = len(hit)
        self.asked_tokens += len(request.prompt)
        self.hit_tokens += request.cached_tokens
        if self._caches:
            for key in request.keys.pages[len(hit) :]:
                self._promised.setdefault(key.digest, request)
        return True

    def computed(self, request: PrefillRequest) -> None:
        """A step has written more of its KV: its whole pages can be hit."""
        assert request.progress is not None
        if self._caches:
            whole = request.progress.computed // self._page_size
            if request.lease is not None:
                request.lease.publish(request.keys, whole)
            self._keep_promises(request, whole)

    def ended(self, request: PrefillRequest) -> None:
        """Nothing more of its prompt will be computed, but what a step is computing now. Idempotent."""
        if self._caches:
            self._keep_promises(request, len(request.keys.pages))

    def quarantine(self, request: PrefillRequest) -> None:
        """A push that is not proven to have stopped may still read its pages: nobody ever writes them again."""
        assert request.lease is not None
        self._quarantined.append(request.lease)
        self._lost_pages = count_pages(self._quarantined)
        request.lease = None

    def quarantined(self, stuck: Iterable[PageLease]) -> int:
        """Pages in quarantine, with those of more leases that wait for the end of a push. Each page counts once."""
        return count_pages([*self._quarantined, *stuck])

    def _most_hits(self, request: PrefillRequest) -> int:
        """Most pages of its prompt that need not be computed. Its last token always is: the answer follows from it."""
        sampling = request.asked.sampling
        needs_all = sampling.prompt_logprobs is not None or sampling.pooling is not None
        return 0 if needs_all else (len(request.prompt) - 1) // self._page_size

    def _promised_to(self, request: PrefillRequest) -> bytes | None:
        """The last of the pages that it lacks and that another one computes; None: nobody computes the first that it lacks."""
        if not self._promised:
            return None
        most = self._most_hits(request)
        hit, last = self.pool.cache.match(request.keys, most), None
        for key in request.keys.pages[len(hit) : most]:
            if key.digest not in self._promised:
                break
            last = key.digest
        return last

    def _keep_promises(self, request: PrefillRequest, upto_pages: int) -> None:
        for key in request.keys.pages[request.published : upto_pages]:
            if self._promised.get(key.digest) is request:
                del self._promised[key.digest]
        request.published = max(request.published, upto_pages)
