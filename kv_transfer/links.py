"""The links of a transfer loop: made, measured, lost and made again.

Owns each link's state, the measurement of its speed and of what carries it, and the deadlines by which a link without progress is
lost and a lost one is tried again. Knows neither pages nor tickets: `kv_transfer/transfer_loop.py` pushes over the links and
reports what moved.

A link is measured when it comes up, by writing into the spare page of the peer's pool. The counters of this host's network
devices (`/proc/net/dev`, `/sys/class/net`, `/sys/class/infiniband`) show which device a library really uses, whatever it was told
to use.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from common.deadlines import DeadlineWheel, earliest
from common.errors import TransferError
from common.ids import Incarnation, InstanceId, Int64Array
from common.messages import InstanceInfo, LinkInfo, LinkState, PoolDescriptor
from common.messages.transfers import LinkChanged
from kv_transfer.planner import PageSlice, check_pool, mismatch, plan_runs, shared_heads
from kv_transfer.transport import Transport

RDMA = "RDMA"
TCP = "TCP"
LOOPBACK_DEVICE = "lo"
_WORD_BYTES = 4
"""InfiniBand counts words (Linux, Documentation/ABI/stable/sysfs-class-infiniband: port_xmit_data)."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A network device of this host."""

    kind: str
    """RDMA or TCP."""
    name: str
    """The name of the device, with its port for RDMA."""

    def __str__(self) -> str:
        return f"{self.kind} over {self.name}"


def bytes_sent(root: Path = Path("/")) -> dict[Wire, int]:
    """How many bytes each device has sent since it came up. Devices without counters are left out."""
    sent: dict[Wire, int] = {}
    for name, words in _devices(root / "proc/self/net/dev"):
        sent[Wire(TCP, name)] = int(words[8])
    for port in _ports(root):
        with suppress(OSError, ValueError):
            words_sent = int((port / "counters/port_xmit_data").read_text())
            sent[Wire(RDMA, f"{port.parent.parent.name}:{port.name}")] = _WORD_BYTES * words_sent
    return sent


def busiest(before: Mapping[Wire, int], after: Mapping[Wire, int], pushed_bytes: int) -> Wire | None:
    """The wire that carried this many bytes between the two counts. RDMA comes first, because no other device counts its bytes.
    None: memory carried them, or a device without counters."""
    carried = {wire: sent - before.get(wire, 0) for wire, sent in after.items()}
    candidates = (wire for wire, sent in carried.items() if sent >= pushed_bytes)
    return max(candidates, key=lambda wire: (wire.kind == RDMA, carried[wire]), default=None)


def fastest_bytes_per_s(root: Path = Path("/")) -> float | None:
    """The fastest wire to other hosts that is up and reports its speed (a virtual device reports none)."""
    speeds = [speed for port in _ports(root) if (speed := _rdma_speed(port)) is not None]
    for name, _ in _devices(root / "proc/self/net/dev"):
        with suppress(OSError, ValueError):
            megabits = int((root / "sys/class/net" / name / "speed").read_text())
            if name != LOOPBACK_DEVICE and megabits > 0:
                speeds.append(megabits * 1e6 / 8)
    return max(speeds, default=None)


