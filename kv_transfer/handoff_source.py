"""The sending end of the handoff: which pages of a request are written into its reservation, and when it is over.

Owns the state of each outgoing handoff, the tickets of its pushes, and the lease for each decode instance it writes to.
Knows messages and page ids; the time is an argument. Does not know tokens (what they mean), models, sockets or libraries.

    open ──Reserve──►  RESERVING ──Grant──► PUSHING ──all pages written, first token known──► Handoff ─► closed
                           │                   │
                        give_up             give_up, push failed, Decline, over
                           ▼                   ▼
                        Withdraw ◄── drained (no push in flight) ── DRAINING ─► closed
                                                                       └─ not proven drained ─► STUCK, claimed for ever

Nothing is acknowledged one by one: while a handoff with an instance is open, and a little longer, Renew says every second which
ones are. That keeps the lease (`kv_transfer/write_lease.py`), and brings to light on either side what a lost message left behind.

The source pages are read by pushes until `SourceRead` says that they are not, or `SourceClosed` says so of all: only then may
their lease end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never

from common.deadlines import DeadlineWheel
from common.errors import InstanceFailed, Unavailable
from common.ids import Generation, Incarnation, InstanceId, Int32Array, Key, Life, Ticket, unpack_ids
from common.instance.ports import Allow, Push, PushDone, PushFailed, Send
from common.messages import Claim, Decline, Failed, Grant, Handoff, Renew, Renewed, Reserve, Withdraw
from common.pages.layout import KVLayout
from kv_transfer.digests import Digest
from kv_transfer.traffic import Traffic
from kv_transfer.write_lease import RENEW_S, RENEWALS_AFTER

Phase = Literal["reserving", "pushing", "draining", "stuck"]


@dataclass(frozen=True, slots=True)
class SourceClosed:
    """The handoff is over on this side. `failure`: what the client is told; None when the decode instance has the request, or
    when it was given up on purpose.

    quiescent: no push can still read the source pages; when False they must be quarantined.
    """

    key: Key
    failure: Failed | None
    quiescent: bool


@dataclass(frozen=True, slots=True)
class SourceRead:
    """The next `pages` of the source pages, from the first on, are written, and the prompt is computed: nothing reads them."""

    key: Key
    pages: int


Output: TypeAlias = Send | Push | Allow | SourceRead | SourceClosed


@dataclass(slots=True, eq=False)
class _Outgoing:
    """pages [0, posted) are written or in flight, [posted, complete) wait for a grant or are posted next.

    0 ····· read ····· posted ····· complete ····· len(source_pages)

    While the last chunk is computed, the first layers_complete layers of all pages from `complete` on are there, and of those
    from `posted` on the first layers_posted layers are written or in flight. in_flight: the first page of each push. read: of how
    many pages SourceRead was said.
    """

    key: Key
    peer: Life
    source_pages: Int32Array
    page_size: int
    reserved_s: float
    phase: Phase = "reserving"
    target_pages: Int32Array | None = None
    generation: Generation = Generation(0)
    posted: int = 0
    complete: int = 0
    layers_complete: int = 0
    layers_posted: int = 0
    in_flight: dict[Ticket, int] = field(default_factory=dict)
    read: int = 0
    first_token: int | None = None
    failure: Failed | None = None
    quiescent: bool = True
    have_pages: int = 0
    pushed_bytes: int = 0

    def accept(self, grant: Grant) -> None:
        """Learn where to write. Raises ValueError for a grant that does not fit the request; nothing has changed then."""
        target_pages, pages = unpack_ids(grant.pages), len(self.source_pages)
        if len(target_pages) != pages:
            raise ValueError(f"{len(target_pages)} pages for {pages}")
        have, beyond = divmod(grant.have_tokens, self.page_size)
        if beyond or not 0 <= have <= pages:
            raise ValueError(f"have_tokens of {grant.have_tokens} is not a number of whole pages up to {pages}")
        self.target_pages, self.generation, self.posted, self.have_pages = target_pages, grant.generation, have, have


@dataclass(slots=True, eq=False)
class _Session:
    """The handoffs that are open with one decode instance. until_s: when the lease to write there ends."""

    open: dict[Key, _Outgoing] = field(default_factory=dict)
    until_s: float = float("-inf")
    renewals_left: int = RENEWALS_AFTER


class HandoffSource:
    """All outgoing handoffs of one prefill instance. Every method returns what is to be done, in order.

    digest: with --verify-pages, what computes the digests that go with a handoff.
    """

    def __init__(self, incarnation: Incarnation, layout: KVLayout, digest: Digest | None = None) -> None:
        self._incarnation = incarnation
        self._layers = layout.layers
        self._page_size = layout.page_size
        self._digest = digest
        self._by_key: dict[Key, _Outgoing] = {}
        self._by_ticket: dict[Ticket, _Outgoing] = {}
        self._sessions: dict[Life, _Session] = {}
        self._renewals: DeadlineWheel[Life] = DeadlineWheel()
        self._tickets = 0
        self.traffic = Traffic()
        self.stale = 0
        """Messages and events that belong to nothing we know: dropped and counted."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def pushes_in_flight(self) -> int:
        return len(self._by_ticket)

    def next_deadline(self) -> float | None:
        return self._renewals.next_deadline()

    # --- what the scheduler says -------------------------------------------------------------------------------------------

    def open(self, reserve: Reserve, peer: Life, source_pages: Int32Array) -> list[Output]:
        """Ask `peer` for a reservation. source_pages: [pages] int32, in token order; they stay leased until SourceClosed."""
        assert reserve.key not in self._by_key, f"{reserve.key} is handed off twice"
        outgoing = _Outgoing(reserve.key, peer, source_pages, self._page_size, reserve.sent_s)
        self._by_key[reserve.key] = outgoing
        session = self._sessions.setdefault(peer, _Session())
        session.open[reserve.key] = outgoing
        session.renewals_left = RENEWALS_AFTER
        if peer not in self._renewals:
            self._renewals.set(peer, reserve.sent_s + RENEW_S)
        return [Send(peer.id, reserve)]

    def computed(self, key: Key, tokens: int) -> list[Output]:
        """The KV of the first `tokens` tokens of the prompt is in the source pages: push the pages that are complete."""
        outgoing = self._by_key.get(key)
        if outgoing is None:
            return []
        outgoing.complete = max(outgoing.complete, tokens // self._page_size)
        return self._advance(outgoing)

    def layers_computed(self, key: Key, layers: int) -> list[Output]:
        """Of the last chunk, which is being computed, the KV of the first `layers` layers is in the source pages: push those."""
        outgoing = self._by_key.get(key)
        if outgoing is None:
            return []
        outgoing.layers_complete = layers
        if layers == self._layers:
            outgoing.complete = len(outgoing.source_pages)
        return self._advance(outgoing)

    def sampled(self, key: Key, first_token: int) -> list[Output]:
        """The whole prompt is computed and its first token is known: push the last page too, then hand off."""
        outgoing = self._by_key.get(key)
        if outgoing is None:
            return []
        outgoing.complete = len(outgoing.source_pages)
        outgoing.first_token = first_token
        return self._advance(outgoing)

    def give_up(self, key: Key) -> list[Output]:
        """The request has ended on this side: post nothing more, drain, then withdraw. Unknown keys are over already."""
        outgoing = self._by_key.get(key)
        if outgoing is None or outgoing.phase == "stuck":
            return []
        return self._drain(outgoing, failure=None)

    # --- what decode instances and transfers say ---------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: Grant | Decline | Renewed, now: float) -> list[Output]:
        """A decode instance spoke. What is late, comes from another instance than we asked, or answers a word that we have not
        said yet (but a former process of our name on a clock of its own), is dropped and counted."""
        if not isinstance(message, Decline) and message.sent_s > now:
            self.stale += 1
            return []
        match message:
            case Renewed():
                return self._renewed(sender, message)
            case Grant() | Decline():
                outgoing = self._by_key.get(message.key)
                if outgoing is None or outgoing.peer.id != sender or outgoing.phase == "stuck":
                    self.stale += 1
                    return []
                return self._granted(outgoing, message) if isinstance(message, Grant) else self._declined(outgoing, message)
            case _:
                assert_never(message)

    def transfer_ended(self, event: PushDone | PushFailed) -> list[Output]:
        """A push of ours is terminal."""
        outgoing = self._by_ticket.pop(event.ticket, None)
        if outgoing is None:
            self.stale += 1
            return []
        outgoing.in_flight.pop(event.ticket, None)
        self.traffic.pushed(outgoing.peer.id, event)
        match event:
            case PushDone():
                outgoing.pushed_bytes += event.pushed_bytes
                return self._advance(outgoing)
            case PushFailed():
                outgoing.quiescent = outgoing.quiescent and event.quiescent
                return self._drain(outgoing, _unavailable(f"pushing to {outgoing.peer.id} failed: {event.reason}"))

    def peers_gone(self, alive: Iterable[tuple[InstanceId, Incarnation]]) -> list[Output]:
        """Only `alive` remain: handoffs to others cannot succeed. Their pushes end through their own events.

        One that has a successor of its name is dead: it reuses no page, and hears nothing more.
        """
        incarnations = dict(alive)
        self.traffic.keep(incarnations)
        outputs: list[Output] = []
        for peer, session in list(self._sessions.items()):
            if incarnations.get(peer.id) == peer.incarnation:
                continue
            session.until_s = float("-inf")  # its link is closed; a new one begins without a lease
            is_dead = peer.id in incarnations
            if is_dead:
                self._renewals.clear(peer)  # its successor would take them for all that we hold open there
            for outgoing in list(session.open.values()):
                if outgoing.phase != "stuck":
                    outputs += self._drain(outgoing, _unavailable(f"{peer.id} left the fleet"))
                elif is_dead:
                    self._forget(outgoing)
            self._drop_silent(peer)
        return outputs

    def tick(self, now: float) -> list[Output]:
        """Say which handoffs are open, to whom it is time to say so."""
        outputs: list[Output] = []
        for peer in self._renewals.expired(now):
            session = self._sessions[peer]
            session.renewals_left = RENEWALS_AFTER if session.open else session.renewals_left - 1
            claims = tuple(Claim(each.key, each.generation, each.phase == "stuck") for each in session.open.values())
            outputs.append(Send(peer.id, Renew(incarnation=self._incarnation, sent_s=now, claims=claims)))
            if session.renewals_left > 0:
                self._renewals.set(peer, now + RENEW_S)
            self._drop_silent(peer)
        return outputs

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _granted(self, outgoing: _Outgoing, grant: Grant) -> list[Output]:
        if outgoing.target_pages is not None:
            self.stale += 1
            return []
        try:
            outgoing.accept(grant)
        except ValueError as error:
            return self._drain(outgoing, Failed(message=f"{outgoing.peer.id} granted what cannot be: {error}"))
        if outgoing.phase == "reserving":
            outgoing.phase = "pushing"
        return [*self._extend(outgoing.peer, grant.sent_s + grant.write_lease_s), *self._advance(outgoing)]

    def _declined(self, outgoing: _Outgoing, decline: Decline) -> list[Output]:
        """There will be no grant; or the one that there was is taken back, and then the pages wait for our word."""
        if outgoing.target_pages is None and outgoing.phase == "reserving":
            return self._close(outgoing, failure=decline.failed, withdraw=False)
        return self._drain(outgoing, decline.failed)

    def _renewed(self, sender: InstanceId, renewed: Renewed) -> list[Output]:
        outputs: list[Output] = []
        for peer in [peer for peer in self._sessions if peer.id == sender]:
            outputs += self._extend(peer, renewed.sent_s + renewed.write_lease_s)
        for key in renewed.over:
            outgoing = self._by_key.get(key)
            # A Reserve that was sent just before may still be behind.
            if outgoing is not None and outgoing.peer.id == sender and outgoing.reserved_s <= renewed.sent_s - RENEW_S / 2:
                lost = InstanceFailed(f"{sender} does not hold the reservation of {key}")
                outputs += self._drain(outgoing, Failed.of(lost)) if outgoing.phase != "stuck" else []
        return outputs

    def _extend(self, peer: Life, until_s: float) -> list[Output]:
        session = self._sessions.get(peer)
        if session is None or until_s <= session.until_s:
            return []
        session.until_s = until_s
        return [Allow(peer.id, peer.incarnation, until_s)]

    def _advance(self, outgoing: _Outgoing) -> list[Output]:
        if outgoing.phase == "draining":
            return self._close_if_drained(outgoing)
        if outgoing.phase != "pushing" or outgoing.target_pages is None:
            return []
        outputs: list[Output] = []
        if outgoing.posted < outgoing.complete:
            rest = range(outgoing.layers_posted, self._layers) if outgoing.layers_posted else None
            outputs.append(self._post(outgoing, outgoing.target_pages, outgoing.complete, rest))
            outgoing.posted = outgoing.complete
        if outgoing.posted < len(outgoing.source_pages) and outgoing.layers_posted < outgoing.layers_complete:
            layers = range(outgoing.layers_posted, outgoing.layers_complete)
            outputs.append(self._post(outgoing, outgoing.target_pages, len(outgoing.source_pages), layers))
            outgoing.layers_posted = outgoing.layers_complete
        done = outgoing.posted >= len(outgoing.source_pages) and not outgoing.in_flight
        if done and outgoing.first_token is not None:
            outputs.append(Send(outgoing.peer.id, self._handoff(outgoing, outgoing.first_token)))
            return outputs + self._close(outgoing, failure=None, withdraw=False)
        return outputs + self._read(outgoing)

    def _read(self, outgoing: _Outgoing) -> list[Output]:
        """Once the prompt is computed, its pages are needed for the pushes alone (and for their digests, which come last)."""
        if outgoing.first_token is None or self._digest is not None:
            return []
        read = min(outgoing.in_flight.values(), default=outgoing.posted)
        if read <= outgoing.read:
            return []
        more, outgoing.read = read - outgoing.read, read
        return [SourceRead(outgoing.key, more)]

    def _handoff(self, outgoing: _Outgoing, first_token: int) -> Handoff:
        pushed = outgoing.source_pages[outgoing.have_pages :]
        return Handoff(
            key=outgoing.key,
            generation=outgoing.generation,
            first_token=first_token,
            pushed_pages=len(pushed),
            pushed_bytes=outgoing.pushed_bytes,
            digests=b"" if self._digest is None else self._digest(pushed),
        )

    def _post(self, outgoing: _Outgoing, target_pages: Int32Array, end: int, layers: range | None) -> Push:
        """Pages [posted, end), and of them only these layers."""
        self._tickets += 1
        ticket = Ticket(self._tickets)
        span = slice(outgoing.posted, end)
        outgoing.in_flight[ticket] = outgoing.posted
        self._by_ticket[ticket] = outgoing
        peer = outgoing.peer
        return Push(ticket, peer.id, peer.incarnation, outgoing.source_pages[span], target_pages[span], layers)

    def _drain(self, outgoing: _Outgoing, failure: Failed | None) -> list[Output]:
        if outgoing.phase != "draining":
            outgoing.phase = "draining"
            outgoing.failure = failure
        return self._close_if_drained(outgoing)

    def _close_if_drained(self, outgoing: _Outgoing) -> list[Output]:
        if outgoing.in_flight:
            return []
        if outgoing.quiescent:
            return self._close(outgoing, outgoing.failure, withdraw=True)
        # Withdraw is the promise that nothing is under way. Without proof it is not given, and the claim stays.
        outgoing.phase = "stuck"
        return [SourceClosed(outgoing.key, outgoing.failure, quiescent=False)]

    def _close(self, outgoing: _Outgoing, failure: Failed | None, withdraw: bool) -> list[Output]:
        self._forget(outgoing)
        closed = SourceClosed(outgoing.key, failure, quiescent=True)
        return [Send(outgoing.peer.id, Withdraw(key=outgoing.key)), closed] if withdraw else [closed]

    def _forget(self, outgoing: _Outgoing) -> None:
        del self._by_key[outgoing.key]
        del self._sessions[outgoing.peer].open[outgoing.key]
        self._drop_silent(outgoing.peer)

    def _drop_silent(self, peer: Life) -> None:
        """A session in which nothing is open and nothing more is said is over."""
        session = self._sessions.get(peer)
        if session is not None and not session.open and peer not in self._renewals:
            del self._sessions[peer]


def _unavailable(message: str) -> Failed:
    return Failed.of(Unavailable(message))
