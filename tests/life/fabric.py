"""The fabric of a simulation: one-sided writes that take time, fail, stall, and land late.

Owns every write that is under way, and holds each against the ledgers: a write must find its source and target page in the
hands in which they were when it was posted. Knows no messages.

    posted ──► at the target's host ──► in its memory          (at once, or when the target's transport polls)
       └─ the transport gives up: failed, proven (no more comes) or not (it may come until GIVE_UP_S after it was posted)
"""

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from common.ids import InstanceId, Int64Array
from common.pages.layout import MemoryRegion
from kv_transfer.transport import TransportEvent
from simulation.clock import NEVER, Clock
from tests.engine.toy import ToyExecutor
from tests.kv_transfer.memory import MemoryNetwork, MemoryTransport, Write
from tests.life.ledger import Ledger
from tests.life.schedule import Rough
from tests.life.weather import Storm

PAGE_BYTES = ToyExecutor(1, 1).description.layout.page_bytes
WINDOW = 4
"""Slices that a link has under way at once, as many as over NIXL."""
GIVE_UP_S = 10.0
"""A transport gives up a write that makes no progress for so long; whatever is under way has landed by then, or never will."""
ORPHANS_S = 0.9
"""On one host, what a process had given to its kernel when it died arrives within this time, if it does."""
CALM_WRITE_S = 0.002
POLLS_TO_DRAIN = 4
"""Each poll of a target takes in this part of its receive buffer: the whole is in memory after a few."""


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What becomes of a write. seconds: until its bytes are at the target's host, or until it fails. failure: why it does.
    proven: whether a failure proves that nothing (more) will land. by_hand: it moves only when its writer polls."""

    seconds: float
    failure: str | None = None
    proven: bool = True
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Tides:
    """What becomes of writes, by their chances; from `Storm.ends_s` on they fare well."""

    random: Random
    rough: Rough
    storm: Storm

    def fate(self, now: float) -> Fate:
        draw, rough = self.random.random, self.rough
        by_hand = draw() < rough.by_hand
        if now >= self.storm.ends_s:
            return Fate(seconds=CALM_WRITE_S, by_hand=by_hand)
        seconds = 12.0 * draw() ** 2 if draw() < rough.slow else CALM_WRITE_S * (0.2 + 4.0 * draw())
        failure = "cable" if draw() < rough.fails else None
        return Fate(seconds=seconds, failure=failure, proven=draw() >= rough.unproven, by_hand=by_hand)


@dataclass(slots=True, eq=False)
class Host:
    """An agent's place in the fabric: a rank of instance `id`, with its part of every page. died_s: when its process ended.
    is_quiet: it has said that no write from or to it is under way. buffer: what came for it and waits for its polls."""

    id: InstanceId
    ledger: Ledger
    page_bytes: int
    died_s: float = NEVER
    is_quiet: bool = False
    buffer: deque[Callable[[], None]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Flight:
    """A write under way. read, written: its source and target pages, each with its tenancy when the write was posted."""

    write: Write
    fate: Fate
    writer: Host
    reader: Host
    posted_s: float
    read: dict[int, int]
    written: dict[int, int]
    has_moved: bool = False

    @property
    def due_s(self) -> float:
        return self.posted_s + self.fate.seconds


class Fabric(MemoryNetwork):
    """A slice is as large as a page that no ranks share.

    one_host: of all instances. buffered: what arrives is in memory only when its transport polls, as over TCP.

    failed: called with the writer and the reader of a write that fails. problems: writes that read or wrote a page which had
    changed hands. unproven: writes that failed without proof that they have ended.
    """

    def __init__(
        self,
        clock: Clock,
        tides: Tides,
        random: Random,
        buffered: bool,
        failed: Callable[[InstanceId, InstanceId], None],
        one_host: bool = False,
    ) -> None:
        super().__init__(slice_bytes=PAGE_BYTES, window=WINDOW)
        self._clock = clock
        self._tides = tides
        self._random = random
        self._buffered = buffered
        self._failed = failed
        self._one_host = one_host
        self._flights: dict[str, list[Flight]] = {}
        self.hosts: dict[str, Host] = {}
        self.problems: list[str] = []
        self.unproven: list[Flight] = []

    def carry(self, write: Write) -> None:
        writer, reader = self.hosts[write.writer], self.hosts[write.reader]
        read, written = _pages(writer, write.runs[:, 0]), _pages(reader, write.runs[:, 1])
        flight = Flight(write, self._tides.fate(self._clock.now), writer, reader, self._clock.now, read, written)
        self._flights.setdefault(write.writer, []).append(flight)
        if not flight.fate.by_hand:
            self._clock.at(flight.due_s, lambda: self._move(flight))
            self._clock.at(flight.posted_s + GIVE_UP_S, lambda: self._give_up(flight))

    def poll(self, agent: str) -> None:
        """The transport of this agent drives progress: of its own writes, and of what came for it."""
        if agent in self._flights:
            self._flights[agent] = [flight for flight in self._flights[agent] if not flight.write.landed.done()]
            for flight in self._flights[agent]:
                self._drive(flight)
        buffer = self.hosts[agent].buffer
        for _ in range(-(-len(buffer) // POLLS_TO_DRAIN)):
            buffer.popleft()()

    def died(self, agent: str, noticed_after_s: float) -> None:
        """The process of this agent is gone: what is under way to it fails when that is noticed, and nothing lands."""
        self.hosts[agent].died_s = self._clock.now
        self._clock.at(self._clock.now + noticed_after_s, lambda: self._notice(agent))

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _drive(self, flight: Flight) -> None:
        """By hand: it moves now at the earliest, however long its process was stopped, unless something else is in its way."""
        now = self._clock.now
        if flight.fate.by_hand and flight.due_s <= now:
            self._move(flight)
            if flight.posted_s + GIVE_UP_S <= now:
                self._give_up(flight)

    def _move(self, flight: Flight) -> None:
        """Bring the write to its target's host, or let it fail there, if nothing is in its way."""
        now = self._clock.now
        if flight.write.landed.done() or flight.has_moved or flight.reader.died_s <= now:
            return
        passes_s = self._tides.storm.cut_until(flight.writer.id, flight.reader.id, now)
        if passes_s > now:
            if not flight.fate.by_hand:
                self._clock.at(passes_s, lambda: self._move(flight))
            return
        flight.has_moved = True
        if flight.fate.failure is None:
            self._deliver(flight)
            return
        self._fail(flight, flight.fate.failure, flight.fate.proven)
        if not flight.fate.proven:
            late_s = self._random.uniform(now, max(now, flight.posted_s + GIVE_UP_S))
            self._clock.at(late_s, lambda: self._deliver(flight))

    def _deliver(self, flight: Flight) -> None:
        """The bytes are read now, and written when the reader takes them in; then the write is done, if it has not failed."""
        write = flight.write
        self._check_quiet(flight)
        if self._one_host and self._clock.now > flight.writer.died_s + ORPHANS_S:
            return
        if flight.writer.died_s == NEVER:
            self._check("read", flight.writer, flight.read)
        payloads = [
            (write.target.address + target, ctypes.string_at(write.source.address + source, run_bytes))
            for source, target, run_bytes in write.runs.tolist()
        ]

        def take_in() -> None:
            self._check_quiet(flight)
            if flight.reader.died_s <= self._clock.now:
                return
            self._check("wrote", flight.reader, flight.written)
            for address, payload in payloads:
                ctypes.memmove(address, payload, len(payload))
            if not write.landed.done():
                write.landed.set_result(None)

        if self._buffered:
            flight.reader.buffer.append(take_in)
        else:
            take_in()

    def _check_quiet(self, flight: Flight) -> None:
        """What moves now had ended, by the word of both."""
        for host in (flight.writer, flight.reader):
            if host.is_quiet:
                self.problems.append(
                    f"{self._clock.now:.3f}: a write {flight.writer.id} -> {flight.reader.id} after {host.id} was quiet"
                )

    def _check(self, did: str, host: Host, tenancies: dict[int, int]) -> None:
        for page in (page for page, tenancy in tenancies.items() if host.ledger.tenancy(page) != tenancy):
            self.problems.append(f"{self._clock.now:.3f}: a write {did} page {page} of {host.id}, which had changed hands")

    def _give_up(self, flight: Flight) -> None:
        if not flight.write.landed.done():  # what has moved waits in the reader's buffer, and nobody can prove that it does not
            self._fail(flight, "it makes no progress", proven=flight.fate.proven and not flight.has_moved)

    def _notice(self, agent: str) -> None:
        self.regions.pop(agent, None)
        for flights in self._flights.values():
            for flight in flights:
                if flight.write.reader == agent and not flight.write.landed.done():
                    flight.write.fail("the agent died", quiescent=True)

    def _fail(self, flight: Flight, reason: str, proven: bool) -> None:
        flight.write.fail(reason, proven)
        self._failed(flight.writer.id, flight.reader.id)
        if not proven:
            self.unproven.append(flight)


def _pages(host: Host, offsets: Int64Array) -> dict[int, int]:
    """The pages at these offsets, each with its present tenancy."""
    return {page: host.ledger.tenancy(page) for page in dict.fromkeys((offsets // host.page_bytes).tolist())}


class FabricTransport(MemoryTransport):
    """A transport over the fabric: its polls drive it."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self._fabric = fabric
        self._agent = ""

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        self._agent, wire = super().register(region)
        return self._agent, wire

    def poll(self) -> list[TransportEvent]:
        self._fabric.poll(self._agent)
        return super().poll()
