"""Reservations: what a decode instance does when a writer lands, withdraws or renews, or falls silent.

Owns the counters of handoffs, the checks of what landed, and how many writes of peers are expected. Knows the requests and their
one door. Does not know plans or steps.
"""

from collections.abc import Callable

from common.addresses import on_one_host
from common.errors import InstanceFailed, Unavailable
from common.executor import EngineDescription
from common.ids import AttemptId, InstanceId, Life
from common.instance.ports import Action, PeersChanged
from common.instance.request import RequestPhase
from common.instance.requests import RequestTable
from common.messages import Failed, Handoff, InstanceInfo, Renew, Reserve, Withdraw
from common.messages.base import fits
from common.messages.transfers import Expect, Settle
from decode.requests import DecodeRequest
from kv_transfer.handoff_reader import MARGIN_S, ORPHANED_S, DigestPages, HandoffReader, Reservation, corrupt_pages

MEASURED_S = 2.0
"""A new peer may write to us this long although no reservation is open: it measures the link, and some transports need both ends
to make progress."""


class Reservations:
    """The reservations of one decode instance, whose generations and writers `HandoffReader` keeps."""

    def __init__(
        self,
        me: InstanceInfo,
        engine: EngineDescription,
        requests: RequestTable[DecodeRequest],
        target: HandoffReader,
        decode: Callable[[DecodeRequest, int], None],
        digest: DigestPages | None,
    ) -> None:
        """decode: the KV of a request is here, and this is its first token. digest: with --verify-pages, what the pages that
        landed are compared with."""
        self._inbox = me.inbox
        self._hosts = {rank.host for rank in me.ranks}
        self._engine = engine
        self._page_bytes = me.page_bytes
        """The bytes of a page on all ranks together."""
        self._requests = requests
        self._target = target
        self._decode = decode
        self._digest = digest
        self._expected = Expect(0)
        self._measured_by_s = 0.0
        self._distant: set[InstanceId] = set()
        """Writers on other hosts."""

    # --- writers and their writes ------------------------------------------------------------------------------------------

    def meet(self, change: PeersChanged, now: float) -> list[Action]:
        """Other writers. Those that left get no reservation any more; the ones that they have end when they say so or are silent
        for too long."""
        if change.joined:
            self._measured_by_s = now + MEASURED_S
        self._distant.difference_update(change.left, (peer.id for peer in change.joined))
        self._distant.update(peer.id for peer in change.joined if self._is_distant(peer))
        return self._requests.meet(change, now)

    def bury(self, peer: InstanceInfo, now: float) -> list[Action]:
        """A writer's process is gone; `kv_transfer/handoff_reader.py` says what that proves. Its other ranks, if it has any, may
        still write: an instance of several ranks is fenced by its silence."""
        writer = Life(peer.id, peer.incarnation)
        fenced_s: float | None = None
        if len(peer.ranks) <= 1:
            is_near = on_one_host(peer.inbox, self._inbox) and not self._is_distant(peer)
            fenced_s = now + (ORPHANED_S if is_near and all(pool.device == "cpu" for pool in peer.pools) else MARGIN_S)
        self._target.writer_died(writer, fenced_s)
        waiting = [request for request in self._requests.waiting if request.peer == writer]
        return [action for request in waiting for action in self._requests.end(request, None, now)]

    def _is_distant(self, peer: InstanceInfo) -> bool:
        return any(rank.host not in self._hosts for rank in peer.ranks)

    def expect(self, now: float) -> list[Action]:
        """How many writes of peers are expected, if that has changed."""
        writes = len(self._target.open) + (now < self._measured_by_s)
        expected = Expect(writes, distant=writes > 0 and bool(self._distant))
        if expected == self._expected:
            return []
        self._expected = expected
        return [expected]

    # --- the way of a reservation ------------------------------------------------------------------------------------------

    def grant(self, request: DecodeRequest, writer: Life, now: float) -> list[Action]:
        """The request has pages and a row: tell its writer where to write."""
        assert request.lease is not None and isinstance(request.asked, Reserve)
        if not self._target.is_current(writer):
            return self._requests.end(request, Failed.of(Unavailable(f"{writer.id} fell silent")), now)
        request.phase, request.in_transfer, request.times.granted_s = RequestPhase.RESERVED, True, now
        layout, sent_s = self._engine.layout, request.asked.sent_s
        pages, have_tokens = layout.pages_for(len(request.prompt)), len(request.hit) * layout.page_size
        variant = request.keys.variant
        return [self._target.grant(request.key, writer, request.lease, pages, sent_s, have_tokens, variant)]

    def land(self, sender: InstanceId, handoff: Handoff, now: float) -> list[Action]:
        """The KV is here: the request joins the next step."""
        reservation = self._target.land(sender, handoff)
        if reservation is None:
            return []
        request = self._requests[reservation.key]
        objection = self._find_objection(handoff, reservation)
        if objection is not None:
            request.next_token += 1  # the writer has sent the first token, whatever it was
            failed = Failed.of(InstanceFailed(f"invalid handoff from {sender}: {objection}"))
            return self._close(reservation, failed, now)
        times, counters, page_size = request.times, self._requests.counters, self._engine.layout.page_size
        times.handed_off_s, times.pages_pushed = now, handoff.pushed_pages
        times.pages_had = reservation.have_tokens // page_size
        request.add_sent_token(handoff.first_token, handoff.first_logprob)
        counters.handoffs += 1
        counters.pages_received += handoff.pushed_pages
        counters.bytes_received += handoff.pushed_bytes
        request.in_transfer = False
        # No step has its pages yet: what others have computed meanwhile takes their place.
        reservation.lease.publish(request.keys, len(request.prompt) // page_size, replaces=True)
        if request.phase is RequestPhase.ENDED:
            pending = request.pending_failure
            told = [] if pending is None else self._requests.tell(request, pending)
            self._requests.release(request, now)
            return [*told]
        self._decode(request, handoff.first_token)
        return []

    def _find_objection(self, handoff: Handoff, reservation: Reservation) -> str | None:
        """The first thing in which a handoff does not fit its reservation, and so cannot be decoded from. Pages are compared if
        there are digests; the router sees to it that the writer sends them then."""
        if not handoff.variant.meets(reservation.grant.variant):
            return "its KV is of other weights"
        have = reservation.have_tokens // self._engine.layout.page_size
        pages = reservation.prompt_pages - have
        if handoff.pushed_pages != pages or handoff.pushed_bytes != pages * self._page_bytes:
            return f"{handoff.pushed_pages} pages and {handoff.pushed_bytes} bytes were pushed for {pages} pages"
        if not 0 <= handoff.first_token < self._engine.model.vocab_size:
            return f"its first token {handoff.first_token} is not in the vocabulary"
        if self._digest is not None:
            landed = self._digest(reservation.lease.pages[have : reservation.prompt_pages])
            corrupt = corrupt_pages(handoff.digests, landed)
            self._requests.counters.pages_corrupt += corrupt
            if corrupt:
                return f"{corrupt} of {pages} pages differ from what was sent"
        return None

    def withdraw(self, sender: InstanceId, message: Withdraw, now: float) -> list[Action]:
        """The writer gives up, and tells the client why if the client is to know."""
        request = self._requests.get(message.key)
        if request is not None and request.phase is RequestPhase.WAITING and request.peer is not None:
            is_its = request.peer.id == sender and fits(message.incarnation, request.peer.incarnation)
            return self._requests.end(request, None, now) if is_its else []
        reservation = self._target.withdraw(sender, message)
        if reservation is None:
            return []
        self._requests[message.key].pending_failure = None
        return self._close(reservation, None, now)

    def renew(self, sender: InstanceId, message: Renew, now: float) -> list[Action]:
        """A writer says what it holds open. Everything else of it is over, whatever messages were lost."""
        writer = Life(sender, message.incarnation)
        waiting = [request for request in self._requests.waiting if request.peer == writer]
        waiting_keys = {request.key for request in waiting}
        renewal = self._target.renew(sender, message, now, lambda key: key in waiting_keys)
        actions: list[Action] = list(renewal.sends)
        for reservation in renewal.moved:
            self._requests[reservation.key].pending_failure = None
            actions += self._close(reservation, None, now)
        for reservation in renewal.lost:
            self._requests.counters.handoffs_lost += 1
            lost = Failed.of(InstanceFailed(f"the handoff from {sender} was lost"))
            actions += self._close(reservation, lost, now)
        for reservation in renewal.stuck:
            actions += self._requests.end(self._requests[reservation.key], None, now)
        claimed = {claim.key for claim in message.claims if not claim.moved}
        for request in waiting:
            assert isinstance(request.asked, Reserve)
            if request.key not in claimed and request.asked.sent_s < message.sent_s:
                actions += self._requests.end(request, None, now)
        return actions

    def fence(self, now: float) -> list[Action]:
        """End the reservations of writers that have been silent for so long that they cannot write any more."""
        actions: list[Action] = []
        for reservation in self._target.fenced(now):
            silent = Failed.of(Unavailable(f"{reservation.writer.id} fell silent during the handoff"))
            actions += self._close(reservation, silent, now)
        return actions

    def settled(self, key: AttemptId, now: float) -> None:
        """Everything that had arrived for a closed reservation is in memory, so its pages can be given away."""
        request = self._requests.get(key)
        if request is not None and request.in_transfer and key not in self._target.open:
            request.in_transfer = False
            self._requests.release(request, now)

    def _close(self, reservation: Reservation, failed: Failed | None, now: float) -> list[Action]:
        """No write for this reservation is or will be under way, and it was not handed off. failed: what the client is told, if
        nobody else tells it. The pages come home when everything that had arrived for them is in memory."""
        request = self._requests[reservation.key]
        pending_failure = request.pending_failure or (failed if request.phase is not RequestPhase.ENDED else None)
        actions: list[Action] = [Settle(request.key)]
        if pending_failure is not None:
            actions += self._requests.tell(request, pending_failure)
        return actions + self._requests.end(request, None, now)