def _devices(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The name and the columns of each network device. The file begins with two heading lines."""
    with suppress(OSError):
        for line in path.read_text().splitlines()[2:]:
            name, _, columns = line.partition(":")
            yield name.strip(), columns.split()


def _ports(root: Path) -> list[Path]:
    return sorted((root / "sys/class/infiniband").glob("*/ports/*"))


def _rdma_speed(port: Path) -> float | None:
    """ "400 Gb/sec (4X NDR)" in bytes per second, of a port that is active."""
    try:
        if "ACTIVE" not in (port / "state").read_text():
            return None
        return float((port / "rate").read_text().split()[0]) * 1e9 / 8
    except (OSError, ValueError, IndexError):
        return None


FIRST_BYTES, MOST_BYTES = 2**20, 16 * 2**20
MOST_RUNS = 4096
PROBES = 5
"""Writes per measurement. The first one only brings the link up, because libraries connect on first use. Of the others the
fastest counts: another program may slow some of them down."""
SHORT_S = 0.01
"""A shorter write says little, so the next one is larger."""
SLOW_SHARE = 0.2
"""A link slower than this share of what the host can do is not on the path that it should be on."""
COPIED_BYTES = 64 * 2**20
GB = 1e9


class LinkProbe:
    """The measurement of one link, from the pool `ours` to the pool `theirs`. Both have a spare page."""

    def __init__(self, ours: PoolDescriptor, theirs: PoolDescriptor) -> None:
        source, target = (np.array([pool.total_pages], dtype=np.int32) for pool in (ours, theirs))
        self._page = plan_runs(source, target, PageSlice.of(ours), PageSlice.of(theirs))
        self._page_bytes = int(self._page[:, 2].sum())
        self._on_devices = ours.device != "cpu" and theirs.device != "cpu"
        self._wanted_bytes = FIRST_BYTES
        self._probes = self._counted_bytes = 0
        self._sent: Mapping[Wire, int] = {}
        self.bytes_per_s: float | None = None

    @property
    def done(self) -> bool:
        """True also when there is nothing to write, because the pools have no head in common."""
        return self._probes == PROBES or not self._page_bytes

    def next_runs(self) -> Int64Array:
        """What to write next, [runs, 3] int64 as for `Transport.push`: the spare page, many times over."""
        if self._probes == 1:
            self._sent = bytes_sent()
        pages = min(-(-self._wanted_bytes // self._page_bytes), MOST_RUNS // len(self._page))
        return np.tile(self._page, (max(1, pages), 1))

    def took(self, probe_bytes: int, seconds: float) -> None:
        """The write succeeded and took this long."""
        self._probes += 1
        if self._probes > 1 and seconds > 0:
            self._counted_bytes += probe_bytes
            self.bytes_per_s = max(self.bytes_per_s or 0.0, probe_bytes / seconds)
        if seconds < SHORT_S:
            self._wanted_bytes = min(4 * self._wanted_bytes, MOST_BYTES)

    def wire(self) -> Wire | None:
        """What carried the writes; None: no network device of this host."""
        return busiest(self._sent, bytes_sent(), self._counted_bytes) if self._counted_bytes else None

    def carrier(self, wire: Wire | None) -> str:
        """The name of the carrier, for people."""
        if wire is not None:
            return str(wire)
        return "GPU memory, NVLink or PCIe" if self._on_devices else "memory"

    def host_bytes_per_s(self, wire: Wire | None) -> float | None:
        """What this host should reach: the speed of a memory copy to a process on this host, the speed of the fastest wire to
        another host. Links between GPUs are faster, unless their bytes go through sockets. None: unknown."""
        if wire is not None and wire.name != LOOPBACK_DEVICE:
            return fastest_bytes_per_s()
        return memory_bytes_per_s()


def slowness(bytes_per_s: float | None, host_bytes_per_s: float | None, carrier: str) -> str:
    """A warning if the link is far slower than the host allows; otherwise empty."""
    if bytes_per_s is None or host_bytes_per_s is None or bytes_per_s >= SLOW_SHARE * host_bytes_per_s:
        return ""
    return f"slow: {bytes_per_s / GB:.2f} GB/s by {carrier}, where this host can do {host_bytes_per_s / GB:.1f}"


@lru_cache(maxsize=1)
def memory_bytes_per_s() -> float:
    """How fast this host copies memory, measured on more than its caches hold."""
    source, target = np.ones(COPIED_BYTES, dtype=np.uint8), np.zeros(COPIED_BYTES, dtype=np.uint8)
    fastest_s = float("inf")
    for _ in range(PROBES):
        began_s = time.perf_counter()
        np.copyto(target, source)
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return COPIED_BYTES / fastest_s


STALL_S = 10.0
SLOWEST_BYTES_PER_S = 10 * 2**20
"""A link is lost when no push completes on it for STALL_S, plus the time that the bytes in flight take at this rate."""
RETRY_S, RETRY_MOST_S = 5.0, 60.0
"""The pause before a lost link is tried again; it doubles each time. A dead peer has left the fleet by then."""
ATTEMPT_S = 20.0
"""An attempt to connect without a result is given up after this."""
ATTEMPTS, AGAIN = 32, 8
"""Most attempts to connect under way at once, and beside how many a lost link is tried again: newcomers always find room."""
QUICK_S = 0.1
"""Beginning an attempt takes a library some milliseconds, in which the transfer thread does nothing else. After this long in
one turn, the others wait for as long as these took: leases, pushes and links get their turn."""
TURN_S = 1.0
"""Links are measured one after the other, but no link waits longer than this for the one before it."""


@dataclass(slots=True, eq=False)
class Link:
    """A link to one life of a peer."""

    info: InstanceInfo
    state: LinkState
    detail: str = ""
    bytes_in_flight: int = 0
    """Bytes of pushes that began since the link last came up and have not ended."""
    progress_s: float = 0.0
    """When one of these pushes last began or ended."""
    retry_s: float = RETRY_S
    until_s: float = -math.inf
    """When the write lease ends that its pushes need."""
    library: str = ""
    """The transport's name for the link."""
    probe: LinkProbe | None = None
    """The measurement of the link while it lasts."""
    pool: PoolDescriptor = field(init=False)

    def __post_init__(self) -> None:
        self.pool = self.info.pools[0]


class Links:
    """The links from the pool `ours` to the pools of peers.

    changed: called when a link's state changes. measures: a new link is measured before it is ready, where both pools have a
    spare page.
    """

    def __init__(
        self,
        transport: Transport,
        ours: PoolDescriptor,
        clock: Callable[[], float],
        measures: bool,
        changed: Callable[[LinkChanged], None],
    ) -> None:
        self._transport, self._ours, self._clock = transport, ours, clock
        self._measures, self._changed = measures, changed
        self._links: dict[InstanceId, Link] = {}
        self._limits: DeadlineWheel[InstanceId] = DeadlineWheel()
        """By when an attempt to connect must have a result, or the link that is up must have made progress."""
        self._retries: DeadlineWheel[InstanceId] = DeadlineWheel()
        self._connecting: dict[str, Link] = {}
        """Links whose attempt to connect is under way, by the agent."""
        self._new: deque[Link] = deque()
        self._again: deque[Link] = deque()
        """Links to open: those of peers that joined, and those that were lost before, which may fail again and so come later."""
        self._opens_s = -math.inf
        """Not before this time."""
        self._unmeasured: deque[Link] = deque()
        self._turn_ends_s = -math.inf
        if measures:
            memory_bytes_per_s()  # now: later an instance that has just become a prefill instance would wait for it

    @property
    def connecting(self) -> bool:
        """Whether an attempt to connect is under way."""
        return bool(self._connecting)

    @property
    def measuring(self) -> bool:
        """Whether a link waits to be measured."""
        return bool(self._unmeasured)

    def find(self, peer: InstanceId, incarnation: Incarnation) -> Link | None:
        """The link to this life of the peer, in whatever state."""
        link = self._links.get(peer)
        return link if link is not None and link.info.incarnation == incarnation else None

    def next_deadline(self) -> float | None:
        opens_s = self._opens_s if self._next_line() else None
        return earliest(self._limits.next_deadline(), self._retries.next_deadline(), opens_s)

    def tick(self, now: float) -> None:
        """Lose the links without progress, and give up attempts without a result."""
        for link in [self._links[peer] for peer in self._limits.expired(now)]:
            if link.pool.agent in self._connecting:
                self._lose(link, f"it did not answer within {ATTEMPT_S:g} s")
            else:
                self.cut(link, f"no push completed for {self._clock() - link.progress_s:.0f} s")

    def open_waiting(self) -> None:
        """Begin to connect to the peers that wait for it, for as long as the turn allows. Lost ones, after a pause."""
        began_s = self._clock()
        for peer in self._retries.expired(began_s):
            self._again.append(self._links[peer])
        while (waiting := self._next_line()) and self._clock() >= self._opens_s:
            link = waiting.popleft()
            if self._links.get(link.info.id) is not link or link.state == "ready":
                continue  # the peer has left meanwhile, or the link is up
            self._retries.clear(link.info.id)
            self._open(link)
            took_s = self._clock() - began_s
            if took_s > QUICK_S:
                self._opens_s = self._clock() + took_s

    def connected(self, agent: str, detail: str) -> None:
        """An attempt has succeeded."""
        link = self._ended(agent)
        if link is None:
            return
        link.library, link.bytes_in_flight = detail, 0
        if self._measures and link.pool.spare_pages and self._ours.spare_pages:
            link.probe = LinkProbe(self._ours, link.pool)
        if link.probe is not None and not link.probe.done:
            if link not in self._unmeasured:
                self._unmeasured.append(link)
            self._set(link, "connecting", f"{link.library}: measuring")
        else:
            link.probe, link.retry_s = None, RETRY_S
            self._set(link, "ready", link.library)

    def refused(self, agent: str, reason: str) -> None:
        """An attempt has failed."""
        link = self._ended(agent)
        if link is not None:
            self._lose(link, reason)

    def reconcile(self, peers: tuple[InstanceInfo, ...], left: tuple[InstanceId, ...]) -> None:
        """Make the links to these peers, in place of those to their former lives, and close those to peers that left."""
        for gone in left:
            self._close(gone)
        for peer in peers:
            if self.find(peer.id, peer.incarnation) is None:
                self._close(peer.id)
                self._links[peer.id] = Link(peer, "connecting")
                self._new.append(self._links[peer.id])

    def _close(self, peer: InstanceId) -> None:
        """Forget the link to the peer, whatever its life, if there is one."""
        link = self._links.pop(peer, None)
        if link is not None:
            self._limits.clear(peer)
            self._retries.clear(peer)
            self._ended(link.pool.agent)
            self._transport.close(link.pool.agent)
            link.state, link.probe = "lost", None

    def lose(self, agent: str, reason: str) -> None:
        """The transport has lost this agent."""
        for link in self._links.values():
            if link.pool.agent == agent:
                self._lose(link, reason)

    def cut(self, link: Link, reason: str) -> None:
        """Close a link that is up, and call it lost. Its pushes end when the transport says so: nothing is proven about them."""
        self._transport.close(link.pool.agent)
        self._lose(link, reason)

    def moved(self, link: Link, push_bytes: int) -> None:
        """A push began (bytes above 0) or ended (below 0) on the link. A lost link is not watched."""
        if link.state == "lost":
            return
        if push_bytes < 0 or not link.bytes_in_flight:
            link.progress_s = self._clock()
        link.bytes_in_flight = max(0, link.bytes_in_flight + push_bytes)
        if link.bytes_in_flight:
            self._limits.set(link.info.id, link.progress_s + STALL_S + link.bytes_in_flight / SLOWEST_BYTES_PER_S)
        else:
            self._limits.clear(link.info.id)

    def next_to_measure(self, now: float) -> Link | None:
        """The link whose turn has come to be measured."""
        while self._unmeasured and now >= self._turn_ends_s:
            link = self._unmeasured.popleft()
            if link.probe is not None:
                self._turn_ends_s = self._clock() + TURN_S
                return link
        return None

    def probed(self, link: Link, probe: LinkProbe, failure: str | None, probe_bytes: int, seconds: float) -> bool:
        """A write of a measurement has ended. True when another is needed; otherwise the link is ready, or lost."""
        if link.probe is not probe:
            return False  # the link was lost or closed since
        if failure is not None:
            self.cut(link, f"it could not be measured: {failure}")
        else:
            probe.took(probe_bytes, seconds)
            if not probe.done:
                return True
            link.probe, link.retry_s = None, RETRY_S
            wire = probe.wire()
            carrier, speed, host_speed = probe.carrier(wire), probe.bytes_per_s, probe.host_bytes_per_s(wire)
            warning = slowness(speed, host_speed, carrier)
            self._set(link, "ready", f"{link.library}: {carrier}", speed, host_speed, warning)
        self._turn_ends_s = -math.inf
        return False

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _next_line(self) -> deque[Link]:
        """Whose turn it is to be connected: empty when nobody waits, or too many attempts are under way."""
        if self._new and len(self._connecting) < ATTEMPTS:
            return self._new
        return self._again if len(self._connecting) < AGAIN else deque()

    def _ended(self, agent: str) -> Link | None:
        """The link whose attempt to connect is over; None if none was under way."""
        link = self._connecting.pop(agent, None)
        if link is not None:
            self._limits.clear(link.info.id)
        return link

    def _open(self, link: Link) -> None:
        pool = link.pool
        try:
            if len(link.info.pools) != 1:
                raise TransferError(f"it has {len(link.info.pools)} ranks, and a link leads to one")
            if pool.backend != self._ours.backend:
                raise TransferError(f"it uses {pool.backend} and we use {self._ours.backend}")
            difference = mismatch(self._ours.layout, pool.layout)
            if difference is not None:
                raise TransferError(f"its KV layout differs: {difference}")
            if not shared_heads(PageSlice.of(self._ours).heads, PageSlice.of(pool).heads):
                raise TransferError("its pages hold other KV heads")
            check_pool(pool)
        except TransferError as error:
            self._lose(link, str(error))
            return
        self._connecting[pool.agent] = link
        self._limits.set(link.info.id, self._clock() + ATTEMPT_S)
        self._transport.connect(pool)

    def _lose(self, link: Link, reason: str) -> None:
        """Its pushes end by their own events. New pushes are refused until the link is up again."""
        self._limits.clear(link.info.id)
        if self._ended(link.pool.agent) is not None:
            self._transport.close(link.pool.agent)  # an attempt to make it again was under way
        link.probe = None
        self._retries.set(link.info.id, self._clock() + link.retry_s)
        link.retry_s = min(2 * link.retry_s, RETRY_MOST_S)
        self._set(link, "lost", reason)

    def _set(
        self,
        link: Link,
        state: LinkState,
        detail: str,
        bytes_per_s: float | None = None,
        host_bytes_per_s: float | None = None,
        warning: str = "",
    ) -> None:
        if (link.state, link.detail) != (state, detail):
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
            self._changed(LinkChanged(info))
