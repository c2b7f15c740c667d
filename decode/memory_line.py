"""Who gets decode memory next: a request is admitted when its pages and a row are free together.

Owns the order of admission. Knows the waiting line, the page pool with its cache, and the rows. Does not know whether a request
is a reservation or is computed here.

The most urgent is first (`common.instance.waiting_line`), but a request that fits may pass one that does not. Once a request has
waited PATIENCE_S, nobody passes it any more who is not more urgent. A reservation that does not wait is admitted at
once or leaves the line. One that waits leaves it after `WAITS_S`, so that its writer finds room that came elsewhere. Going round
costs it nothing here: what counts is since when it asks for room, and while it is away its place is kept (`Rounds`). Requests
whose grammar is not ready, or the beginning of whose prompt is being computed for another one, are passed by all.
"""

from dataclasses import dataclass

from common.deadlines import DeadlineWheel, earliest
from common.ids import Key
from common.instance.waiting_line import Rank, WaitingLine
from decode.requests import DecodeRequest, DecodeRequests

PATIENCE_S = 2.0
WAITS_S = 1.0
"""A reservation waits here this long before its writer asks the other candidates again."""
RETURNS_S = 0.5
"""It has asked them all by then: one turn of each."""
LOOKED_AT = 32
"""So many of those that do not fit are looked at per step: the line may be long."""


@dataclass(frozen=True, slots=True)
class _Kept:
    key: Key
    rank: Rank
    until_s: float


class Rounds:
    """Which reservations have waited long enough, and the place of one that is away to ask elsewhere.

    A request that nobody may pass any more would lose the pages that have come free for it while it is away. So nobody behind it
    is admitted until it is back, or RETURNS_S have passed.
    """

    def __init__(self) -> None:
        self._waiting: DeadlineWheel[Key] = DeadlineWheel()
        self._kept: _Kept | None = None

    def asked(self, key: Key, now: float) -> None:
        """A reservation has joined the line, for the first time or again."""
        self._waiting.set(key, now + WAITS_S)
        if self._kept is not None and self._kept.key == key:
            self._kept = None

    def admitted(self, key: Key) -> None:
        self._waiting.clear(key)

    def over(self, waiting: WaitingLine[DecodeRequest], now: float) -> list[Key]:
        """The reservations to decline now, if they still wait. The place of the one that nobody may pass is kept."""
        if self._kept is not None and now >= self._kept.until_s:
            self._kept = None
        keys = self._waiting.expired(now)
        first = next((request for request in waiting if has_waited_long(request, now)), None) if keys else None
        if first is not None and first.key in keys and not self.is_away_before(first):
            self._kept = _Kept(first.key, first.rank, now + RETURNS_S)
        return keys

    def is_away_before(self, request: DecodeRequest) -> bool:
        """Whether the place of a more urgent request is kept."""
        return self._kept is not None and self._kept.rank < request.rank

    def next_deadline(self) -> float | None:
        return earliest(self._waiting.next_deadline(), None if self._kept is None else self._kept.until_s)


def has_waited_long(request: DecodeRequest, now: float) -> bool:
    """Whether nobody behind it may be admitted before it."""
    return request.waits and now - request.waits_since_s >= PATIENCE_S


def admit(requests: DecodeRequests, rounds: Rounds, now: float) -> list[DecodeRequest]:
    """The requests whose turn it is and that fit: each has left the line, and holds its pages and a row. The pages that others
    hold already take no room."""
    waiting, pool, rows = requests.table.waiting, requests.pool, requests.rows
    admitted: list[DecodeRequest] = []
    if not len(waiting) or rows.free_count == 0:
        return admitted
    forecast = requests.growth.forecast(pool.available_pages)
    looks = LOOKED_AT
    for request in waiting:
        if rows.free_count == 0 or pool.available_pages <= forecast.running or looks == 0 or rounds.is_away_before(request):
            break
        if request.waits_for_grammar or (request.peer is None and requests.prompts.is_promised(request)):
            continue
        hit = requests.look_up(request)
        own, unheld = request.pages - len(hit), hit.unheld
        fits = own + unheld + forecast.running <= pool.available_pages
        limit = request.asked.sampling.max_new_tokens
        if fits and forecast.admits(own, len(request.prompt), limit, len(hit), unheld):
            waiting.leave(request.key)
            request.lease, request.row = pool.lease(request.pages, hit), rows.take()
            assert request.lease is not None
            if request.peer is None:
                requests.prompts.begin(request)
            admitted.append(request)
            continue
        looks -= 1
        if has_waited_long(request, now):
            break
    return admitted
