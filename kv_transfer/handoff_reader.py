"""The receiving end of the handoff: reservations, which are pages leased for KV that is on its way.

Owns the reservations and their generations, the time of each writer's latest message, how long a writer may write, and the
comparison of page digests. Knows messages and pages; the time is an argument. Does not know what tokens mean, models, sockets or
libraries.

    grant ──► RESERVED ──Handoff(generation)──► landed: the lease passes to the caller
                 ├──────Withdraw─────────────────────────► the caller closes the lease
                 ├──────Renew that says it has moved ────► likewise
                 ├──────Renew that does not claim it ────► lost (its Handoff or Withdraw did not arrive): likewise
                 ├──────the writer is silent for too long,
                 │      or dead ─────────────────────────► fenced: likewise
                 └──────cancel───► CANCELLED, until one of the above happens: likewise

A cancelled reservation keeps its pages, because a write may still be under way.

The target of a one-sided write cannot stop it. So a writer that is cut off stops by its own clock, and the reader waits longer
than that before it reuses the pages. Clocks are never compared: the writer counts from when it *sent* its latest message that the
reader has answered, the reader from when the writer's last message arrived, which is later.

    writer   sent ├────── WRITE_LEASE_S ──────┤ posts no slice ── OVERRUN_S ──┤ if a write is still in flight, the process ends
    reader    arrived ├────── WRITE_LEASE_S ──────┼─────────── MARGIN_S ───────────┤ the pages come home

A writer whose process is gone needs no lease to end: it posts nothing. That is proven when its host refuses connections to its
inbox, or another life has bound the same address. The kernel closes a process's sockets when the last of its threads has left,
which none does within a system call:

    a copy by the writer's thread (CMA, shared memory)   has ended, for the thread has
    RDMA                                                 the kernel destroys the queue pairs with the process's files; a card
                                                         sends nothing of a queue pair that is gone
    TCP                                                  what the process gave to its kernel still arrives, and our own thread
                                                         writes it to the pages when it reads it

So only TCP brings bytes of the dead. On one host its buffers (megabytes) empty as fast as we read, and were empty 16 ms after
a SIGKILL: the pages come home after ORPHANED_S, if they are in main memory and both inboxes have one address. Otherwise lost
packets are sent again until the connection's timeout of 10 s, or a device may copy a little longer than its process lives: the
pages come home after MARGIN_S. What has arrived by then is taken in first (`Settle`). Only the process of rank 0 is proven to be
gone, so writers of several ranks are fenced by silence. Until then pages of the dead count as in use, not as quarantined, for
they say nothing of this instance. A dead writer's last mail renews nothing: should it be alive after all, its lease runs out.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from msgspec.structs import replace

from common.deadlines import DeadlineWheel
from common.ids import AttemptId, Generation, Incarnation, InstanceId, Int32Array, Life, Variant, pack_ids
from common.instance.ports import Send
from common.messages import Grant, Handoff, Renew, Renewed, Withdraw
from common.messages.base import fits
from common.pages.pool import PageLease

DigestPages: TypeAlias = Callable[[Int32Array], bytes]
"""Computes the digests of some pages, concatenated."""


WRITE_LEASE_S = 5.0
RENEW_S = 1.0
"""How often a writer renews its lease while a handoff is open."""
MARGIN_S = 15.0
"""Longer than a write that was posted under the lease takes to land: a transport gives up a silent link after 10 s."""
ORPHANED_S = 1.0
"""Bytes that a dead process of this host has left in its kernel arrive within this time."""
OVERRUN_S = 12.0
"""Shorter than MARGIN_S. A process that is this late was stopped, and its writes in flight would go on."""
RENEWALS_AFTER = 3
"""Renewals that follow the last handoff of a pair: they make up for a Handoff or Withdraw that was lost."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Pages of ours that a writer may write."""

    key: AttemptId
    writer: Life
    grant: Grant
    """The answer to its Reserve."""
    lease: PageLease
    """Its first pages wait for KV; the rest is room for the answer."""
    prompt_pages: int
    """How many pages wait for KV."""
    asked_s: float
    """When the Reserve was sent, on the writer's clock."""
    have_tokens: int = 0
    """Leading tokens whose KV is here already."""
    cancelled_s: float = math.inf
    """When it was cancelled, on our clock; infinite while it is wanted."""
    is_stuck: bool = False
    """Its writer cannot release it."""


