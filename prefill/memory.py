"""The memory of a prefill instance: who gets pages next, and which pages are never used again.

Owns the page pool. What of a prompt is in its prefix cache is in `common/instance/prompt_cache.py`. Knows requests. Does not know
rows, plans, pushes or messages.
"""

from collections.abc import Iterable

from common.engine.executor import EngineDescription
from common.instance.prompt_cache import PromptCache
from common.pages.pool import PageLease, PagePool, count_pages
from prefill.request import PrefillRequest


class PromptMemory:
    def __init__(self, engine: EngineDescription, caches: bool) -> None:
        self.pool = PagePool(engine.total_pages, caches)
        self.prompts = PromptCache(self.pool, engine.layout.page_size)
        self._quarantined: list[PageLease] = []
        self._lost_pages = 0

    def is_ready(self, request: PrefillRequest) -> bool:
        """Whether it may be admitted, once it has room. One whose grammar is being made ready is passed by the others, too."""
        return not request.prepares and not self.prompts.is_promised(request)

    def can_hold(self, request: PrefillRequest) -> bool:
        """Whether there is room for it when all others have ended."""
        return request.pages <= self.pool.total_pages - self._lost_pages

    def lease(self, request: PrefillRequest) -> bool:
        """Lease the pages for its prompt, which is computed next. False: there is no room for it now."""
        request.lease = self.pool.lease(request.pages, self.prompts.find(request))
        if request.lease is None:
            return False
        self.prompts.begin(request)
        return True

    def quarantine(self, request: PrefillRequest) -> None:
        """A push that is not proven to have stopped may still read its pages: nobody ever writes them again."""
        assert request.lease is not None
        self._quarantined.append(request.lease)
        self._lost_pages = count_pages(self._quarantined)
        request.lease = None

    def quarantined(self, stuck: Iterable[PageLease]) -> int:
        """Pages in quarantine, with those of more leases that wait for the end of a push. Each page counts once."""
        return count_pages([*self._quarantined, *stuck])
