"""Who gets decode memory next: a request is admitted when its pages and a row are free together.

Owns the order of admission. Knows the waiting line, the page pool with its cache, and the rows. Does not know whether a request
is a reservation or is computed here.

The most urgent is first, and owners take turns (`common.instance.waiting_line`), but a request that fits may pass one that does
not. Once a request has waited PATIENCE_S, nobody passes it any more whose turn is later. With several owners, one that does not
fit takes room from an owner that holds more (`common.instance.waiting_line`); until that is free, nobody passes it either. A
reservation that does not wait is admitted at once or leaves the line. One that waits leaves it after `WAITS_S`, so that its
writer finds room that came elsewhere. Going round costs it nothing here: what counts is since when it asks for room, and while it
is away its place is kept (`Rounds`). Requests whose grammar is not ready, or the beginning of whose prompt is being computed for
another one, are passed by all.

Preemption: who gives up memory when a running request needs a page and none is free.

Owns the choice. Knows requests as records; ends nothing itself. Who gives way to another owner is in `waiting_line.py`.

The least urgent goes first, of these a request of the owner that holds the most pages, and of its requests the
youngest. A preempted request keeps its age wherever it is resumed, so the oldest one of all is never preempted for another,
always advances, and nobody starves.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from common.deadlines import DeadlineWheel, earliest
from common.ids import AttemptId
from common.instance.request import Phase
from common.instance.waiting_line import PATIENCE_S, Rank, WaitingLine, who_gives_way
from common.pages.pool import Closing, PageLease
from common.pages.radix_cache import Hit
from decode.requests import DecodeRequest, DecodeRequests


def choose_victims(
    holders: Iterable[DecodeRequest], lacking: Sequence[DecodeRequest], coming: Iterable[PageLease]
) -> list[DecodeRequest]:
    """The requests of `holders` to preempt so that every request in `lacking` that is not preempted gets a page.

    coming: leases that are closed soon anyway. Who brings nothing is spared: others hold all its pages.
    """
    closing = Closing()
    missing = len(lacking) - sum(map(closing.add, coming))
    victims: list[DecodeRequest] = []
    for request in _last_first(holders):
        if missing <= 0:
            break
        assert request.lease is not None
        victims.append(request)
        missing -= closing.add(request.lease) + (request in lacking)
    return [request for request in victims if request in lacking or (request.lease and closing.brings(request.lease))]


def _last_first(holders: Iterable[DecodeRequest]) -> Iterator[DecodeRequest]:
    """In the order in which they give up memory."""
    order = sorted(holders, key=lambda holder: holder.rank, reverse=True)
    pages: Counter[str] = Counter()
    for holder in order:
        pages[holder.owner] += holder.held_pages
    oldest = order[-1:]
    del order[-1:]
    while len(pages) > 1 and order:
        last = max(order, key=lambda holder: (holder.rank.priority, pages[holder.owner]))  # the youngest of several
        order.remove(last)
        pages[last.owner] -= last.held_pages
        yield last
    yield from order
    yield from oldest


WAITS_S = 1.0
"""A reservation waits here this long before its writer asks the other candidates again."""
RETURNS_S = 0.5
"""It has asked them all by then: one turn of each."""
LOOKED_AT = 32
"""So many of those that do not fit are looked at per step, as many of each owner: the line may be long."""


@dataclass(frozen=True, slots=True)
class _Kept:
    key: AttemptId
    owner: str
    rank: Rank
    until_s: float


class Rounds:
    """Which reservations have waited long enough, and the place of one that is away to ask elsewhere.

    A request that nobody may pass any more would lose the pages that have come free for it while it is away. So nobody behind it
    is admitted until it is back, or RETURNS_S have passed.
    """

    def __init__(self) -> None:
        self._waiting: DeadlineWheel[AttemptId] = DeadlineWheel()
        self._kept: _Kept | None = None

    def asked(self, key: AttemptId, now: float) -> None:
        """A reservation has joined the line, for the first time or again."""
        self._waiting.set(key, now + WAITS_S)
        if self._kept is not None and self._kept.key == key:
            self._kept = None

    def admitted(self, key: AttemptId) -> None:
        self._waiting.clear(key)

    def over(self, waiting: WaitingLine[DecodeRequest], now: float) -> list[AttemptId]:
        """The reservations to decline now, if they still wait. The place of the one that nobody may pass is kept."""
        if self._kept is not None and now >= self._kept.until_s:
            self._kept = None
        keys = self._waiting.expired(now)
        first = waiting.first(lambda request: has_waited_long(request, now)) if keys else None
        if first is not None and first.key in keys and not self.is_away_before(first, waiting):
            self._kept = _Kept(first.key, first.owner, first.rank, now + RETURNS_S)
        return keys

    def is_away_before(self, request: DecodeRequest, waiting: WaitingLine[DecodeRequest]) -> bool:
        """Whether the place of one that is served before this one is kept."""
        return self._kept is not None and waiting.is_before(self._kept.owner, self._kept.rank, request)

    def next_deadline(self) -> float | None:
        return earliest(self._waiting.next_deadline(), None if self._kept is None else self._kept.until_s)


def has_waited_long(request: DecodeRequest, now: float) -> bool:
    """Whether nobody behind it may be admitted before it."""
    return request.waits and now - request.waits_since_s >= PATIENCE_S


@dataclass(slots=True)
class Admission:
    """admitted: each has left the line, and holds its pages and a row. preempted: those that must end for one of another owner,
    which waits for their room."""

    admitted: list[DecodeRequest] = field(default_factory=list)
    preempted: Sequence[DecodeRequest] = ()


def admit(requests: DecodeRequests, rounds: Rounds, now: float) -> Admission:
    """The requests whose turn it is and that fit. The pages that others hold already take no room."""
    waiting, shares, pool, rows = requests.table.waiting, requests.table.shares, requests.pool, requests.rows
    admission = Admission()
    is_shared = len(shares.rows.keys() | waiting.owners) > 1
    if not len(waiting) or (rows.free_count == 0 and not is_shared):
        return admission
    forecast = requests.growth.forecast(pool.available_pages)
    looks, of_one, looked = LOOKED_AT, max(1, LOOKED_AT // len(waiting.owners)), Counter[str]()
    turns = waiting.turns()
    for request in turns:
        is_full = rows.free_count == 0 or pool.available_pages <= forecast.running
        if looks == 0 or (is_full and not is_shared) or rounds.is_away_before(request, waiting):
            break
        if request.waits_for_grammar or (request.peer is None and requests.prompts.is_promised(request)):
            continue
        hit = requests.look_up(request)
        own, unheld = request.pages - len(hit), hit.unheld
        fits = not is_full and own + unheld + forecast.running <= pool.available_pages
        limit = request.asked.sampling.max_new_tokens
        if fits and forecast.admits(own, len(request.prompt), limit, len(hit), unheld):
            waiting.leave(request.key)
            request.lease, request.row = pool.lease(request.pages, hit), rows.take()
            assert request.lease is not None
            shares.hold(request, 1, own + unheld)
            shares.given(request.owner, len(request.prompt) + limit)
            if request.peer is None:
                requests.prompts.begin(request)
            admission.admitted.append(request)
            continue
        looks -= 1
        looked[request.owner] += 1
        if is_shared and request.waits and (victims := _victims(request, hit, requests, now)) is not None:
            admission.preempted = victims
            break
        if has_waited_long(request, now):
            break
        if is_full or looked[request.owner] == of_one:
            turns.drop()
    return admission


def _victims(request: DecodeRequest, hit: Hit, requests: DecodeRequests, now: float) -> list[DecodeRequest] | None:
    """Who is preempted for this request of another owner; none if it fits when those have gone that are going already. None: it
    waits for its turn."""
    pool, growth, held_rows = requests.pool, requests.growth, requests.by_row.values()
    own, limit = request.pages - len(hit), request.asked.sampling.max_new_tokens
    taken = own + hit.unheld
    if not requests.table.shares.may_take(request.owner, 1, taken):
        return None
    going = [each for each in requests.holders() if requests.comes_home(each, now)]
    free_rows = requests.rows.free_count + sum(each.phase is Phase.ENDED for each in held_rows)

    def fits(victims: list[DecodeRequest]) -> bool:
        closing = Closing()
        available = pool.available_pages + sum(closing.add(each.lease) for each in (*going, *victims) if each.lease is not None)
        forecast = growth.forecast(available, [each.row for each in victims if each.row is not None])
        has_room = free_rows + len(victims) > 0 and taken + forecast.running <= available
        return has_room and forecast.admits(own, len(request.prompt), limit, len(hit), hit.unheld)

    def order() -> list[DecodeRequest]:
        """Reservations come later: their room is free only when their writers have let go. An owner's oldest comes last, so that
        it advances whoever comes."""
        running = sorted((r for r in held_rows if r.phase is not Phase.ENDED), key=lambda each: each.rank, reverse=True)
        oldest = {each.owner: each for each in running}
        least = [each for each in running if each.rank.priority >= request.rank.priority]
        return sorted(least, key=lambda each: (each is oldest[each.owner], each.phase is Phase.RESERVED))

    return who_gives_way(request, 1, taken, requests.table.shares, order, fits)
