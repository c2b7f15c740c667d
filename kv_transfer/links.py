"""The links of a transfer loop: made, measured, lost and made again.

Owns each link's state, its measurement, and the deadlines by which a link without progress is lost and a lost one is tried again.
Knows neither pages nor tickets: `kv_transfer/transfer_loop.py` pushes over the links and reports what moved.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.deadlines import DeadlineWheel, earliest
from common.errors import TransferError
from common.ids import Incarnation, InstanceId
from common.instance.ports import LinkChanged
from common.messages import InstanceInfo, LinkInfo, LinkState, PoolDescriptor
from kv_transfer.link_speed import LinkProbe, slowness
from kv_transfer.planner import PageSlice, check_pool, mismatch, shared_heads
from kv_transfer.transport import Transport

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
    """bytes_in_flight, progress_s: of pushes since the link last came up, and when one of them last began or ended.

    until_s: when the write lease ends that its pushes need. library: what the transport calls it. probe: its measurement.
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
    pool: PoolDescriptor = field(init=False)

    def __post_init__(self) -> None:
        self.pool = self.info.pools[0]


class Links:
    """The links from one pool to the pools of peers. ours: the pool. changed: called when a link's state changes. measures: a new
    link is measured before it is ready, where both pools have a spare page."""

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
        self._stalls: DeadlineWheel[InstanceId] = DeadlineWheel()
        self._retries: DeadlineWheel[InstanceId] = DeadlineWheel()
        self._attempts: DeadlineWheel[InstanceId] = DeadlineWheel()
        self._connecting: dict[str, Link] = {}
        """Links whose attempt to connect is under way, by the agent."""
        self._new: deque[Link] = deque()
        self._again: deque[Link] = deque()
        """Links to open: those of peers that joined, and those that were lost before, which may fail again and so come later."""
        self._opens_s = -math.inf
        """Not before this time."""
        self._unmeasured: deque[Link] = deque()
        self._turn_ends_s = -math.inf

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
        return earliest(self._stalls.next_deadline(), self._retries.next_deadline(), self._attempts.next_deadline(), opens_s)

    def tick(self, now: float) -> None:
        """Lose the links without progress, and give up attempts without a result."""
        for peer in self._attempts.expired(now):
            self._lose(self._links[peer], f"it did not answer within {ATTEMPT_S:g} s")
        for peer in self._stalls.expired(now):
            link = self._links[peer]
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
            self._stalls.clear(peer)
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
            self._stalls.set(link.info.id, link.progress_s + STALL_S + link.bytes_in_flight / SLOWEST_BYTES_PER_S)
        else:
            self._stalls.clear(link.info.id)

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
            carrier, host_bytes_per_s = probe.carrier(wire), probe.host_bytes_per_s(wire)
            warning = slowness(probe.bytes_per_s, host_bytes_per_s, carrier)
            self._set(link, "ready", f"{link.library}: {carrier}", probe.bytes_per_s, host_bytes_per_s, warning)
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
            self._attempts.clear(link.info.id)
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
        self._attempts.set(link.info.id, self._clock() + ATTEMPT_S)
        self._transport.connect(pool)

    def _lose(self, link: Link, reason: str) -> None:
        """Its pushes end by their own events. New pushes are refused until the link is up again."""
        self._stalls.clear(link.info.id)
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
        self._changed(LinkChanged(info))
