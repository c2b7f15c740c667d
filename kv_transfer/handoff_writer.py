"""The sending end of the handoff: which pages of a request are written into its reservation, and when it is over.

Owns the record of each outgoing handoff and of a pair's session, the tickets of its pushes, the write lease for each decode
instance it writes to, and the totals of what went over the links. Knows messages and page ids; the time is an argument. Does not
know what tokens mean, models, sockets or libraries.

    open ──Reserve──►  RESERVING ──Grant──► PUSHING ──all pages written, first token known──► Handoff ─► closed
                        │  │  ▲                │
                        │  │  └── move ─────┐  │
                        │  └─► REFUSED ─────┘  │   Decline, over, its peer cannot be reached: the caller moves it to another
                     give_up               give_up, push failed, Decline, over
                        ▼                      ▼
                        Withdraw ◄── drained (no push in flight) ── DRAINING ─► closed
                                                                       └─ not proven drained ─► STUCK, claimed for ever

Before the grant nothing is written anywhere, so a handoff may move to another peer; what is computed stays and is pushed there.
After the grant it stays where it is. The former peer may hold a reservation all the same, because its Grant is late or lost: a
late one is answered with Withdraw, and renewals say that the handoff has moved until the peer has answered one of them.

Single messages are not acknowledged. While a handoff with an instance is open, and a little longer, Renew says every second which
handoffs are open. That extends the write lease (`kv_transfer/handoff_reader.py`), and shows either side what a lost message left
behind.

A method returns actions, to be carried out in order. Events, which the caller takes with `take_events` after each call, report
the state of a handoff, and which source pages no push reads any more: only then may their page lease end.
"""

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from common.deadlines import DeadlineWheel
from common.errors import InstanceFailed, Unavailable, WeightsChanged
from common.ids import ID_BYTES, AttemptId, Generation, Incarnation, InstanceId, Int32Array, Life, Ticket, Variant, unpack_ids
from common.instance.ports import Action, Send
from common.messages import Claim, Decline, Failed, Grant, Handoff, LinkTraffic, Renew, Renewed, Reserve, TokenLogprob, Withdraw
from common.messages.base import fits
from common.messages.transfers import Allow, Push, PushDone, PushFailed
from common.pages.layout import KVLayout
from kv_transfer.handoff_reader import MARGIN_S, RENEW_S, RENEWALS_AFTER, WRITE_LEASE_S, DigestPages

MOST_RENEWALS = int((WRITE_LEASE_S + MARGIN_S) / RENEW_S)
"""A reader that hears none of so many has given up what it holds."""

HandoffStage = Literal["reserving", "refused", "pushing", "draining", "stuck"]


@dataclass(frozen=True, slots=True)
class HandoffClosed:
    """The handoff is over on this side."""

    key: AttemptId
    failure: Failed | None
    """What the client gets; None when the decode instance has the request, or when the request was given up on purpose."""
    quiescent: bool
    """No push can still read the source pages. When False they must be quarantined."""


@dataclass(frozen=True, slots=True)
class HandoffGranted:
    """Its peer has granted a reservation: the handoff stays there."""

    key: AttemptId
    have_pages: int = 0
    """How many pages of the reservation need not be pushed."""


@dataclass(frozen=True, slots=True)
class HandoffPosted:
    """Its first push was posted."""

    key: AttemptId


@dataclass(frozen=True, slots=True)
class HandoffRefused:
    """Its peer grants no reservation. The caller moves the handoff to another peer, or gives it up."""

    key: AttemptId
    failure: Failed


@dataclass(frozen=True, slots=True)
class SourcePagesRead:
    """Nothing reads the next `pages` of the source pages any more, counted from the first: they are written, and the prompt is
    computed."""

    key: AttemptId
    pages: int


HandoffEvent: TypeAlias = HandoffGranted | HandoffPosted | SourcePagesRead | HandoffRefused | HandoffClosed


