"""The receiving end of the handoff: reservations, which are pages leased for KV that is on its way.

Owns the leases and their generations, and when each writer was last heard. Knows messages and pages; the time is an argument.
Does not know tokens (what they mean), models, sockets or libraries.

    grant ──► RESERVED ──Handoff(generation)──► landed: the lease passes to the caller
                 ├──────Withdraw─────────────────────────► the caller closes the lease
                 ├──────Renew that does not claim it ────► lost: its Handoff or Withdraw did not arrive; the same
                 ├──────the writer is silent for too long ► fenced: the same (`kv_transfer/write_lease.py`)
                 └──────cancel───► CANCELLED ── any of these ──► the same

A cancelled reservation keeps its pages until then: a write may still be under way.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from common.deadlines import DeadlineWheel
from common.ids import Generation, Incarnation, InstanceId, Int32Array, Key, Life, pack_ids
from common.instance.ports import Send
from common.messages import Grant, Handoff, Renew, Renewed
from common.pages.pool import PageLease
from kv_transfer.write_lease import MARGIN_S, WRITE_LEASE_S


@dataclass(slots=True, eq=False)
class Reservation:
    """prompt_pages of the lease await KV; the rest is room for the answer. asked_s: on the writer's clock, of its Reserve.

    cancelled_s: when it was cancelled, on ours; None while it is wanted.
    """

    key: Key
    writer: Life
    generation: Generation
    lease: PageLease
    prompt_pages: int
    asked_s: float
    have_tokens: int = 0
    cancelled_s: float | None = None


@dataclass(slots=True, eq=False)
class _Heard:
    """The latest word of a writer: when it said it on its clock, and when we heard it on ours."""

    sent_s: float
    heard_s: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a Renew brought: the answer, the reservations of which the writer knows nothing (any more), and those that it gave up
    and yet cannot let go."""

    sends: list[Send]
    lost: list[Reservation]
    stuck: list[Reservation]


class HandoffTarget:
    """All reservations of one decode instance. Its generations begin at a number that is its incarnation's own: a late message
    for a former one matches none of them."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._by_key: dict[Key, Reservation] = {}
        self._heard: dict[Life, _Heard] = {}
        self._silence: DeadlineWheel[Life] = DeadlineWheel()
        self._generations = zlib.crc32(incarnation.encode()) << 24
        self.stale = 0
        """Messages that belong to no reservation: dropped and counted."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def heard(self, writer: Life, sent_s: float, now: float) -> None:
        """A Reserve or Renew of this writer arrived; an older word than the latest changes nothing."""
        known = self._heard.get(writer)
        if known is None or sent_s > known.sent_s:
            self._heard[writer] = _Heard(sent_s, now)
            self._silence.set(writer, now + WRITE_LEASE_S + MARGIN_S)

    def hears(self, writer: Life) -> bool:
        """Whether the writer has spoken lately, so that it can be granted anything."""
        return writer in self._heard

    def grant(self, key: Key, writer: Life, lease: PageLease, prompt_pages: int, asked_s: float) -> Send:
        """Open a reservation over `lease` and tell the writer where to write. It was heard before."""
        assert key not in self._by_key, f"{key} is reserved twice"
        assert prompt_pages <= len(lease)
        self._generations += 1
        reservation = Reservation(key, writer, Generation(self._generations), lease, prompt_pages, asked_s)
        self._by_key[key] = reservation
        return self._grant_of(reservation)

    def land(self, sender: InstanceId, handoff: Handoff) -> Reservation | None:
        """The writer is done: the reservation, whose lease is the caller's from now on; None when the handoff is stale."""
        reservation = self._by_key.get(handoff.key)
        if reservation is None or reservation.writer.id != sender or reservation.generation != handoff.generation:
            self.stale += 1
            return None
        return self._by_key.pop(handoff.key)

    def withdraw(self, sender: InstanceId, key: Key) -> Reservation | None:
        """The writer has drained and gives up: the reservation, whose lease the caller closes; None when it is unknown."""
        reservation = self._by_key.get(key)
        if reservation is None or reservation.writer.id != sender:
            self.stale += 1
            return None
        return self._by_key.pop(key)

    def cancel(self, key: Key, now: float) -> None:
        """The request has ended: the reservation, if there is one, ends by its writer's next word."""
        reservation = self._by_key.get(key)
        if reservation is not None and reservation.cancelled_s is None:
            reservation.cancelled_s = now

    def renew(self, sender: InstanceId, renew: Renew, now: float, waits: Callable[[Key], bool]) -> Renewal:
        """A writer said which handoffs it holds open. waits: whether a key is in line for a reservation here."""
        writer = Life(sender, renew.incarnation)
        self.heard(writer, renew.sent_s, now)
        claims = {claim.key: claim for claim in renew.claims}
        sends: list[Send] = []
        over: list[Key] = []
        stuck: list[Reservation] = []
        for key, claim in claims.items():
            reservation = self._by_key.get(key)
            if reservation is None or reservation.writer != writer:
                over += [] if waits(key) else [key]
            elif claim.stuck:
                stuck.append(reservation)
            elif reservation.cancelled_s is not None:
                over.append(key)
            elif not claim.generation:
                sends.append(self._grant_of(reservation))  # the first one may have been lost; one that comes twice is dropped
        lost = [r for r in self._by_key.values() if r.writer == writer and r.asked_s < renew.sent_s and r.key not in claims]
        for reservation in lost:
            del self._by_key[reservation.key]
        answer = Renewed(sent_s=renew.sent_s, write_lease_s=WRITE_LEASE_S, over=tuple(over))
        return Renewal([Send(sender, answer), *sends], lost, stuck)

    def fenced(self, now: float) -> list[Reservation]:
        """The reservations of writers that have been silent for so long that they write no more, by their own clock."""
        fenced: list[Reservation] = []
        for writer in self._silence.expired(now):
            del self._heard[writer]
            fenced += [reservation for reservation in self._by_key.values() if reservation.writer == writer]
        for reservation in fenced:
            del self._by_key[reservation.key]
        return fenced

    def next_deadline(self) -> float | None:
        return self._silence.next_deadline()

    def is_stuck(self, key: Key, now: float) -> bool:
        """Whether the key's reservation waits longer than usual for a word of its writer: it was cancelled or the writer fell
        silent, a lease ago."""
        reservation = self._by_key.get(key)
        if reservation is None:
            return False
        cancelled = reservation.cancelled_s is not None and now - reservation.cancelled_s > WRITE_LEASE_S
        return cancelled or now - self._heard[reservation.writer].heard_s > WRITE_LEASE_S

    def _grant_of(self, reservation: Reservation) -> Send:
        pages: Int32Array = reservation.lease.pages[: reservation.prompt_pages]
        grant = Grant(
            key=reservation.key,
            generation=reservation.generation,
            pages=pack_ids(pages),
            sent_s=self._heard[reservation.writer].sent_s,
            write_lease_s=WRITE_LEASE_S,
        )
        return Send(reservation.writer.id, grant)
