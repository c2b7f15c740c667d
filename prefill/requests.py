"""Admission: which prompts are computed next, and which give up their pages for another owner's.

Owns the order of admission. Knows the waiting line, the prompt memory and requests as records. Sends and ends nothing itself.

Whoever's turn it is gets pages, as long as its owner has less to compute than a forward takes. When there is no room for it,
nobody of its owner passes it. Others may, for a bounded time; and those of an owner that holds more give up their pages for it,
unless these are being pushed.

A request on a prefill instance: what it adds to the shared record. Decides nothing: `scheduler.py` does.

The links of a prefill instance to the decode instances that it writes to.

Owns what is known of each link, and what of it the router has not been told yet. Does not know requests or pushes; making the
links is the transport's work.

The memory of a prefill instance: who gets pages next, and which pages are never used again.

Owns the page pool. What of a prompt is in its prefix cache is in `common/instance/prompt_cache.py`. Knows requests. Does not know
rows, plans, pushes or messages.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec

from common.errors import NoRoom, Overloaded, Preempted, Unavailable
from common.executor import EngineDescription
from common.ids import Incarnation, InstanceId
from common.instance.ports import Connect, PeersChanged
from common.instance.prompt_cache import PromptCache
from common.instance.request import Phase, Request
from common.instance.requests import RequestTable, Rows
from common.instance.waiting_line import PATIENCE_S, who_gives_way
from common.messages import Ending, Failed, Finished, LinkInfo, LinkReport, LinkTraffic, Reserve, Terms
from common.pages.pool import Closing, PageLease, PagePool, count_pages


@dataclass(slots=True, eq=False)
class PrefillRequest(Request):
    """Its peer is the decode instance that is asked for a reservation, and then the one that its KV goes to.

    candidates: the decode instances that may still be asked, best first. full: those that had no room in this round. waits:
    whether its peer may let it wait for room. source_open: pushes may still read its pages.
    """

    candidates: tuple[InstanceId, ...] = ()
    full: tuple[InstanceId, ...] = ()
    waits: bool = False
    source_open: bool = False

    def reserve(self, writer: Incarnation, now: float) -> Reserve:
        """What asks its peer for a reservation. writer: this instance's life."""
        asked, rank, asked_s = self.asked, self.rank, self.times.asked_s
        return Reserve(
            key=self.key,
            incarnation=writer,
            prompt=asked.prompt,
            sampling=asked.sampling,
            sent_s=now,
            first=asked.first,
            terms=Terms(
                priority=rank.priority,
                age_s=max(0.0, now - rank.arrived_s),
                timeout_s=max(0.0, self.deadline_s - now),
                owner=self.owner,
            ),
            waits=self.waits,
            waited_s=0.0 if asked_s is None else now - asked_s,
            salt=asked.salt,
            cached_tokens=self.cached_tokens,
        )

    def ending_with(self, token: int, eos_token_ids: Sequence[int]) -> Ending | None:
        """How its answer ends if this is the token after its prompt; None when more follow."""
        sampling = self.asked.sampling
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            return Finished(reason="stop", matched=token)
        return Finished(reason="length") if sampling.max_new_tokens == 1 else None

    def handed_off(self, now: float) -> LinkTraffic:
        """Handoff was sent. Returns what that adds to the traffic of the link."""
        times = self.times
        assert times.last_chunk_s is not None and times.pages_had is not None
        times.handed_off_s, times.pages_pushed = now, self.pages - times.pages_had
        return LinkTraffic(handoffs=1, exposed_seconds=now - times.last_chunk_s)

    def choose(self, is_there: Callable[[InstanceId], bool]) -> InstanceId | None:
        """Whom to ask now; None when nobody is left. Each candidate that is there is asked in turn, and has no time to wait for
        room. Then the best of them is asked again, and the request waits there for a while: that ends the round. One that is
        alone is asked to let it wait at once."""
        able = [name for name in self.candidates if is_there(name)]
        untried = [name for name in able if name not in self.full]
        self.waits = not untried or len(able) == 1
        return next(iter(untried or able), None)

    def refused(self, by: InstanceId, failure: Failed) -> None:
        """A candidate grants nothing. If it let the request wait and got no room, the next round begins, with the others; this
        goes on until the request's deadline. One whose waiting line is full then is asked no more."""
        if self.waits and failure.kind == NoRoom.kind:
            self.full = (by,)
        elif not self.waits and failure.kind in (NoRoom.kind, Overloaded.kind):
            self.full += (by,)
        else:
            self.candidates = tuple(name for name in self.candidates if name != by)


_log = logging.getLogger(__name__)


class LinkBook:
    """lost: peers whose link is down. version: of the last report of changes."""

    def __init__(self, instance: InstanceId, incarnation: Incarnation) -> None:
        self._id, self._incarnation = instance, incarnation
        self._known: dict[InstanceId, LinkInfo] = {}
        self._untold: dict[InstanceId, None] = {}
        self.lost: set[InstanceId] = set()
        self.version = 0

    def meet(self, change: PeersChanged) -> Connect:
        """Other peers: links to new lives are to be made, links to those that left to be closed."""
        for gone in change.left:
            self._known.pop(gone, None)
            self._untold.pop(gone, None)
            self.lost.discard(gone)
        for peer in change.joined:
            self._note(LinkInfo(peer=peer.id, incarnation=peer.incarnation, state="connecting"))
        return Connect(change.joined, change.left)

    def changed(self, link: LinkInfo) -> None:
        """Note the new state, unless the peer has left or has come back as another life."""
        if link.state == "lost":
            self.lost.add(link.peer)
        else:
            self.lost.discard(link.peer)
        known = self._known.get(link.peer)
        if known is None or known.incarnation != link.incarnation:
            return
        self._note(link)
        if link.state != "connecting":
            speed = "" if link.bytes_per_s is None else f", {link.bytes_per_s / 1e9:.2f} GB/s"
            _log.info("link to %s %s: %s%s", link.peer, link.state, link.detail, speed)
        if link.warning:
            _log.warning("link to %s is %s", link.peer, link.warning)

    def news(self) -> LinkReport | None:
        """What has changed since the last report; None: nothing."""
        if not self._untold:
            return None
        links = tuple(self._known[peer] for peer in self._untold)
        self._untold.clear()
        self.version += 1
        return LinkReport(id=self._id, incarnation=self._incarnation, version=self.version, since=self.version - 1, links=links)

    def all_links(self, traffic_to: Callable[[InstanceId], LinkTraffic]) -> LinkReport:
        """Every link with its traffic. What has changed since the last report of changes comes in the next one too."""
        links = tuple(msgspec.structs.replace(link, traffic=traffic_to(peer)) for peer, link in self._known.items())
        return LinkReport(id=self._id, incarnation=self._incarnation, version=self.version, links=links)

    def _note(self, link: LinkInfo) -> None:
        self._known[link.peer] = link
        self._untold[link.peer] = None


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
