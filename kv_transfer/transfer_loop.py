"""The transfer loop: pushes and links over one transport, fed with commands and time.

Owns links, tickets and their deadlines. Implements `common.instance.ports.Transfers` when driven by hand (`step`); in a process
it runs on a thread of its own (`kv_transfer/transfer_thread.py`). Reads no clock but the one it was given. Knows no requests.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from common.deadlines import DeadlineWheel
from common.errors import TransferError
from common.ids import InstanceId, Key, Ticket
from common.instance.ports import (
    Allow,
    Connect,
    Expect,
    LinkChanged,
    Push,
    PushDone,
    PushFailed,
    Settle,
    Settled,
    TransferCommand,
    TransferEvent,
)
from common.messages import InstanceInfo, LinkInfo, LinkState, PoolDescriptor
from common.pages.layout import KVLayout, MemoryRegion
from kv_transfer.link_speed import LinkProbe, slowness
from kv_transfer.planner import PageSlice, check_pages, check_pool, mismatch, plan_runs
from kv_transfer.transport import AgentLost, RunsDone, RunsFailed, Transport
from kv_transfer.write_lease import OVERRUN_S

STALL_S = 10.0
SLOWEST_BYTES_PER_S = 10 * 2**20
"""A link on which no push completes for longer than STALL_S, and than what is in flight on it takes at this rate, is lost."""
SETTLE_POLLS = 16
"""After so many polls, what had arrived before is in memory: a receive buffer takes a few."""
RETRY_S, RETRY_MOST_S = 5.0, 60.0
"""A lost link is tried again, after twice the time each time: a dead peer has left the fleet by then."""
TURN_S = 1.0
"""Links are measured one after the other, but none waits longer than this for the one before."""


@dataclass(slots=True, eq=False)
class _Link:
    """bytes_in_flight, progress_s: of pushes since the link last came up, and when one of them last began or ended.

    until_s: when the lease ends under which its pushes are written. library: what the transport calls it. probe: its measurement.
    """

    info: InstanceInfo
    state: LinkState
    detail: str = ""
    bytes_in_flight: int = 0
    progress_s: float = 0.0
    retry_s: float = RETRY_S
    until_s: float = -math.inf
    library: str = ""
    probe: LinkProbe | None = None


@dataclass(slots=True, eq=False)
class _InFlight:
    """probe: the measurement to which it belongs, which needs no lease: nobody is given the page."""

    link: _Link
    push_bytes: int
    began: float
    runs: int
    probe: LinkProbe | None = None


class LeaseOverrun(TransferError):
    """A write is in flight long after its lease ended: this process was stopped. It must end before the write goes on."""


class TransferLoop:
    """One transport, its links and its pushes. measures: a link that comes up is measured before it is ready, where both pools
    have a spare page."""

    def __init__(
        self,
        transport: Transport,
        backend: str,
        region: MemoryRegion,
        layout: KVLayout,
        total_pages: int,
        clock: Callable[[], float],
        measures: bool = False,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._measures = measures
        agent, wire = transport.register(region)
        self.descriptor = PoolDescriptor(
            backend=backend,
            agent=agent,
            address=region.address,
            total_pages=total_pages,
            device=region.device,
            layout=layout,
            wire=wire,
            spare_pages=region.region_bytes // layout.page_bytes - total_pages,
        )
        self._commands: deque[TransferCommand] = deque()
        self._events: deque[TransferEvent] = deque()
        self._links: dict[InstanceId, _Link] = {}
        self._in_flight: dict[Ticket, _InFlight] = {}
        self._stalls: DeadlineWheel[InstanceId] = DeadlineWheel()
        self._retries: DeadlineWheel[InstanceId] = DeadlineWheel()
        self._leases: DeadlineWheel[_Link] = DeadlineWheel()
        self._settling: deque[tuple[int, Key]] = deque()
        """Keys, and the number of the poll after which each is settled."""
        self._unmeasured: deque[_Link] = deque()
        self._turn_ends_s = -math.inf
        self._probes = 0
        self._polls = 0
        self._expected = 0
        self._distant = False
        self._closed = False
        self._progress_s = clock()

    # --- the port: may be called from another thread than `step`; a deque's ends are safe to share -----------------------------

    def submit(self, command: TransferCommand) -> None:
        self._commands.append(command)

    @property
    def progress_s(self) -> float:
        return self._progress_s

    def poll(self) -> list[TransferEvent]:
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """End what is in flight as the transport can, and close it. Idempotent."""
        if not self._closed:
            self._closed = True
            self._transport.close()
            for ticket in list(self._in_flight):
                self._ended(RunsFailed(ticket, "the transfers were closed", quiescent=False))

    # --- the loop ----------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether progress must be driven often."""
        return bool(self._commands or self._in_flight or self._settling or self._unmeasured or self._distant)

    @property
    def expecting(self) -> bool:
        """Whether peers write to us, for which some transports need our help."""
        return self._expected > 0

    @property
    def idle(self) -> bool:
        return not (self._commands or self._in_flight)

    def next_deadline(self) -> float | None:
        """When a deadline of a link passes; what is in flight or expected moves on before."""
        wheels = (self._leases.next_deadline(), self._stalls.next_deadline(), self._retries.next_deadline())
        return min((at for at in wheels if at is not None), default=None)

    def step(self) -> bool:
        """Carry out commands, drive the transport, pass on what happened. True when there is news to poll.

        Leases come first: nothing is posted or driven under one that has ended. Raises LeaseOverrun.
        """
        while self._commands:
            self._check_leases()
            self._carry_out(self._commands.popleft())
        self._check_leases()  # a command may have taken its time
        self._drive()
        now = self._clock()
        for peer in self._stalls.expired(now):
            self._stalled(self._links[peer])
        for peer in self._retries.expired(now):
            self._open(self._links[peer])
        while self._unmeasured and now >= self._turn_ends_s:
            self._measure(self._unmeasured.popleft())
        self._progress_s = min((flight.link.progress_s for flight in self._in_flight.values()), default=now)
        return bool(self._events)

    def _carry_out(self, command: TransferCommand) -> None:
        match command:
            case Connect():
                self._reconcile(command.peers)
            case Push():
                self._begin(command)
            case Allow():
                self._allow(command)
            case Settle():
                self._settling.append((self._polls + SETTLE_POLLS, command.key))
            case Expect():
                self._expected, self._distant = command.writes, command.distant and command.writes > 0
            case _:
                assert_never(command)

    def _check_leases(self) -> None:
        """A lease that has ended with pushes in flight closes its link, so that no further slice is posted.

        So does the end of the link itself, but what is in flight by then is watched on.
        """
        now = self._clock()
        for link in self._leases.expired(now):
            if not any(flight.link is link and flight.probe is None for flight in self._in_flight.values()):
                continue
            if now >= link.until_s + OVERRUN_S:
                late_s = now - link.until_s
                raise LeaseOverrun(
                    f"a push to {link.info.id} was in flight {late_s:.0f} s after its lease had ended: was this process stopped?"
                )
            if link.state == "ready":
                self._transport.close(link.info.pool.agent)
                self._lose(link, "the lease ended: it does not answer")
            self._leases.set(link, link.until_s + OVERRUN_S)

    def _allow(self, allow: Allow) -> None:
        link = self._links.get(allow.peer)
        if link is not None and link.info.incarnation == allow.incarnation and allow.until_s > link.until_s:
            link.until_s = allow.until_s
            self._leases.set(link, allow.until_s)

    def _drive(self) -> None:
        events = self._transport.poll()
        self._polls += 1
        while self._settling and self._settling[0][0] <= self._polls:
            self._events.append(Settled(self._settling.popleft()[1]))
        for event in events:
            match event:
                case RunsDone() | RunsFailed():
                    self._ended(event)
                case AgentLost():
                    self._agent_lost(event)
                case _:
                    assert_never(event)

    def _reconcile(self, peers: tuple[InstanceInfo, ...]) -> None:
        wanted = {peer.id: peer for peer in peers}
        for link in list(self._links.values()):
            peer = wanted.get(link.info.id)
            if peer is None or peer.incarnation != link.info.incarnation:
                del self._links[link.info.id]
                self._stalls.clear(link.info.id)
                self._retries.clear(link.info.id)
                self._transport.close(link.info.pool.agent)
                link.state, link.probe = "lost", None
        for peer in peers:
            if peer.id not in self._links:
                self._links[peer.id] = _Link(peer, "connecting")
                self._open(self._links[peer.id])

    def _open(self, link: _Link) -> None:
        pool = link.info.pool
        try:
            if pool.backend != self.descriptor.backend:
                raise TransferError(f"it uses {pool.backend} and we use {self.descriptor.backend}")
            difference = mismatch(self.descriptor.layout, pool.layout)
            if difference is not None:
                raise TransferError(f"its KV layout differs: {difference}")
            check_pool(pool)
            link.library = self._transport.connect(pool)
        except TransferError as error:
            self._lose(link, str(error))
            return
        link.bytes_in_flight = 0
        if self._measures and pool.spare_pages and self.descriptor.spare_pages:
            link.probe = LinkProbe(self.descriptor, pool)
        if link.probe is not None and not link.probe.done:
            if link not in self._unmeasured:
                self._unmeasured.append(link)
            self._set(link, "connecting", f"{link.library}: measuring")
        else:
            link.probe, link.retry_s = None, RETRY_S
            self._set(link, "ready", link.library)

    def _lose(self, link: _Link, reason: str) -> None:
        """Pushes on the link end by their own events; new ones are refused until it is up again."""
        self._stalls.clear(link.info.id)
        link.probe = None
        self._retries.set(link.info.id, self._clock() + link.retry_s)
        link.retry_s = min(2 * link.retry_s, RETRY_MOST_S)
        self._set(link, "lost", reason)

    def _set(
        self,
        link: _Link,
        state: LinkState,
        detail: str,
        bytes_per_s: float | None = None,
        host_bytes_per_s: float | None = None,
        warning: str = "",
    ) -> None:
        if (link.state, link.detail) == (state, detail):
            return
        link.state, link.detail = state, detail
        info = LinkInfo(
            peer=link.info.id,
            incarnation=link.info.incarnation,
            state=state,
            detail=detail,
            bytes_per_s=bytes_per_s,
            host_bytes_per_s=host_bytes_per_s,
            warning=warning,
        )
        self._events.append(LinkChanged(info))

    # --- measuring -----------------------------------------------------------------------------------------------------------

    def _measure(self, link: _Link) -> None:
        """Its turn has come, if it is still there."""
        if link.probe is not None:
            self._turn_ends_s = self._clock() + TURN_S
            self._probe(link, link.probe)

    def _probe(self, link: _Link, probe: LinkProbe) -> None:
        """The next write of a measurement."""
        runs = probe.next_runs()
        self._probes += 1
        ticket, probe_bytes = Ticket(-self._probes), int(runs[:, 2].sum())
        self._in_flight[ticket] = _InFlight(link, probe_bytes, self._clock(), len(runs), probe)
        self._moved(link, probe_bytes)
        self._transport.push(ticket, link.info.pool.agent, runs)

    def _probed(self, flight: _InFlight, probe: LinkProbe, event: RunsDone | RunsFailed) -> None:
        """A write of a measurement has ended: the next one, or the link is ready."""
        link = flight.link
        if link.probe is not probe:
            return  # the link was lost, or closed, since
        if isinstance(event, RunsFailed):
            self._transport.close(link.info.pool.agent)
            self._lose(link, f"it could not be measured: {event.reason}")
        else:
            probe.took(flight.push_bytes, self._clock() - flight.began)
            if not probe.done:
                self._probe(link, probe)
                return
            link.probe, link.retry_s = None, RETRY_S
            wire = probe.wire()
            carrier, host_bytes_per_s = probe.carrier(wire), probe.host_bytes_per_s(wire)
            warning = slowness(probe.bytes_per_s, host_bytes_per_s, carrier)
            self._set(link, "ready", f"{link.library}: {carrier}", probe.bytes_per_s, host_bytes_per_s, warning)
        self._turn_ends_s = -math.inf

    # --- pushing -------------------------------------------------------------------------------------------------------------

    def _begin(self, push: Push) -> None:
        link = self._links.get(push.peer)
        try:
            if link is None or link.info.incarnation != push.incarnation or link.state != "ready":
                raise TransferError(f"there is no link to {push.peer}")
            if self._clock() >= link.until_s:
                raise TransferError(f"the lease to write to {push.peer} has ended")
            check_pages(push.source_pages, self.descriptor.total_pages, "our")
            check_pages(push.target_pages, link.info.pool.total_pages, f"{push.peer}'s")
            ours, theirs = PageSlice(self.descriptor.layout), PageSlice(link.info.pool.layout)
            runs = plan_runs(push.source_pages, push.target_pages, ours, theirs, push.layers)
        except TransferError as error:
            self._events.append(PushFailed(push.ticket, str(error), quiescent=True, begun=False))
            return
        push_bytes = int(runs[:, 2].sum())
        self._in_flight[push.ticket] = _InFlight(link, push_bytes, self._clock(), len(runs))
        self._moved(link, push_bytes)
        self._transport.push(push.ticket, link.info.pool.agent, runs)

    def _moved(self, link: _Link, push_bytes: int) -> None:
        """A push began (bytes above 0) or ended (below) on the link. A link that was lost since then is not watched."""
        if link.state == "lost":
            return
        if push_bytes < 0 or not link.bytes_in_flight:
            link.progress_s = self._clock()
        link.bytes_in_flight = max(0, link.bytes_in_flight + push_bytes)
        if link.bytes_in_flight:
            self._stalls.set(link.info.id, link.progress_s + STALL_S + link.bytes_in_flight / SLOWEST_BYTES_PER_S)
        else:
            self._stalls.clear(link.info.id)

    def _ended(self, event: RunsDone | RunsFailed) -> None:
        flight = self._in_flight.pop(event.ticket)
        self._moved(flight.link, -flight.push_bytes)
        if flight.probe is not None:
            self._probed(flight, flight.probe, event)
            return
        match event:
            case RunsDone():
                self._events.append(PushDone(event.ticket, flight.push_bytes, self._clock() - flight.began, flight.runs))
            case RunsFailed():
                self._events.append(PushFailed(event.ticket, event.reason, event.quiescent))

    def _stalled(self, link: _Link) -> None:
        """Nothing is proven about the pushes under way: they end when the transport says so."""
        self._transport.close(link.info.pool.agent)
        self._lose(link, f"no push completed for {self._clock() - link.progress_s:.0f} s")

    def _agent_lost(self, lost: AgentLost) -> None:
        for link in self._links.values():
            if link.info.pool.agent == lost.agent:
                self._lose(link, lost.reason)
