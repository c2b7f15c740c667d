"""Pushes in slices: what the backends share whose links write one slice of runs at a time.

Owns tickets, the slices that have not been written, and the link that carries them. Knows no library: a `PushLink` writes a slice
and reports the result through a future. Each link begins its slices in order and has only a few under way, so closing a link
leaves little to wait for.
"""

from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import msgspec

from common.errors import TransferError
from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.transport import AgentLost, Connected, ConnectFailed, RunsDone, RunsFailed, TransportEvent, slice_runs


class SliceFailed(TransferError):
    """A slice was not written."""

    def __init__(self, reason: str, quiescent: bool, loses_link: bool = True) -> None:
        super().__init__(reason)
        self.quiescent = quiescent
        """No byte of the slice will land any more."""
        self.loses_link = loses_link
        """The link is unusable too."""


class PushLink(Protocol):
    """A connection to the pool of one agent."""

    @property
    def detail(self) -> str:
        """What kind of link the library chose, for people."""

    @property
    def ready(self) -> "Future[None] | None":
        """Ends when the connection is made, or with TransferError; None where it is made at once."""

    def write(self, runs: Int64Array) -> Future[None]:
        """Begin to write one slice; may block until it is written. The future ends with None once every byte is visible at the
        target, or with SliceFailed."""

    def close(self) -> None:
        """No slice follows. The slices that were begun still run to their end. An attempt to connect is given up."""


