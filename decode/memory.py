"""The memory of a decode instance: what room there is for a request that waits, and who gives up pages when none is free.

Owns the rules of this role. Those that both roles share are in `common/instance/admission.py`. Does not know plans or messages.

A reservation that does not wait is admitted at once or leaves the line. One that waits leaves it after `WAITS_S`, so that its
writer finds room that came elsewhere. Going round costs it nothing here: what counts is since when it asks for room, and while it
is away its place is kept (`Rounds`). Requests whose grammar is not ready, or the beginning of whose prompt is being computed for
another one, are passed by all.

When a running request needs a page and none is free, the least urgent one is preempted, of these a request of the owner that
holds the most pages, and of its requests the youngest. A preempted request keeps its age wherever it is resumed, so the oldest
one of all is never preempted for another, always advances, and nobody starves.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Self

from common.deadlines import DeadlineWheel, earliest
from common.ids import AttemptId
from common.instance.admission import Verdict, find_givers, give_up_order
from common.instance.request import RequestPhase
from common.instance.requests import RequestTable
from common.instance.waiting_line import WaitingLine
from common.pages.pool import Closing, PageLease
from decode.requests import DecodeRequest, Forecast, Growth
from kv_transfer.handoff_reader import HandoffReader


def choose_victims(
    holders: Iterable[DecodeRequest], lacking: Sequence[DecodeRequest], coming: Iterable[PageLease]
) -> list[DecodeRequest]:
    """The requests of `holders` to preempt so that every request in `lacking` that is not preempted gets a page.

    coming: leases that are closed soon anyway. A request whose pages are all shared is skipped: ending it frees nothing.
    """
    closing = Closing()
    missing = len(lacking) - sum(map(closing.add, coming))
    order = sorted(holders, key=lambda holder: holder.rank, reverse=True)
    held: Counter[str] = Counter()
    for holder in order:
        held[holder.owner] += holder.held_pages
    givers = give_up_order(order[:-1], lambda owner, _rows, pages: held[owner] + pages, urgent_last=True)
    victims: list[DecodeRequest] = []
    for request in (*(giver for giver, _ in givers), *order[-1:]):
        if missing <= 0:
            break
        assert request.lease is not None
        victims.append(request)
        missing -= closing.add(request.lease) + (request in lacking)
    return [request for request in victims if request in lacking or (request.lease and closing.brings(request.lease))]


WAITS_S = 1.0
"""A reservation waits here this long before its writer asks the other candidates again."""
RETURNS_S = 0.5
"""It has asked them all by then: one turn of each."""


class Rounds:
    """Which reservations have waited long enough, and the place of one that is away to ask elsewhere.

    A request that nobody may pass any more would lose the pages that have come free for it while it is away. So nobody behind it
    is admitted until it is back, or RETURNS_S have passed.
    """

    def __init__(self) -> None:
        self.ends: DeadlineWheel[AttemptId] = DeadlineWheel()
        """When each reservation that waits has waited long enough, unless it is admitted before."""
        self._kept: DecodeRequest | None = None
        """Who is away, and whose place is kept."""
        self._kept_until_s = 0.0

    def joined(self, key: AttemptId, now: float) -> None:
        """A reservation has joined the line, for the first time or again."""
        self.ends.set(key, now + WAITS_S)
        if self._kept is not None and self._kept.key == key:
            self._kept = None

    def over(self, waiting: WaitingLine[DecodeRequest], now: float) -> list[AttemptId]:
        """The reservations to decline now, if they still wait. The place of the one that nobody may pass is kept."""
        if now >= self._kept_until_s:
            self._kept = None
        keys = self.ends.expired(now)
        first = waiting.first(lambda request: request.has_waited_long(now)) if keys else None
        if first is not None and first.key in keys and not self.is_away_before(first, waiting):
            self._kept, self._kept_until_s = first, now + RETURNS_S
        return keys

    def is_away_before(self, request: DecodeRequest, waiting: WaitingLine[DecodeRequest]) -> bool:
        """Whether the place of one that is served before this one is kept."""
        return self._kept is not None and waiting.is_before(self._kept, request)

    def next_deadline(self) -> float | None:
        return earliest(self.ends.next_deadline(), None if self._kept is None else self._kept_until_s)


class DecodeRoom:
    """Implements `common.instance.admission.Room`. A reservation may come into room that is free when all running requests have
    grown as forecast; pages that others hold already take no room."""

    def __init__(self, requests: RequestTable[DecodeRequest], growth: Growth, target: HandoffReader, rounds: Rounds) -> None:
        self._requests = requests
        self._growth = growth
        self._target = target
        self._rounds = rounds
        self._is_shared = False
        """Several owners have requests here."""
        self._forecast: Forecast | None = None
        """Made when the first request asks, since it takes a few array operations."""

    def begin(self) -> Self:
        """A pass over the line begins."""
        self._is_shared = len(self._requests.shares.rows.keys() | self._requests.waiting.owners) > 1
        self._forecast = None
        return self

    def offer(self, request: DecodeRequest, now: float) -> Verdict:
        requests, pool, has_row = self._requests, self._requests.pool, bool(self._requests.free_rows)
        if not has_row and not self._is_shared:
            return Verdict.CLOSED
        if self._forecast is None:
            self._forecast = self._growth.forecast(pool.available_pages)
        forecast = self._forecast
        is_full = not has_row or pool.available_pages <= forecast.running
        if (is_full and not self._is_shared) or self._rounds.is_away_before(request, requests.waiting):
            return Verdict.CLOSED
        if request.waits_for_grammar or (request.peer is None and requests.prompts.is_promised(request)):
            return Verdict.NOT_READY
        requests.prompts.find(request)
        if is_full:
            return Verdict.FULL
        if not self._fits(request, forecast, pool.available_pages):
            return Verdict.NO_ROOM
        requests.admit(request, 1, len(request.prompt) + request.asked.sampling.max_new_tokens, now)
        return Verdict.ADMITTED

    def who_gives_way(self, request: DecodeRequest, now: float) -> list[DecodeRequest] | None:
        if not (self._is_shared and request.stays):
            return None
        requests, in_rows = self._requests, self._requests.in_row.values()
        going = [each for each in requests.holders.values() if comes_home(each, self._target, now)]
        free_rows = len(requests.free_rows) + sum(each.phase is RequestPhase.ENDED for each in in_rows)

        def fits(victims: list[DecodeRequest]) -> bool:
            available = requests.pages_after([*going, *victims])
            forecast = self._growth.forecast(available, [each.row for each in victims if each.row is not None])
            return free_rows + len(victims) > 0 and self._fits(request, forecast, available)

        def holders() -> list[DecodeRequest]:
            """Reservations come later: their room is free only when their writers have let go. An owner's oldest comes last, so
            that it advances whoever comes."""
            running = sorted((r for r in in_rows if r.phase is not RequestPhase.ENDED), key=lambda each: each.rank, reverse=True)
            oldest = {each.owner: each for each in running}
            least = [each for each in running if each.rank.priority >= request.rank.priority]
            return sorted(least, key=lambda each: (each is oldest[each.owner], each.phase is RequestPhase.RESERVED))

        return find_givers(requests, request, 1, holders, fits)

    def _fits(self, request: DecodeRequest, forecast: Forecast, available: int) -> bool:
        hit, limit = request.hit, request.asked.sampling.max_new_tokens
        own, unheld = request.pages - len(hit), len(hit) - hit.held
        has_room = own + unheld + forecast.running <= available
        return has_room and forecast.admits(own, len(request.prompt), limit, len(hit), unheld)


def comes_home(request: DecodeRequest, target: HandoffReader, now: float) -> bool:
    """Whether it has ended, and what it holds is free soon."""
    return request.phase is RequestPhase.ENDED and not target.is_stuck(request.key, now)
