"""The requests of a prefill instance, its links, and the room that it has for prompts.

Owns the record of a request, what is known of each link and what of it the routers do not know yet, and the rules of admission
that only this role has. Sends and ends nothing itself. Does not know plans or pushes; making the links is the transport's work.
"""

import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from msgspec.structs import replace

from common.errors import NoRoom, Overloaded, Unavailable
from common.ids import Incarnation, InstanceId, Life
from common.instance.admission import Verdict, find_givers
from common.instance.ports import PeersChanged
from common.instance.request import Request, RequestPhase
from common.instance.requests import RequestTable
from common.messages import Failed, Finished, LinkInfo, LinkReport, LinkTraffic, Reserve, Terms, TokenDelta, TokenLogprobs
from common.messages.transfers import Connect
from common.pages.pool import PageLease, count_pages

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PrefillRequest(Request):
    """Its peer is the decode instance that is asked for a reservation, and then the one that its KV goes to."""

    candidates: tuple[InstanceId, ...] = ()
    """The decode instances that may still be asked, best first."""
    full: tuple[InstanceId, ...] = ()
    """Those that had no room in this round."""
    may_wait: bool = False
    """Whether its peer may let it wait for room."""

    def reserve(self, writer: Incarnation, now: float) -> Reserve:
        """What asks its peer for a reservation. writer: this instance's life."""
        asked, rank, asked_s = self.asked, self.rank, self.times.asked_s
        age_s, timeout_s = max(0.0, now - rank.arrived_s), max(0.0, self.deadline_s - now)
        return Reserve(
            key=self.key,
            incarnation=writer,
            prompt=asked.prompt,
            sampling=asked.sampling,
            sent_s=now,
            first=asked.first,
            terms=Terms(priority=rank.priority, age_s=age_s, timeout_s=timeout_s, owner=self.owner),
            waits=self.may_wait,
            waited_s=0.0 if asked_s is None else now - asked_s,
            salt=asked.salt,
            cached_tokens=self.cached_tokens,
            variant=self.keys.variant,
        )

    def answered(self, token: int, logprobs: TokenLogprobs, eos_token_ids: Sequence[int]) -> TokenDelta:
        """Its prompt is computed, and this is the token after it; the answer has ended unless more follow. logprobs: that of the
        token, if asked for."""
        sampling = self.asked.sampling
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            self.ending = Finished(reason="stop", matched=token)
        elif sampling.max_new_tokens == 1:
            self.ending = Finished(reason="length")
        delta = self.with_logprobs(TokenDelta(self.key, self.next_token, (token,), self.ending), logprobs)
        self.add_token(token)
        return delta

    def hand_off(self, now: float) -> LinkTraffic:
        """Handoff was sent. Returns what that adds to the traffic of the link."""
        times = self.times
        assert times.last_chunk_s is not None and times.pages_had is not None
        times.handed_off_s, times.pages_pushed = now, self.pages - times.pages_had
        return LinkTraffic(handoffs=1, exposed_seconds=now - times.last_chunk_s)

    def choose(self, peers: Mapping[InstanceId, Incarnation], lost: Container[InstanceId]) -> bool:
        """Whom to ask now becomes its peer; False when nobody is left. Each candidate that is there is asked in turn, and has no
        time to wait for room. Then the best of them is asked again, and the request waits there for a while: that ends the
        round. One that is alone is asked to let it wait at once. lost: who cannot be reached."""
        able = [name for name in self.candidates if name in peers and name not in lost]
        if not able:
            return False
        untried = [name for name in able if name not in self.full]
        self.may_wait = not untried or len(able) == 1
        name = (untried or able)[0]
        self.peer = Life(name, peers[name])
        return True

    def exclude(self, by: InstanceId, failure: Failed) -> None:
        """A candidate grants nothing. If it let the request wait and got no room, the next round begins, with the others; this
        goes on until the request's deadline. One whose waiting line is full then is asked no more."""
        if self.may_wait and failure.kind == NoRoom.kind:
            self.full = (by,)
        elif not self.may_wait and failure.kind in (NoRoom.kind, Overloaded.kind):
            self.full += (by,)
        else:
            self.candidates = tuple(name for name in self.candidates if name != by)


