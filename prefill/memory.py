"""The memory of a prefill instance: who gets pages next, and which pages are never used again.

Owns the page pool. What of a prompt is in its prefix cache is in `common/instance/prompt_cache.py`. Knows requests. Does not know
rows, plans, pushes or messages.
"""

from collections.abc import Callable, Iterable

from common.executor import EngineDescription
from common.instance.prompt_cache import PromptCache
from common.instance.request import Phase
from common.instance.requests import RequestTable
from common.instance.shares import who_gives_way
from common.pages.pool import Closing, PageLease, PagePool, count_pages
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

    def lease(self, request: PrefillRequest, requests: RequestTable[PrefillRequest]) -> bool:
        """Lease the pages for its prompt, which is computed next. False: there is no room for it now."""
        hit = self.prompts.find(request)
        takes = self.pool.takes(request.pages, hit)
        request.lease = self.pool.lease(request.pages, hit)
        if request.lease is None:
            return False
        requests.shares.hold(request, 0, takes)
        requests.shares.given(request.owner, self.prompts.missing_tokens(request))
        self.prompts.begin(request)
        return True

    def who_gives_way(
        self, request: PrefillRequest, requests: RequestTable[PrefillRequest], is_stuck: Callable[[PrefillRequest], bool]
    ) -> list[PrefillRequest] | None:
        """Whose prompts of other owners are given up so that this one has room: those for which nobody has granted a reservation
        yet, the youngest first. None: it waits for its turn. is_stuck: whether the pages of one that has ended stay away."""
        takes = self.pool.takes(request.pages, self.prompts.find(request))
        if not requests.shares.may_take(request.owner, 0, takes):
            return None
        going = [each for each in requests if each.phase is Phase.ENDED and not is_stuck(each)]

        def order() -> list[PrefillRequest]:
            held = [r for r in requests if r.lease and r.phase is not Phase.ENDED and r.decode is None]
            return sorted((r for r in held if r.rank.priority >= request.rank.priority), key=lambda r: r.rank, reverse=True)

        def fits(victims: list[PrefillRequest]) -> bool:
            closing = Closing()
            coming = sum(closing.add(each.lease) for each in (*going, *victims) if each.lease is not None)
            return takes <= self.pool.available_pages + coming

        return who_gives_way(request, 0, takes, requests.shares, order, fits)

    def quarantine(self, request: PrefillRequest) -> None:
        """A push that is not proven to have stopped may still read its pages: nobody ever writes them again."""
        assert request.lease is not None
        self._quarantined.append(request.lease)
        self._lost_pages = count_pages(self._quarantined)
        request.lease = None

    def quarantined(self, stuck: Iterable[PageLease]) -> int:
        """Pages in quarantine, with those of more leases that wait for the end of a push. Each page counts once."""
        return count_pages([*self._quarantined, *stuck])