@dataclass(slots=True, eq=False)
class _Pushing:
    """A ticket that has not ended."""

    ticket: Ticket
    slices: deque[Int64Array]
    """Those that were not begun."""
    under_way: int = 0
    """How many slices were begun and have not ended."""
    failure: str | None = None
    """Why no further slice is begun."""
    quiescent: bool = True

    def stop(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.slices.clear()


@dataclass(slots=True, eq=False)
class _Lane:
    """One link and the pushes that it carries."""

    pool: PoolDescriptor
    link: PushLink
    pushings: deque[_Pushing] = field(default_factory=deque)
    under_way: list[tuple[_Pushing, Future[None]]] = field(default_factory=list)


class SlicedTransport(ABC):
    """Implements `kv_transfer.transport.Transport` but for `register`, over the links that a backend makes.

    slice_bytes, slice_runs: the largest slice. window: how many slices a link has under way at once.
    """

    library: ClassVar[str]
    """The name of what moves the bytes, for people."""

    def __init__(self, slice_bytes: int, slice_runs: int, window: int) -> None:
        self._slice_bytes, self._slice_runs, self._window = slice_bytes, slice_runs, window
        self._region: MemoryRegion | None = None
        """The pool that is pushed from; `register` sets it."""
        self._lanes: dict[str, _Lane] = {}
        self._connecting: dict[str, _Lane] = {}
        """Lanes whose links are not ready."""
        self._leaving: list[_Lane] = []
        """Closed lanes with slices under way."""
        self._events: list[TransportEvent] = []

    @property
    def region(self) -> MemoryRegion:
        """The pool that is pushed from."""
        assert self._region is not None, "register comes first"
        return self._region

    @abstractmethod
    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        """Register the pool's memory, as `Transport.register` says, and keep the region."""

    @abstractmethod
    def link_to(self, pool: PoolDescriptor) -> PushLink:
        """Make a link; waits for no peer. Raises TransferError or msgspec.DecodeError when there can be none."""

    def connect(self, pool: PoolDescriptor) -> None:
        if pool.agent in self._lanes:
            self._events.append(Connected(pool.agent, self._lanes[pool.agent].link.detail))
        elif pool.agent not in self._connecting:
            try:
                self._connecting[pool.agent] = _Lane(pool, self.link_to(pool))
            except (TransferError, msgspec.DecodeError) as error:
                self._cannot_connect(pool.agent, error)

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        lane = self._lanes.get(agent)
        if lane is None:
            self._events.append(RunsFailed(ticket, f"no link to {agent}", quiescent=True))
            return
        ends = runs[:, :2] + runs[:, 2:]
        if (runs < 0).any() or (ends > (self.region.region_bytes, lane.pool.pool_bytes)).any():
            self._events.append(RunsFailed(ticket, "a run is outside of its pool", quiescent=True))
            return
        most = self._slice_runs
        groups = slice_runs(runs, self._slice_bytes)
        slices = deque(group[at : at + most] for group in groups for at in range(0, len(group), most))
        lane.pushings.append(_Pushing(ticket, slices))

    def begin(self, agent: str) -> None:
        """Begin as many slices to this agent as the window allows. `poll` does so for all of them; a backend whose writes are
        short does so after a push, which then waits for no poll."""
        lane = self._lanes.get(agent)
        if lane is None:
            return
        self._follow(lane)
        for pushing in lane.pushings:
            while pushing.slices:
                if len(lane.under_way) == self._window:
                    return
                pushing.under_way += 1
                lane.under_way.append((pushing, lane.link.write(pushing.slices.popleft())))

    def poll(self) -> list[TransportEvent]:
        self._take_connected()
        for agent, lane in list(self._lanes.items()):
            self.begin(agent)
            self._follow(lane)  # a link may write within the call
        for lane in self._leaving:
            self._follow(lane)
        self._leaving = [lane for lane in self._leaving if lane.pushings]
        events, self._events = self._events, []
        return events

    def close(self, agent: str | None = None) -> None:
        for name in [name for name in self._connecting if agent in (None, name)]:
            self._connecting.pop(name).link.close()
        self._events = [
            event for event in self._events if not (isinstance(event, Connected | ConnectFailed) and agent in (None, event.agent))
        ]
        for name in [name for name in self._lanes if agent in (None, name)]:
            self._leave(self._lanes[name], "the link was closed")

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _take_connected(self) -> None:
        """Take in the links that are ready, and those that will never be."""
        for agent, lane in list(self._connecting.items()):
            ready = lane.link.ready
            if ready is not None and not ready.done():
                continue
            del self._connecting[agent]
            try:
                if ready is not None:
                    ready.result()
            except TransferError as error:
                lane.link.close()
                self._cannot_connect(agent, error)
            else:
                self._lanes[agent] = lane
                self._events.append(Connected(agent, lane.link.detail))

    def _cannot_connect(self, agent: str, error: Exception) -> None:
        self._events.append(ConnectFailed(agent, f"{self.library} could not connect to {agent}: {error}"))

    def _follow(self, lane: _Lane) -> None:
        """Take in the slices that have ended, and report the tickets that have none left."""
        if not lane.pushings:
            return
        followed, lane.under_way = lane.under_way, []
        for pushing, future in followed:
            if not future.done():
                lane.under_way.append((pushing, future))
                continue
            pushing.under_way -= 1
            try:
                future.result()
            except SliceFailed as failed:
                self._failed(lane, pushing, failed)
        for pushing in [pushing for pushing in lane.pushings if not pushing.slices and not pushing.under_way]:
            lane.pushings.remove(pushing)
            if pushing.failure is None:
                self._events.append(RunsDone(pushing.ticket))
            else:
                self._events.append(RunsFailed(pushing.ticket, pushing.failure, pushing.quiescent))

    def _failed(self, lane: _Lane, pushing: _Pushing, failed: SliceFailed) -> None:
        pushing.stop(str(failed))
        pushing.quiescent = pushing.quiescent and failed.quiescent
        lost = self._lanes.get(lane.pool.agent)
        if failed.loses_link and lost is not None and lost.link is lane.link:  # also a link that was closed and is used again
            self._events.append(AgentLost(lane.pool.agent, str(failed)))
            self._leave(lost, f"the link was lost: {failed}")

    def _leave(self, lane: _Lane, reason: str) -> None:
        """Begin nothing more on this lane."""
        del self._lanes[lane.pool.agent]
        self._leaving.append(lane)
        for pushing in lane.pushings:
            pushing.stop(reason)
        lane.link.close()
