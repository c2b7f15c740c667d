"""The prefix cache as prompts use it: what of a prompt is there already, and what others wait for instead of computing it again.

Owns which pages the prompts that are computed here will put into the cache. Knows requests and their keys. Does not know rows,
plans, pushes or messages. The prefill role uses it for every request, the decode role for requests that it serves alone.

A waiting request whose next missing page is being computed for another one would compute it again. It is passed by the others
until the last page that the two share is there, or the other one has ended: an admitted prompt waits for nothing but its turn.
"""

from common.instance.request import Request
from common.pages.pool import PagePool
from common.pages.radix_cache import Hit


class PromptCache:
    """asked_tokens: prompt tokens of all requests that were admitted to be computed here. hit_tokens: those of them that were
    cached."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._cache = pool.cache
        self._page_size = page_size
        self._promised: dict[bytes, Request] = {}
        """Who computes the page of this digest, as long as it is not there."""
        self.asked_tokens = self.hit_tokens = 0

    def find(self, request: Request) -> Hit:
        """The pages of its prompt that need not be computed. To be leased before anything else happens to the pool."""
        request.hit = self._cache.match(request.keys, self._most_hits(request), request.hit)
        return request.hit

    def missing_tokens(self, request: Request) -> int:
        """How many tokens of its prompt were not cached when it was last looked at."""
        return len(request.prompt) - len(request.hit) * self._page_size

    def is_promised(self, request: Request) -> bool:
        """Whether the next page that it lacks is being computed for another one."""
        if request.awaits not in self._promised:
            request.awaits = self._last_promised(request)
        return request.awaits is not None

    def begin(self, request: Request) -> None:
        """It has leased its hit and the rest of its pages, and will be computed."""
        hit = len(request.hit)
        request.cached_tokens = hit * self._page_size
        request.published = hit
        self.asked_tokens += len(request.prompt)
        self.hit_tokens += request.cached_tokens
        if self._cache.enabled:
            for key in request.keys.pages[hit:]:
                self._promised.setdefault(key.digest, request)

    def computed(self, request: Request) -> None:
        """A step has written more of its KV: its whole pages can be hit. Without a lease they are nobody's to share."""
        assert request.progress is not None
        whole = request.progress.computed // self._page_size
        if request.lease is not None:
            request.lease.publish(request.keys, whole)
        self._keep_promises(request, whole)

    def ended(self, request: Request) -> None:
        """Nothing more of its prompt will be computed, but what a step is computing now. Idempotent."""
        self._keep_promises(request, len(request.prompt) // self._page_size)

    def _most_hits(self, request: Request) -> int:
        """Most pages of its prompt that need not be computed. Its last token always is: the answer follows from it. All are if
        something of each is asked for."""
        sampling = request.asked.sampling
        needs_all = sampling.prompt_logprobs is not None or sampling.pooling is not None
        return 0 if needs_all else (len(request.prompt) - 1) // self._page_size

    def _last_promised(self, request: Request) -> bytes | None:
        """The last of the pages that it lacks and that another one computes; None: nobody computes the first that it lacks."""
        last: bytes | None = None
        if self._promised:
            for key in request.keys.pages[len(self.find(request)) : self._most_hits(request)]:
                if key.digest not in self._promised:
                    break
                last = key.digest
        return last

    def _keep_promises(self, request: Request, upto_pages: int) -> None:
        if not self._promised:
            return
        for key in request.keys.pages[request.published : upto_pages]:
            if self._promised.get(key.digest) is request:
                del self._promised[key.digest]
        request.published = max(request.published, upto_pages)
