"""Admission: which prompts are computed next, and which give up their pages for another owner's.

Owns the order of admission. Knows the waiting line, the prompt memory and requests as records. Sends and ends nothing itself.

Whoever's turn it is gets pages, as long as its owner has less to compute than a forward takes. When there is no room for it,
nobody of its owner passes it. Others may, for a bounded time; and those of an owner that holds more give up their pages for it,
unless these are being pushed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

from common.errors import Preempted, Unavailable
from common.instance.requests import RequestTable
from common.instance.rows import Rows
from common.instance.shares import PATIENCE_S
from common.messages import Failed
from prefill.memory import PromptMemory
from prefill.request import PrefillRequest


class PromptAdmission:
    """chunk_tokens: most tokens of a forward. is_stuck: whether the pages of a request that has ended stay away."""

    def __init__(
        self,
        requests: RequestTable[PrefillRequest],
        memory: PromptMemory,
        rows: Rows,
        chunk_tokens: int,
        is_stuck: Callable[[PrefillRequest], bool],
    ) -> None:
        self._requests = requests
        self._memory = memory
        self._rows = rows
        self._chunk_tokens = chunk_tokens
        self._is_stuck = is_stuck
        self.preempted = 0

    def turns(self, name: str, computing: Iterable[PrefillRequest], now: float) -> Iterator[tuple[PrefillRequest, Failed | None]]:
        """Requests to begin, each with its pages, and requests to end, each with its reason. Act on each before the next is asked
        for. name: of the instance. computing: requests in rows."""
        requests, memory = self._requests, self._memory
        to_do: Counter[str] = Counter()
        for each in computing:
            if each.progress is not None:
                to_do[each.owner] += each.progress.left
        full: set[str] = set()
        """Owners whose next request has no room."""
        while self._rows.free_count > 0 and (request := self._next(to_do, full)) is not None:
            if not memory.can_hold(request):
                yield request, Failed.of(Unavailable(f"{name} lacks memory for the request"))
            elif memory.lease(request, requests):
                requests.waiting.leave(request.key)
                yield request, None
                to_do[request.owner] += len(request.prompt) - request.cached_tokens
            elif (victims := memory.who_gives_way(request, requests, self._is_stuck)) is not None:
                self.preempted += len(victims)
                for victim in victims:
                    yield victim, Failed.of(Preempted(f"{name} needs the memory for a request of another key"))
                if not victims:
                    return
            elif now - request.times.accepted_s >= PATIENCE_S:
                return
            else:
                full.add(request.owner)

    def _next(self, to_do: Mapping[str, int], full: Set[str]) -> PrefillRequest | None:
        turns = self._requests.waiting.turns()
        for request in turns:
            if request.owner in full or to_do.get(request.owner, 0) >= self._chunk_tokens:
                turns.drop()
            elif self._memory.is_ready(request):
                return request
        return None
