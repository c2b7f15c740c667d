"""The transfer loop: pushes over one transport, driven by commands and time, and the thread that runs it.

Owns tickets, the write leases that they need, and how often the transport is polled; the links are in `kv_transfer/links.py`. The
loop implements `common.instance.ports.Transfers` when a test calls `step`, and reads no clock but the one it was given. In a
process one thread makes every call to the transport. Knows no requests.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from common.deadlines import DeadlineWheel, earliest
from common.errors import TransferError
from common.ids import AttemptId, Int64Array, Ticket
from common.messages import PoolDescriptor
from common.messages.transfers import (
    Allow,
    Connect,
    Expect,
    Push,
    PushDone,
    PushFailed,
    Settle,
    Settled,
    TransferCommand,
    TransferEvent,
)
from common.pages.layout import KVLayout, MemoryRegion
from kv_transfer.handoff_reader import OVERRUN_S
from kv_transfer.links import Link, LinkProbe, Links
from kv_transfer.planner import PageSlice, check_pages, plan_runs
from kv_transfer.transport import AgentLost, Connected, ConnectFailed, RunsDone, RunsFailed, Transport

SETTLE_POLLS = 16
"""After this many polls, everything that had arrived before is in memory: emptying a receive buffer takes a few."""


@dataclass(slots=True, eq=False)
class _PostedPush:
    """A push that has not ended."""

    link: Link
    push_bytes: int
    began: float
    runs: int
    probe: LinkProbe | None = None
    """The measurement that it belongs to; such a push needs no lease: it writes a spare page."""


class LeaseOverrun(TransferError):
    """A write is in flight long after its lease ended, so this process was stopped. It must end before the write goes on."""


class TransferLoop:
    """One transport, its links and its pushes. measures: see `Links`. first_head: see `PoolDescriptor`."""

    def __init__(
        self,
        transport: Transport,
        backend: str,
        region: MemoryRegion,
        layout: KVLayout,
        total_pages: int,
        clock: Callable[[], float],
        measures: bool = False,
        first_head: int = 0,
    ) -> None:
        self._transport = transport
        self._clock = clock
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
            first_head=first_head,
        )
        self._commands: deque[TransferCommand] = deque()
        self._events: deque[TransferEvent] = deque()
        self._links = Links(transport, self.descriptor, clock, measures, self._events.append)
        self._in_flight: dict[Ticket, _PostedPush] = {}
        self._leases: DeadlineWheel[Link] = DeadlineWheel()
        self._settling: deque[tuple[int, AttemptId]] = deque()
        """Each key with the number of the poll after which it is settled."""
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
        """Close the transport; what is still in flight fails. Idempotent."""
        if not self._closed:
            self._closed = True
            self._transport.close()
            for ticket in list(self._in_flight):
                self._ended(RunsFailed(ticket, "the transfers were closed", quiescent=False))

    # --- the loop ----------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether progress must be driven often."""
        return bool(self._commands or self._in_flight or self._settling or self._links.measuring or self._distant)

    @property
    def expecting(self) -> bool:
        """Whether peers write to us, or are to answer us. Some transports need our help for that."""
        return self._expected > 0 or self._links.connecting

    @property
    def idle(self) -> bool:
        return not (self._commands or self._in_flight)

    def next_deadline(self) -> float | None:
        """The next deadline of a link or a lease. Transfers in flight or expected need `step` more often than that."""
        return earliest(self._leases.next_deadline(), self._links.next_deadline())

    def step(self) -> bool:
        """Carry out commands, drive the transport, and collect what happened. True when `poll` has events.

        Leases come first: nothing is posted or driven under a lease that has ended. Raises LeaseOverrun.
        """
        while self._commands:
            self._check_leases()
            command = self._commands.popleft()
            match command:
                case Connect():
                    self._links.reconcile(command.peers, command.left)
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
        self._links.open_waiting()
        self._check_leases()  # any of that may have taken long
        self._drive()
        now = self._clock()
        self._links.tick(now)
        while (link := self._links.next_to_measure(now)) is not None:
            self._measure(link)
        self._progress_s = min((flight.link.progress_s for flight in self._in_flight.values()), default=now)
        return bool(self._events)

    def _check_leases(self) -> None:
        """Close a link whose lease has ended with pushes in flight, so that no further slice is posted.

        Pushes that outlive their link are still watched. A renewal that waits behind a command that took long has come in time.
        """
        now = self._clock()
        ends_s = self._leases.next_deadline()
        if ends_s is not None and ends_s <= now:
            for command in self._commands.copy():
                if isinstance(command, Allow):
                    self._allow(command)
        for link in self._leases.expired(now):
            if not any(flight.link is link and flight.probe is None for flight in self._in_flight.values()):
                continue
            if now >= link.until_s + OVERRUN_S:
                late_s = now - link.until_s
                raise LeaseOverrun(
                    f"a push to {link.info.id} was in flight {late_s:.0f} s after its lease had ended: was this process stopped?"
                )
            if link.state == "ready":
                self._links.cut(link, "the lease ended: it does not answer")
            self._leases.set(link, link.until_s + OVERRUN_S)

    def _allow(self, allow: Allow) -> None:
        link = self._links.find(allow.peer, allow.incarnation)
        if link is not None and allow.until_s > link.until_s:
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
                case Connected():
                    self._links.connected(event.agent, event.detail)
                case ConnectFailed():
                    self._links.refused(event.agent, event.reason)
                case AgentLost():
                    self._links.lose(event.agent, event.reason)
                case _:
                    assert_never(event)

    # --- pushing -------------------------------------------------------------------------------------------------------------

    def _begin(self, push: Push) -> None:
        link = self._links.find(push.peer, push.incarnation)
        try:
            if link is None or link.state != "ready":
                raise TransferError(f"there is no link to {push.peer}")
            if self._clock() >= link.until_s:
                raise TransferError(f"the lease to write to {push.peer} has ended")
            check_pages(push.source_pages, self.descriptor.total_pages, "our")
            check_pages(push.target_pages, link.pool.total_pages, f"{push.peer}'s")
            ours, theirs = PageSlice.of(self.descriptor), PageSlice.of(link.pool)
            runs = plan_runs(push.source_pages, push.target_pages, ours, theirs, push.layers)
        except TransferError as error:
            self._events.append(PushFailed(push.ticket, str(error), quiescent=True, begun=False))
            return
        self._push(push.ticket, link, runs)

    def _measure(self, link: Link) -> None:
        """Begin the next write of the link's measurement."""
        assert link.probe is not None
        self._probes += 1
        self._push(Ticket(-self._probes), link, link.probe.next_runs(), link.probe)

    def _push(self, ticket: Ticket, link: Link, runs: Int64Array, probe: LinkProbe | None = None) -> None:
        push_bytes = int(runs[:, 2].sum())
        self._in_flight[ticket] = _PostedPush(link, push_bytes, self._clock(), len(runs), probe)
        self._links.moved(link, push_bytes)
        self._transport.push(ticket, link.pool.agent, runs)

    def _ended(self, event: RunsDone | RunsFailed) -> None:
        flight = self._in_flight.pop(event.ticket)
        self._links.moved(flight.link, -flight.push_bytes)
        seconds = self._clock() - flight.began
        if flight.probe is not None:
            failure = event.reason if isinstance(event, RunsFailed) else None
            if self._links.probed(flight.link, flight.probe, failure, flight.push_bytes, seconds):
                self._measure(flight.link)
        elif isinstance(event, RunsFailed):
            self._events.append(PushFailed(event.ticket, event.reason, event.quiescent))
        else:
            self._events.append(PushDone(event.ticket, flight.push_bytes, seconds, flight.runs))