@dataclass(slots=True, eq=False)
class _LastContact:
    """The latest message of a writer."""

    sent_s: float
    """On the writer's clock."""
    arrived_s: float
    """On our clock."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The effects of a Renew."""

    sends: list[Send]
    """The answer, and grants again."""
    moved: list[Reservation]
    """Reservations that the writer never used, because another reader has the request."""
    lost: list[Reservation]
    """Those that the writer no longer knows."""
    stuck: list[Reservation]
    """Those that the writer has given up but cannot release, because a write may still be under way."""


class HandoffReader:
    """All reservations of one decode instance.

    Generations begin at a number that belongs to the incarnation, so a late message to a former incarnation matches none of them.
    """

    def __init__(self, incarnation: Incarnation) -> None:
        self.open: dict[AttemptId, Reservation] = {}
        self._contacts: dict[Life, _LastContact] = {}
        self._silence: DeadlineWheel[Life] = DeadlineWheel()
        self._dead: set[Life] = set()
        """The writers among `_contacts` whose processes are gone."""
        self._incarnation = incarnation
        self._generations = zlib.crc32(incarnation.encode()) << 24
        self.stale = 0
        """Messages that match no reservation; they were dropped."""

    def contacted(self, writer: Life, sent_s: float, now: float) -> None:
        """A Reserve or Renew of this writer arrived. One that is older than the latest changes nothing, nor does the last mail of
        a dead writer."""
        known = self._contacts.get(writer)
        if writer not in self._dead and (known is None or sent_s > known.sent_s):
            self._contacts[writer] = _LastContact(sent_s, now)
            self._silence.set(writer, now + WRITE_LEASE_S + MARGIN_S)

    def writer_died(self, writer: Life, fenced_s: float | None) -> None:
        """The writer's process is gone, and nothing of it lands after `fenced_s`; None: its other ranks may write until its lease
        ends."""
        if writer in self._contacts and writer not in self._dead:
            self._dead.add(writer)
            if fenced_s is not None:
                self._silence.hasten(writer, fenced_s)

    def is_current(self, writer: Life) -> bool:
        """Whether the writer lives and its latest message is recent. Only then may it be granted anything."""
        return writer in self._contacts and writer not in self._dead

    def grant(
        self,
        key: AttemptId,
        writer: Life,
        lease: PageLease,
        prompt_pages: int,
        asked_s: float,
        have_tokens: int = 0,
        variant: Variant = Variant(),  # noqa: B008
    ) -> Send:
        """Open a reservation over `lease`. Returns the message that says where the writer may write; the writer is current.
        have_tokens, variant: see `Grant`."""
        assert key not in self.open, f"{key} is reserved twice"
        assert prompt_pages <= len(lease)
        self._generations += 1
        grant = Grant(
            key=key,
            generation=Generation(self._generations),
            pages=pack_ids(lease.pages[:prompt_pages]),
            sent_s=self._contacts[writer].sent_s,
            write_lease_s=WRITE_LEASE_S,
            have_tokens=have_tokens,
            incarnation=self._incarnation,
            writer=writer.incarnation,
            variant=variant,
        )
        self.open[key] = Reservation(key, writer, grant, lease, prompt_pages, asked_s, have_tokens)
        return Send(writer.id, grant)

    def land(self, sender: InstanceId, handoff: Handoff) -> Reservation | None:
        """The writer is done. Returns the reservation, whose lease is now the caller's; None when the handoff is stale."""
        reservation = self.open.get(handoff.key)
        if reservation is None or reservation.writer.id != sender or reservation.grant.generation != handoff.generation:
            self.stale += 1
            return None
        return self.open.pop(handoff.key)

    def withdraw(self, sender: InstanceId, withdraw: Withdraw) -> Reservation | None:
        """The writer has drained and gives up. Returns the reservation, whose lease the caller closes; None if it is unknown, or
        that of another life of the writer, which may still write."""
        reservation = self.open.get(withdraw.key)
        if (
            reservation is None
            or reservation.writer.id != sender
            or not fits(withdraw.incarnation, reservation.writer.incarnation)
            or withdraw.generation not in (0, reservation.grant.generation)
        ):
            self.stale += 1
            return None
        return self.open.pop(withdraw.key)

    def cancel(self, key: AttemptId, now: float) -> None:
        """The request has ended. Its reservation, if there is one, ends with its writer's next message about it."""
        reservation = self.open.get(key)
        if reservation is not None:
            reservation.cancelled_s = min(reservation.cancelled_s, now)

    def renew(self, sender: InstanceId, renew: Renew, now: float, waits: Callable[[AttemptId], bool]) -> Renewal:
        """A writer lists the handoffs that it holds open. waits: whether a key waits for a reservation here."""
        writer = Life(sender, renew.incarnation)
        if writer in self._dead:  # its last mail; were it alive after all, its lease would end unrenewed
            return Renewal([], [], [], [])
        self.contacted(writer, renew.sent_s, now)
        claims = {claim.key: claim for claim in renew.claims if not claim.moved}
        moved_keys = {claim.key for claim in renew.claims if claim.moved}
        sends: list[Send] = []
        over: list[tuple[AttemptId, Generation]] = []
        stuck: list[Reservation] = []
        for key, claim in claims.items():
            reservation = self.open.get(key)
            if reservation is None or reservation.writer != writer:
                over += [] if waits(key) else [(key, claim.generation)]
            elif claim.stuck:
                reservation.is_stuck = True
                stuck.append(reservation)
            elif reservation.cancelled_s < math.inf:
                over.append((key, reservation.grant.generation))
            elif not claim.generation:
                # The first grant may have been lost; the writer drops a second.
                sends.append(Send(sender, replace(reservation.grant, sent_s=self._contacts[writer].sent_s)))
        gone = [r for r in self.open.values() if r.writer == writer and r.asked_s < renew.sent_s and r.key not in claims]
        for reservation in gone:
            del self.open[reservation.key]
        moved = [reservation for reservation in gone if reservation.key in moved_keys]
        lost = [reservation for reservation in gone if reservation.key not in moved_keys]
        answer = Renewed(
            sent_s=renew.sent_s,
            write_lease_s=WRITE_LEASE_S,
            over=tuple(key for key, _ in over),
            generations=tuple(generation for _, generation in over),
            incarnation=self._incarnation,
            writer=writer.incarnation,
        )
        return Renewal([Send(sender, answer), *sends], moved, lost, stuck)

    def fenced(self, now: float) -> list[Reservation]:
        """Remove and return the reservations of writers that have been silent so long that, by their own clock, they have stopped
        writing, or that have been dead for long enough."""
        fenced: list[Reservation] = []
        for writer in self._silence.expired(now):
            del self._contacts[writer]
            self._dead.discard(writer)
            fenced += [reservation for reservation in self.open.values() if reservation.writer == writer]
        for reservation in fenced:
            del self.open[reservation.key]
        return fenced

    def next_deadline(self) -> float | None:
        return self._silence.next_deadline()

    def lost_pages(self, page_size: int) -> int:
        """Pages that do not come home while their writers live, which say that they cannot release them. Hits are shared, and so
        not lost to others."""
        held = (reservation for reservation in self.open.values() if reservation.is_stuck)
        return sum(len(reservation.lease) - reservation.have_tokens // page_size for reservation in held)

    def is_quarantined(self, key: AttemptId, now: float) -> bool:
        """Whether it is stuck, and nobody knows for how long: that of a dead writer comes home, and speaks of no failure here."""
        return self.is_stuck(key, now) and self.open[key].writer not in self._dead

    def is_stuck(self, key: AttemptId, now: float) -> bool:
        """Whether the reservation has waited unusually long for its writer: it was cancelled, or the writer fell silent, longer
        than a write lease ago. Or the writer says that it cannot release it."""
        reservation = self.open.get(key)
        if reservation is None:
            return False
        waited_s = now - min(self._contacts[reservation.writer].arrived_s, reservation.cancelled_s)
        return reservation.is_stuck or waited_s > WRITE_LEASE_S


def corrupt_pages(sent: bytes, landed: bytes) -> int:
    """How many pages that landed differ from those that were sent. Digests are the executor's (`Executor.digest_pages`): CRC-32,
    little-endian uint32. A digest that is missing on either side counts as a difference."""
    pages = max(len(sent), len(landed)) // 4
    ours, theirs = (np.frombuffer(digests[: len(digests) // 4 * 4], dtype="<u4") for digests in (landed, sent))
    common = min(len(ours), len(theirs))
    return pages - int((ours[:common] == theirs[:common]).sum())
