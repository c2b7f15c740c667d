"""The receiving end of the handoff: reservations, which are pages leased for KV that is on its way.

Owns the leases and their generations. Knows messages and pages. Does not know tokens (what they mean), models, sockets or time.

    grant ──► RESERVED ──Handoff(generation)──► landed: the lease passes to the caller
                 ├──────Withdraw──────────────► lease closed
                 └──────cancel───► CANCELLED ── Handoff | Withdraw ──► lease closed

A cancelled reservation keeps its pages until the writer says that it has drained: a write may still be under way.
"""

from dataclasses import dataclass

from common.ids import Generation, Incarnation, InstanceId, Int32Array, Key, pack_ids
from common.instance.ports import Send
from common.messages import Grant, Handoff
from common.pages.pool import Lease


@dataclass(slots=True, eq=False)
class Reservation:
    """prompt_pages of the lease await KV; the rest is room for the answer. source, incarnation: the writer."""

    key: Key
    source: InstanceId
    incarnation: Incarnation
    generation: Generation
    lease: Lease
    prompt_pages: int
    have_tokens: int = 0
    cancelled: bool = False


class HandoffTarget:
    """All reservations of one decode instance."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Reservation] = {}
        self._generations = 0
        self.stale = 0
        """Messages that belong to no reservation: dropped and counted."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def grant(self, key: Key, source: InstanceId, incarnation: Incarnation, lease: Lease, prompt_pages: int) -> Send:
        """Open a reservation over `lease` and tell `source` where to write."""
        assert key not in self._by_key, f"{key} is reserved twice"
        assert prompt_pages <= len(lease)
        self._generations += 1
        reservation = Reservation(key, source, incarnation, Generation(self._generations), lease, prompt_pages)
        self._by_key[key] = reservation
        pages: Int32Array = lease.pages[:prompt_pages]
        return Send(source, Grant(key=key, generation=reservation.generation, pages=pack_ids(pages)))

    def land(self, sender: InstanceId, handoff: Handoff) -> Reservation | None:
        """The writer is done: the reservation, whose lease is the caller's from now on; None when the handoff is stale."""
        reservation = self._by_key.get(handoff.key)
        if reservation is None or reservation.source != sender or reservation.generation != handoff.generation:
            self.stale += 1
            return None
        return self._by_key.pop(handoff.key)

    def withdraw(self, sender: InstanceId, key: Key) -> Reservation | None:
        """The writer has drained and gives up: the reservation, whose lease the caller closes; None when it is unknown."""
        reservation = self._by_key.get(key)
        if reservation is None or reservation.source != sender:
            self.stale += 1
            return None
        return self._by_key.pop(key)

    def cancel(self, key: Key) -> bool:
        """The request has ended. True when a reservation will now end by its writer's next word."""
        reservation = self._by_key.get(key)
        if reservation is None:
            return False
        reservation.cancelled = True
        return True

    def of(self, source: InstanceId) -> list[Reservation]:
        """The open reservations of one writer."""
        return [reservation for reservation in self._by_key.values() if reservation.source == source]

    def fence(self, key: Key) -> Reservation | None:
        """The writer is proven unable to write (its process is gone, the margin has passed): the reservation, if open."""
        return self._by_key.pop(key, None)