# NIXL offers nothing to wait on, and each poll takes processor time from computing. So the pause between polls has three lengths.
BUSY_S = 100e-6
"""The pause while we push, or while other hosts push to us (over TCP, our polls set their pace)."""
EXPECT_S = 1e-3
"""The pause while peers on this host write to us, which hardly needs our help."""
IDLE_S = 0.2
"""The pause otherwise; peers connect meanwhile."""
DRAIN_S = 5.0


class TransferThread:
    """Implements `common.instance.ports.Transfers`. make_loop runs on the thread, and wake is called there when `poll` has
    events."""

    def __init__(self, make_loop: Callable[[], TransferLoop], wake: Callable[[], None]) -> None:
        self._make_loop = make_loop
        self._wake = wake
        self._loop: TransferLoop | None = None
        self._failure: Exception | None = None
        self._started = threading.Event()
        self._kick = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    def start(self, timeout_s: float) -> PoolDescriptor:
        """Start the thread and the transport on it. Raises TransferError with the reason."""
        self._thread.start()
        if not self._started.wait(timeout_s):
            raise TransferError(f"the transport did not start within {timeout_s:g} s")
        return self._running().descriptor

    def submit(self, command: TransferCommand) -> None:
        self._running().submit(command)
        self._kick.set()

    @property
    def progress_s(self) -> float:
        return self._running().progress_s

    def poll(self) -> list[TransferEvent]:
        return self._running().poll()

    def close(self) -> None:
        self._stopping = True
        self._kick.set()
        if self._thread.is_alive():
            self._thread.join(DRAIN_S + 2.0)

    def _running(self) -> TransferLoop:
        """The loop. Raises TransferError when the thread has failed or not started."""
        if self._failure is not None:
            raise TransferError(f"the transfer thread failed: {self._failure}") from self._failure
        if self._loop is None:
            raise TransferError("the transfer thread is not running")
        return self._loop

    def _run(self) -> None:
        try:
            self._loop = self._make_loop()
            self._started.set()
            self._turn(self._loop)
        except Exception as error:  # noqa: BLE001 - the thread's outermost door; the next call of the port raises it
            self._failure = error
        finally:
            self._started.set()
            self._wake()

    def _turn(self, loop: TransferLoop) -> None:
        drain_until: float | None = None
        while True:
            if loop.step():
                self._wake()
            now = time.monotonic()
            if self._stopping:
                drain_until = drain_until or now + DRAIN_S
                if loop.idle or now >= drain_until:
                    break
            self._kick.wait(_pace(loop))
            self._kick.clear()
        loop.close()


def _pace(loop: TransferLoop) -> float:
    """Seconds until progress is driven again."""
    if loop.active:
        return BUSY_S
    return EXPECT_S if loop.expecting else IDLE_S