@dataclass(slots=True, eq=False)
class Outgoing:
    """Pages [0, posted) are written or in flight; [posted, complete) wait for a grant or are posted next.

    0 ····· read ····· posted ····· complete ····· len(source_pages)

    While the last chunk is computed, the pages from `complete` on hold their first layers_complete layers, and of the pages from
    `posted` on the first layers_posted layers are written or in flight.
    """

    key: AttemptId
    peer: Life
    source_pages: Int32Array
    reserved_s: float
    variant: Variant = Variant()
    """What computes the pages."""
    stage: HandoffStage = "reserving"
    target_pages: Int32Array | None = None
    generation: Generation = Generation(0)
    posted: int = 0
    complete: int = 0
    layers_complete: int = 0
    layers_posted: int = 0
    in_flight: dict[Ticket, int] = field(default_factory=dict)
    """The first page of each push."""
    read: int = 0
    """How many pages SourcePagesRead has reported."""
    first_token: int | None = None
    first_logprob: TokenLogprob | None = None
    failure: Failed | None = None
    quiescent: bool = True
    have_pages: int = 0
    pushed_bytes: int = 0
    has_posted: bool = False


@dataclass(slots=True, eq=False)
class Moved:
    """A handoff that has left a decode instance before its grant."""

    renewals: int = 0
    """How many renewals have named it."""
    since_s: float = float("inf")
    """When the first of them was sent."""
    is_answered: bool = False
    """One of them was answered."""

    def name_at(self, now: float) -> None:
        """A renewal names it."""
        self.renewals += 1
        self.since_s = min(self.since_s, now)

    @property
    def is_over(self) -> bool:
        """Renewals need not name it any more. A Reserve may arrive later than the answer does. A reader that answers nothing for
        long takes its pages back by itself."""
        return self.renewals >= (RENEWALS_AFTER if self.is_answered else MOST_RENEWALS)


@dataclass(slots=True, eq=False)
class Session:
    """The handoffs with one decode instance."""

    open: dict[AttemptId, Outgoing] = field(default_factory=dict)
    moved: dict[AttemptId, Moved] = field(default_factory=dict)
    """Handoffs that have left the instance, as long as renewals name them."""
    until_s: float = float("-inf")
    """When the write lease there ends."""
    renewals_left: int = RENEWALS_AFTER
    is_dead: bool = False
    """The instance has a new incarnation, so nothing more is sent to this one."""


class PeerTraffic:
    """What went over the links of an instance: one total for each peer, and one over all. Does not know requests or links."""

    def __init__(self) -> None:
        self.total = LinkTraffic()
        """Everything since the instance began, including peers that have left."""
        self._by_peer: defaultdict[InstanceId, LinkTraffic] = defaultdict(LinkTraffic)

    def to(self, peer: InstanceId) -> LinkTraffic:
        """The total of this peer since it was first met."""
        return self._by_peer.get(peer, LinkTraffic())

    def add(self, peer: InstanceId, more: LinkTraffic) -> None:
        self._by_peer[peer] += more
        self.total += more

    def keep(self, peers: Container[InstanceId]) -> None:
        """Forget all other peers."""
        for gone in [peer for peer in self._by_peer if peer not in peers]:
            del self._by_peer[gone]


def traffic_of(event: PushDone | PushFailed) -> LinkTraffic:
    """What one push adds to the totals."""
    match event:
        case PushDone():
            return LinkTraffic(pushes=1, runs=event.runs, bytes_pushed=event.pushed_bytes, push_seconds=event.seconds)
        case PushFailed(begun=False):
            return LinkTraffic(pushes_refused=1)
        case PushFailed(quiescent=True):
            return LinkTraffic(pushes_broken=1)
        case PushFailed():
            return LinkTraffic(pushes_unproven=1)


