"""The sending end of the handoff: which pages of a request are written into its reservation, and when it is over.

Owns the state of each outgoing handoff and the tickets of its pushes. Knows messages and page ids. Does not know tokens (what
they mean), models, sockets, libraries or time.

    open ──Reserve──►  RESERVING ──Grant──► PUSHING ──all pages written, first token known──► Handoff ─► closed
                           │                   │
                        give_up             give_up, push failed, Decline
                           ▼                   ▼
                        Withdraw ◄── drained (no push in flight) ── DRAINING ─► closed

The source pages are read by pushes until `SourceClosed`: only then may their lease be closed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from common.errors import Unavailable
from common.ids import Generation, Incarnation, InstanceId, Int32Array, Key, Ticket, unpack_ids
from common.instance.ports import Push, PushDone, PushFailed, Send
from common.messages import Decline, Failed, Grant, Handoff, Reserve, Withdraw

Phase = Literal["reserving", "pushing", "draining"]


@dataclass(frozen=True, slots=True)
class SourceClosed:
    """The handoff is over on this side. `failure`: what the client is told; None when the decode instance has the request, or
    when it was given up on purpose.

    quiescent: no push can still read the source pages; when False they must be quarantined.
    """

    key: Key
    failure: Failed | None
    quiescent: bool


Output: TypeAlias = Send | Push | SourceClosed


@dataclass(slots=True, eq=False)
class _Outgoing:
    """pages [0, posted) are written or in flight, [posted, complete) wait for a grant or are posted next.

    0 ······ posted ······ complete ······ len(source_pages)
    """

    key: Key
    peer: InstanceId
    incarnation: Incarnation
    source_pages: Int32Array
    page_size: int
    phase: Phase = "reserving"
    target_pages: Int32Array | None = None
    generation: Generation = Generation(0)
    posted: int = 0
    complete: int = 0
    in_flight: set[Ticket] = field(default_factory=set)
    first_token: int | None = None
    failure: Failed | None = None
    quiescent: bool = True
    pushed_pages: int = 0
    pushed_bytes: int = 0

    def accept(self, grant: Grant) -> None:
        """Learn where to write. Raises ValueError for a grant that does not fit the request; nothing has changed then."""
        target_pages, pages = unpack_ids(grant.pages), len(self.source_pages)
        if len(target_pages) != pages:
            raise ValueError(f"{len(target_pages)} pages for {pages}")
        have, beyond = divmod(grant.have_tokens, self.page_size)
        if beyond or not 0 <= have <= pages:
            raise ValueError(f"have_tokens of {grant.have_tokens} is not a number of whole pages up to {pages}")
        self.target_pages, self.generation, self.posted = target_pages, grant.generation, have


class HandoffSource:
    """All outgoing handoffs of one prefill instance. Every method returns what is to be done, in order."""

    def __init__(self, instance: InstanceId, page_size: int) -> None:
        self._instance = instance
        self._page_size = page_size
        self._by_key: dict[Key, _Outgoing] = {}
        self._by_ticket: dict[Ticket, _Outgoing] = {}
        self._tickets = 0
        self.stale = 0
        """Messages and events that belong to nothing we know: dropped and counted."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def pushes_in_flight(self) -> int:
        return len(self._by_ticket)

    def open(self, reserve: Reserve, peer: InstanceId, incarnation: Incarnation, source_pages: Int32Array) -> list[Output]:
        """Ask `peer` for a reservation. source_pages: [pages] int32, in token order; they stay leased until SourceClosed."""
        assert reserve.key not in self._by_key, f"{reserve.key} is handed off twice"
        self._by_key[reserve.key] = _Outgoing(reserve.key, peer, incarnation, source_pages, self._page_size)
        return [Send(peer, reserve)]

    def computed(self, key: Key, tokens: int) -> list[Output]:
        """The KV of the first `tokens` tokens of the prompt is in the source pages: push the pages that are complete."""
        outgoing = self._by_key.get(key)
        if outgoing is None:
            return []
        outgoing.complete = max(outgoing.complete, tokens // self._page_size)
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
        if outgoing is None:
            return []
        return self._drain(outgoing, failure=None)

    def receive(self, sender: InstanceId, message: Grant | Decline) -> list[Output]:
        """A decode instance answered. An answer that is late, or from another instance than we asked, is dropped and counted."""
        outgoing = self._by_key.get(message.key)
        if outgoing is None or outgoing.peer != sender or outgoing.target_pages is not None:
            self.stale += 1
            return []
        if isinstance(message, Decline):
            return self._close(outgoing, failure=message.failed, withdraw=False)
        try:
            outgoing.accept(message)
        except ValueError as error:
            return self._drain(outgoing, Failed(message=f"{outgoing.peer} granted what cannot be: {error}"))
        if outgoing.phase == "reserving":
            outgoing.phase = "pushing"
        return self._advance(outgoing)

    def transfer_ended(self, event: PushDone | PushFailed) -> list[Output]:
        """A push of ours is terminal."""
        outgoing = self._by_ticket.pop(event.ticket, None)
        if outgoing is None:
            self.stale += 1
            return []
        outgoing.in_flight.discard(event.ticket)
        match event:
            case PushDone():
                outgoing.pushed_bytes += event.pushed_bytes
                return self._advance(outgoing)
            case PushFailed():
                outgoing.quiescent = outgoing.quiescent and event.quiescent
                return self._drain(outgoing, _unavailable(f"pushing to {outgoing.peer} failed: {event.reason}"))

    def peers_gone(self, alive: Iterable[tuple[InstanceId, Incarnation]]) -> list[Output]:
        """Only `alive` remain: handoffs to others cannot succeed. Their pushes end through their own events."""
        known = set(alive)
        gone = [out for out in self._by_key.values() if (out.peer, out.incarnation) not in known]
        return [output for out in gone for output in self._drain(out, _unavailable(f"{out.peer} left the fleet"))]

    def _advance(self, outgoing: _Outgoing) -> list[Output]:
        if outgoing.phase == "draining":
            return self._close_if_drained(outgoing)
        if outgoing.phase == "reserving" or outgoing.target_pages is None:
            return []
        outputs: list[Output] = []
        if outgoing.posted < outgoing.complete:
            outputs.append(self._post(outgoing, outgoing.target_pages))
        done = outgoing.posted >= len(outgoing.source_pages) and not outgoing.in_flight
        if done and outgoing.first_token is not None:
            handoff = Handoff(
                key=outgoing.key,
                generation=outgoing.generation,
                first_token=outgoing.first_token,
                pushed_pages=outgoing.pushed_pages,
                pushed_bytes=outgoing.pushed_bytes,
            )
            outputs.append(Send(outgoing.peer, handoff))
            outputs += self._close(outgoing, failure=None, withdraw=False)
        return outputs

    def _post(self, outgoing: _Outgoing, target_pages: Int32Array) -> Push:
        self._tickets += 1
        ticket = Ticket(self._tickets)
        span = slice(outgoing.posted, outgoing.complete)
        outgoing.pushed_pages += outgoing.complete - outgoing.posted
        outgoing.posted = outgoing.complete
        outgoing.in_flight.add(ticket)
        self._by_ticket[ticket] = outgoing
        return Push(ticket, outgoing.peer, outgoing.incarnation, outgoing.source_pages[span], target_pages[span])

    def _drain(self, outgoing: _Outgoing, failure: Failed | None) -> list[Output]:
        if outgoing.phase != "draining":
            outgoing.phase = "draining"
            outgoing.failure = failure
        return self._close_if_drained(outgoing)

    def _close_if_drained(self, outgoing: _Outgoing) -> list[Output]:
        if outgoing.in_flight:
            return []
        # Withdraw is the promise that nothing is under way: without proof it must not be given.
        return self._close(outgoing, outgoing.failure, withdraw=outgoing.quiescent)

    def _close(self, outgoing: _Outgoing, failure: Failed | None, withdraw: bool) -> list[Output]:
        del self._by_key[outgoing.key]
        closed = SourceClosed(outgoing.key, failure, outgoing.quiescent)
        return [Send(outgoing.peer, Withdraw(key=outgoing.key)), closed] if withdraw else [closed]


def _unavailable(message: str) -> Failed:
    return Failed.of(Unavailable(message))