class LinkBook:
    """The links to the decode instances that this instance writes to."""

    def __init__(self, instance: InstanceId, incarnation: Incarnation) -> None:
        self._id, self._incarnation = instance, incarnation
        self._known: dict[InstanceId, LinkInfo] = {}
        self._unreported: dict[InstanceId, None] = {}
        self.lost: set[InstanceId] = set()
        """Peers whose link is down."""
        self.version = 0
        """The number of the last report of changes."""

    def meet(self, change: PeersChanged) -> Connect:
        """Other peers: links to new lives are to be made, links to those that left to be closed."""
        for gone in change.left:
            self._known.pop(gone, None)
            self._unreported.pop(gone, None)
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

    def changes(self) -> LinkReport | None:
        """What has changed since the last report; None: nothing."""
        if not self._unreported:
            return None
        links = tuple(self._known[peer] for peer in self._unreported)
        self._unreported.clear()
        self.version += 1
        return LinkReport(id=self._id, incarnation=self._incarnation, version=self.version, since=self.version - 1, links=links)

    def all_links(self, traffic_to: Callable[[InstanceId], LinkTraffic]) -> LinkReport:
        """Every link with its traffic. What has changed since the last report of changes comes in the next one too."""
        links = tuple(replace(link, traffic=traffic_to(peer)) for peer, link in self._known.items())
        return LinkReport(id=self._id, incarnation=self._incarnation, version=self.version, links=links)

    def _note(self, link: LinkInfo) -> None:
        self._known[link.peer] = link
        self._unreported[link.peer] = None


class PromptRoom:
    """Implements `common.instance.admission.Room`. A request gets pages for its whole prompt as long as its owner has less to
    compute than a forward takes. When there is no room for it, nobody of its owner passes it. Other owners' requests give up
    their pages for it, unless a decode instance has granted them a reservation."""

    def __init__(self, instance: InstanceId, requests: RequestTable[PrefillRequest], links: LinkBook, chunk_tokens: int) -> None:
        """chunk_tokens: most tokens of a forward."""
        self._instance = instance
        self._requests = requests
        self._links = links
        self._chunk_tokens = chunk_tokens
        self.quarantined: list[PageLease] = []
        """Pages that a push may still read, which is not proven to have stopped: nobody ever writes them again."""
        self._most_pages = 0
        """Those that a request can get when all others have ended."""
        self._to_compute: Counter[str] = Counter()
        """Tokens that each owner has in rows and that are not launched yet."""

    def begin(self) -> Self:
        """A pass over the line begins."""
        self._most_pages = self._requests.pool.total_pages - count_pages(self.quarantined)
        self._to_compute.clear()
        for progress in self._requests.computing.values():
            self._to_compute[progress.owner] += progress.left
        return self

    def offer(self, request: PrefillRequest, now: float) -> Verdict | Failed:
        requests, pool = self._requests, self._requests.pool
        if not requests.free_rows:
            return Verdict.CLOSED
        if self._to_compute[request.owner] >= self._chunk_tokens:
            return Verdict.OWNER_BUSY
        if request.prepares or requests.prompts.is_promised(request):
            return Verdict.NOT_READY
        if request.pages > self._most_pages:
            return Failed.of(Unavailable(f"{self._instance} lacks memory for the request"))
        requests.prompts.find(request)
        if request.pages - request.hit.held > pool.available_pages:
            return Verdict.FULL
        if request.candidates and not request.choose(requests.peers, self._links.lost):
            return self.nobody_left(request)
        missing_tokens = requests.prompts.missing_tokens(request)
        requests.admit(request, 0, missing_tokens, now)
        self._to_compute[request.owner] += missing_tokens
        return Verdict.ADMITTED

    def who_gives_way(self, request: PrefillRequest, now: float) -> list[PrefillRequest] | None:
        requests, takes = self._requests, request.pages - request.hit.held
        ended = [each for each in requests.holders.values() if each.phase is RequestPhase.ENDED and not self.is_stuck(each)]

        def holders() -> list[PrefillRequest]:
            running = (r for r in requests.holders.values() if r.phase is not RequestPhase.ENDED and r.decode is None)
            least = (each for each in running if each.rank.priority >= request.rank.priority)
            return sorted(least, key=lambda each: each.rank, reverse=True)

        def fits(victims: list[PrefillRequest]) -> bool:
            return takes <= requests.pages_after([*ended, *victims])

        return find_givers(requests, request, 0, holders, fits)

    def nobody_left(self, request: PrefillRequest) -> Failed:
        return Failed.of(Unavailable(f"{self._instance} reaches none of the decode instances {', '.join(request.candidates)}"))

    def is_stuck(self, request: PrefillRequest) -> bool:
        """Whether its pages wait for the end of pushes over a link that is gone."""
        if request.peer is None or request.phase is not RequestPhase.ENDED or not request.in_transfer:
            return False
        return request.peer.id in self._links.lost or not self._requests.knows(request.peer)

    def quarantined_pages(self) -> int:
        """How many pages nobody can get, for ever or until pushes over links that are gone have ended."""
        stuck = [each.lease for each in self._requests.holders.values() if each.lease is not None and self.is_stuck(each)]
        return count_pages([*self.quarantined, *stuck])