class HandoffWriter:
    """All outgoing handoffs of one prefill instance. digest: computes the digests that go with a handoff (--verify-pages)."""

    def __init__(self, incarnation: Incarnation, layout: KVLayout, digest: DigestPages | None = None) -> None:
        self._incarnation = incarnation
        self._layers = layout.layers
        self._page_size = layout.page_size
        self._digest = digest
        self._by_key: dict[AttemptId, Outgoing] = {}
        self._by_ticket: dict[Ticket, Outgoing] = {}
        self._sessions: dict[Life, Session] = {}
        self._renewals: DeadlineWheel[Life] = DeadlineWheel()
        self._tickets = 0
        self.traffic = PeerTraffic()
        self._events: list[HandoffEvent] = []
        self.stale = 0
        """Messages and events that match no handoff; they were dropped."""
        self.pages_pushed = 0
        """Pages that were handed off."""
        self.pages_spared = 0
        """Pages that peers had already."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def pushes_in_flight(self) -> int:
        return len(self._by_ticket)

    def take_events(self) -> list[HandoffEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def next_deadline(self) -> float | None:
        return self._renewals.next_deadline()

    # --- calls of the scheduler --------------------------------------------------------------------------------------------

    def reserve(self, reserve: Reserve, peer: Life, source_pages: Int32Array) -> list[Action]:
        """Ask `peer` for a reservation: for a new handoff, or instead of the peer that has refused it (HandoffRefused).
        source_pages: [pages] int32, in token order; they stay leased until HandoffClosed."""
        outgoing = self._by_key.get(reserve.key)
        if outgoing is None:
            outgoing = Outgoing(reserve.key, peer, source_pages, reserve.sent_s, reserve.variant)
            self._by_key[reserve.key] = outgoing
        else:
            assert outgoing.stage == "refused", f"{reserve.key} is handed off twice: it is {outgoing.stage}"
            outgoing.stage, outgoing.peer, outgoing.reserved_s = "reserving", peer, reserve.sent_s
        session = self._sessions.setdefault(peer, Session())
        session.open[reserve.key] = outgoing
        session.moved.pop(reserve.key, None)
        session.renewals_left, session.is_dead = RENEWALS_AFTER, False
        if peer not in self._renewals:
            self._renewals.set(peer, reserve.sent_s + RENEW_S)
        return [Send(peer.id, reserve)]

    def cannot_reach(self, peer: InstanceId, failure: Failed) -> list[Action]:
        """No page can be written there now: what it has not granted yet is refused."""
        waiting = [o for o in self._by_key.values() if o.peer.id == peer and o.stage == "reserving"]
        return [action for outgoing in waiting for action in self._refuse(outgoing, failure)]

    def computed(
        self,
        key: AttemptId,
        tokens: int,
        layers: int = 0,
        first_token: int | None = None,
        first_logprob: TokenLogprob | None = None,
    ) -> list[Action]:
        """Push what the source pages hold by now: the KV of the prompt's first `tokens` tokens, and of its last chunk, if that is
        being computed, the first `layers` layers. first_token: what was sampled after the whole prompt, to be handed off, with
        its log probability if the client asks for that."""
        outgoing = self._by_key.get(key)
        if outgoing is None:
            return []
        is_whole = layers == self._layers or first_token is not None
        outgoing.complete = len(outgoing.source_pages) if is_whole else max(outgoing.complete, tokens // self._page_size)
        outgoing.layers_complete = max(outgoing.layers_complete, layers)
        outgoing.first_token, outgoing.first_logprob = first_token, first_logprob
        return self._advance(outgoing)

    def give_up(self, key: AttemptId) -> list[Action]:
        """The request has ended on this side: post nothing more, drain, then withdraw. A handoff that is over is left alone."""
        outgoing = self._by_key.get(key)
        if outgoing is None or outgoing.stage == "stuck":
            return []
        if outgoing.stage == "refused":
            self._close(outgoing, failure=None)
            return []
        return self._drain(outgoing, failure=None)

    # --- messages and the ends of pushes -----------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: Grant | Decline | Renewed, now: float) -> list[Action]:
        """Take in a message of a decode instance. It is dropped and counted when it is late, comes from an instance or a life
        that was not asked, or answers a former process of our name: it names that one, or a time that has not come yet on our
        clock."""
        if not isinstance(message, Decline) and (message.sent_s > now or not fits(message.writer, self._incarnation)):
            self.stale += 1
            return []
        if isinstance(message, Renewed):
            return self._renewed(sender, message)
        # The answer to a Reserve: perhaps not to the latest one, and perhaps of another instance than the one that was asked.
        outgoing = self._by_key.get(message.key)
        if outgoing is not None and outgoing.stage != "stuck":
            peer = outgoing.peer
            match message:
                case Decline() if peer.id == sender and message.sent_s in (None, outgoing.reserved_s):
                    return self._declined(outgoing, message)
                case Grant() if peer.id != sender:
                    # It has moved. No page of this grant was or will be written, so its reader need not wait for a renewal.
                    self.stale += 1
                    withdraw = Withdraw(key=message.key, incarnation=self._incarnation, generation=message.generation)
                    return [Send(sender, withdraw)]
                case Grant() if outgoing.target_pages is None and outgoing.stage != "refused":
                    if fits(message.incarnation, peer.incarnation):
                        return self._granted(outgoing, message)
        self.stale += 1
        return []

    def key_of(self, ticket: Ticket) -> AttemptId | None:
        """Whose push this is, if it is one of ours that has not ended."""
        outgoing = self._by_ticket.get(ticket)
        return None if outgoing is None else outgoing.key

    def transfer_ended(self, event: PushDone | PushFailed) -> list[Action]:
        """A push of ours is terminal."""
        outgoing = self._by_ticket.pop(event.ticket, None)
        if outgoing is None:
            self.stale += 1
            return []
        outgoing.in_flight.pop(event.ticket, None)
        self.traffic.add(outgoing.peer.id, traffic_of(event))
        match event:
            case PushDone():
                outgoing.pushed_bytes += event.pushed_bytes
                return self._advance(outgoing)
            case PushFailed():
                outgoing.quiescent = outgoing.quiescent and event.quiescent
                return self._drain(outgoing, _unavailable(f"pushing to {outgoing.peer.id} failed: {event.reason}"))

    def peers_gone(self, alive: Iterable[tuple[InstanceId, Incarnation]]) -> list[Action]:
        """Only `alive` remain, so handoffs to others fail. Their pushes end through their own events.

        A peer whose name has a new incarnation is dead: it reuses no page, and is sent nothing more. Sessions end with their last
        renewal; one with the dead ends here, once no handoff of it is open.
        """
        incarnations = dict(alive)
        self.traffic.keep(incarnations)
        actions: list[Action] = []
        for peer, session in list(self._sessions.items()):
            if incarnations.get(peer.id) == peer.incarnation:
                continue
            session.until_s = float("-inf")  # its link is closed, and a new link begins without a lease
            session.is_dead = session.is_dead or peer.id in incarnations
            if session.is_dead:
                self._renewals.clear(peer)  # the new incarnation would mistake them for claims on itself
            for outgoing in list(session.open.values()):
                left = _unavailable(f"{peer.id} left the fleet")
                if outgoing.stage == "reserving":
                    actions += self._refuse(outgoing, left)
                elif outgoing.stage != "stuck":
                    actions += self._drain(outgoing, left)
                elif session.is_dead:
                    del self._by_key[outgoing.key], session.open[outgoing.key]
            if session.is_dead and not session.open:
                self._sessions.pop(peer, None)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Send the renewals that are due: which handoffs are open."""
        actions: list[Action] = []
        for peer in self._renewals.expired(now):
            session = self._sessions[peer]
            for moved in session.moved.values():
                moved.name_at(now)
            claims = [Claim(each.key, each.generation, each.stage == "stuck") for each in session.open.values()]
            claims += [Claim(key, Generation(0), moved=True) for key in session.moved]
            session.moved = {key: moved for key, moved in session.moved.items() if not moved.is_over}
            session.renewals_left = RENEWALS_AFTER if session.open else session.renewals_left - 1
            actions.append(Send(peer.id, Renew(incarnation=self._incarnation, sent_s=now, claims=tuple(claims))))
            if session.renewals_left > 0 or session.moved:
                self._renewals.set(peer, now + RENEW_S)
            else:
                del self._sessions[peer]
        return actions

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _granted(self, outgoing: Outgoing, grant: Grant) -> list[Action]:
        outgoing.generation = grant.generation
        pages = len(outgoing.source_pages)
        have, beyond = divmod(grant.have_tokens, self._page_size)
        if len(grant.pages) != ID_BYTES * pages:
            return self._drain(outgoing, _invalid(outgoing, f"{len(grant.pages)} bytes of page ids for {pages} pages"))
        if not grant.variant.meets(outgoing.variant):
            return self._drain(
                outgoing, Failed.of(WeightsChanged(f"{outgoing.peer.id} has granted pages for KV of other weights"))
            )
        if beyond or have > pages:
            reason = f"have_tokens of {grant.have_tokens} is not a number of whole pages up to {pages}"
            return self._drain(outgoing, _invalid(outgoing, reason))
        outgoing.target_pages = unpack_ids(grant.pages)
        outgoing.posted = outgoing.have_pages = have
        self.pages_spared += have
        if outgoing.stage == "reserving":
            outgoing.stage = "pushing"
        self._events.append(HandoffGranted(outgoing.key, have))
        return [*self._extend(outgoing.peer, grant.sent_s + grant.write_lease_s), *self._advance(outgoing)]

    def _declined(self, outgoing: Outgoing, decline: Decline) -> list[Action]:
        """There will be no grant, or the grant is taken back. In the second case the target pages wait for our Withdraw."""
        if outgoing.stage == "reserving":
            return self._refuse(outgoing, decline.failed, is_declined=True)
        return [] if outgoing.stage == "refused" else self._drain(outgoing, decline.failed)

    def _refuse(self, outgoing: Outgoing, failure: Failed, is_declined: bool = False) -> list[Action]:
        """There will be no grant from its peer, or none that is of use. is_declined: the peer says so, and holds nothing."""
        outgoing.stage = "refused"
        self._sessions[outgoing.peer].moved[outgoing.key] = Moved()
        self._leave_session(outgoing)
        self._events.append(HandoffRefused(outgoing.key, failure))
        if is_declined:
            return []
        return [Send(outgoing.peer.id, Withdraw(key=outgoing.key, incarnation=self._incarnation))]

    def _renewed(self, sender: InstanceId, renewed: Renewed) -> list[Action]:
        actions: list[Action] = []
        peers = {peer for peer in self._sessions if peer.id == sender and fits(renewed.incarnation, peer.incarnation)}
        for peer in peers:
            actions += self._extend(peer, renewed.sent_s + renewed.write_lease_s)
            for moved in self._sessions[peer].moved.values():
                moved.is_answered = moved.is_answered or moved.since_s <= renewed.sent_s
        generations = renewed.generations or (None,) * len(renewed.over)
        for key, generation in zip(renewed.over, generations, strict=False):
            outgoing = self._by_key.get(key)
            if outgoing is None or outgoing.peer not in peers:
                continue
            # A grant may have come since the Renew that this answers.
            is_this = generation is None or outgoing.generation in (0, generation)
            # The answer may have overtaken a Reserve that was sent just before.
            if is_this and outgoing.reserved_s <= renewed.sent_s - RENEW_S / 2:
                lost = Failed.of(InstanceFailed(f"{sender} does not hold the reservation of {key}"))
                if outgoing.stage == "reserving":
                    actions += self._refuse(outgoing, lost)
                elif outgoing.stage not in ("refused", "stuck"):
                    actions += self._drain(outgoing, lost)
        return actions

    def _extend(self, peer: Life, until_s: float) -> list[Action]:
        session = self._sessions.get(peer)
        if session is None or until_s <= session.until_s:
            return []
        session.until_s = until_s
        return [Allow(peer.id, peer.incarnation, until_s)]

    def _advance(self, outgoing: Outgoing) -> list[Action]:
        """Post what may be posted; when everything is written, hand off."""
        if outgoing.stage == "draining":
            return self._close_if_drained(outgoing)
        if outgoing.stage != "pushing" or outgoing.target_pages is None:
            return []
        actions: list[Action] = []
        pages = len(outgoing.source_pages)
        if outgoing.posted < outgoing.complete:
            rest = range(outgoing.layers_posted, self._layers) if outgoing.layers_posted else None
            actions.append(self._post(outgoing, outgoing.target_pages, outgoing.complete, rest))
            outgoing.posted = outgoing.complete
        if outgoing.posted < pages and outgoing.layers_posted < outgoing.layers_complete:
            layers = range(outgoing.layers_posted, outgoing.layers_complete)
            actions.append(self._post(outgoing, outgoing.target_pages, pages, layers))
            outgoing.layers_posted = outgoing.layers_complete
        if outgoing.first_token is None:
            return actions
        if outgoing.posted == pages and not outgoing.in_flight:
            actions.append(self._handoff(outgoing, outgoing.first_token))
            self._close(outgoing, failure=None)
            return actions
        # The prompt is computed, so only the pushes still need its pages (and the digests, which are computed last).
        read = min(outgoing.in_flight.values(), default=outgoing.posted)
        if read > outgoing.read and self._digest is None:
            self._events.append(SourcePagesRead(outgoing.key, read - outgoing.read))
            outgoing.read = read
        return actions

    def _handoff(self, outgoing: Outgoing, first_token: int) -> Send:
        pushed = outgoing.source_pages[outgoing.have_pages :]
        self.pages_pushed += len(pushed)
        handoff = Handoff(
            key=outgoing.key,
            generation=outgoing.generation,
            first_token=first_token,
            pushed_pages=len(pushed),
            pushed_bytes=outgoing.pushed_bytes,
            digests=b"" if self._digest is None else self._digest(pushed),
            first_logprob=outgoing.first_logprob,
            variant=outgoing.variant,
        )
        return Send(outgoing.peer.id, handoff)

    def _post(self, outgoing: Outgoing, target_pages: Int32Array, end: int, layers: range | None) -> Push:
        """Push pages [posted, end), or only these layers of them."""
        if not outgoing.has_posted:
            outgoing.has_posted = True
            self._events.append(HandoffPosted(outgoing.key))
        self._tickets += 1
        ticket = Ticket(self._tickets)
        span = slice(outgoing.posted, end)
        outgoing.in_flight[ticket] = outgoing.posted
        self._by_ticket[ticket] = outgoing
        peer = outgoing.peer
        return Push(ticket, peer.id, peer.incarnation, outgoing.source_pages[span], target_pages[span], outgoing.key, layers)

    def _drain(self, outgoing: Outgoing, failure: Failed | None) -> list[Action]:
        if outgoing.stage != "draining":
            outgoing.stage = "draining"
            outgoing.failure = failure
        return self._close_if_drained(outgoing)

    def _close_if_drained(self, outgoing: Outgoing) -> list[Action]:
        if outgoing.in_flight:
            return []
        if outgoing.quiescent:
            self._close(outgoing, outgoing.failure)
            withdraw = Withdraw(key=outgoing.key, incarnation=self._incarnation, generation=outgoing.generation)
            return [Send(outgoing.peer.id, withdraw)]
        # Withdraw promises that no write is under way. Without proof it is not sent, and the claim stays.
        outgoing.stage = "stuck"
        self._events.append(HandoffClosed(outgoing.key, outgoing.failure, quiescent=False))
        return []

    def _close(self, outgoing: Outgoing, failure: Failed | None) -> None:
        self._events.append(HandoffClosed(outgoing.key, failure, quiescent=True))
        del self._by_key[outgoing.key]
        if outgoing.stage != "refused":
            self._leave_session(outgoing)

    def _leave_session(self, outgoing: Outgoing) -> None:
        """A session ends with its last renewal; that of a dead peer with its last handoff."""
        session = self._sessions[outgoing.peer]
        del session.open[outgoing.key]
        if session.is_dead and not session.open:
            del self._sessions[outgoing.peer]


def _invalid(outgoing: Outgoing, reason: str) -> Failed:
    return Failed(message=f"invalid grant from {outgoing.peer.id}: {reason}")


def _unavailable(message: str) -> Failed:
    return Failed.of(Unavailable(message))
