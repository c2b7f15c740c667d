"""The worker of an instance: joins mail, scheduler, executor and transfers.

Owns the steps in flight. Decides nothing: the scheduler does. Opens no socket and reads no clock but through its ports, so
the same code runs as a process and on a hand-turned clock.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, assert_never

import msgspec

from common.deadlines import DeadlineWheel
from common.engine.executor import Executor, StepHandle
from common.engine.plan import Plan
from common.ids import DETOKENIZER, InstanceId
from common.instance.membership import Membership
from common.instance.ports import (
    Action,
    Allow,
    Connect,
    Expect,
    LinkChanged,
    Mail,
    Push,
    Scheduler,
    Send,
    Settle,
    Transfers,
)
from common.messages import Counters, Drain, LinkInfo, LinkState, Peers, Refused, Welcome

STEPS_IN_FLIGHT = 2
"""Step k + 1 is launched before the tokens of step k are read."""

MEASURED_S = 2.0
"""Who meets a peer awaits its writes for so long: links are measured when they come up, and some need both ends for it."""
ROUTE_MEMORY_S = 60.0
"""How long a peer that left is still written to: longer than a push to it takes to end."""

M = TypeVar("M")
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _InFlight:
    """A step that was launched. layers_seen: how many of its layers the scheduler knows to be done."""

    plan: Plan
    handle: StepHandle
    launched_s: float
    layers_seen: int = 0


class InstanceWorker(Generic[M]):
    """One instance. M is the union of messages that its scheduler takes; Welcome, Refused and Drain are the worker's.

    pushes: whether this instance writes into its peers' pages (and so needs links to them).
    """

    def __init__(
        self,
        membership: Membership,
        scheduler: Scheduler[M],
        executor: Executor,
        transfers: Transfers,
        mail: Mail[M | Welcome | Refused | Drain],
        pushes: bool,
    ) -> None:
        self._membership = membership
        self._scheduler = scheduler
        self._executor = executor
        self._transfers = transfers
        self._mail = mail
        self._pushes = pushes
        self._in_flight: deque[_InFlight] = deque()
        self._links: dict[InstanceId, LinkInfo] = {}
        self._former: DeadlineWheel[InstanceId] = DeadlineWheel()
        self._detokenizer: str | None = None
        self._draining = False
        self._expected = 0
        self._measured_by_s = 0.0
        self._has_distant_peers = False

    def turn(self, now: float) -> None:
        """Take in everything that happened, act on it, and keep the executor busy."""
        scheduler = self._scheduler
        for sender, message in self._mail.receive():
            match message:
                case Welcome() | Refused():
                    self._welcomed(message, now)
                case Drain():
                    self.drain(now)
                case _:
                    if isinstance(message, Peers):
                        self._meet(message, now)
                    self._act(scheduler.receive(sender, message, now))
        for event in self._transfers.poll():
            if isinstance(event, LinkChanged):
                self._link_changed(event.link, now)
            self._act(scheduler.transfer_event(event, now))
        self._take_steps(now)
        for gone in self._former.expired(now):
            self._mail.route(gone, None)
        self._act(scheduler.tick(now))
        self._launch(now)
        expected = scheduler.open_reservations + (now < self._measured_by_s)
        if expected != self._expected:
            self._expected = expected
            self._transfers.submit(Expect(expected, distant=self._has_distant_peers))
        if now >= self._membership.next_deadline:
            self._report(now)

    def drain(self, now: float) -> None:
        """Leave in order: nothing new is taken in, what runs is finished or handed off. Idempotent."""
        if not self._draining:
            self._draining = True
            self._act(self._scheduler.drain(now))
            self._membership.hurry(now)

    @property
    def drained(self) -> bool:
        return self._draining and not self._in_flight and self._scheduler.drained

    def next_deadline(self) -> float:
        """When the next turn is due even if nothing happens before."""
        step_ends = self._in_flight[0].handle.ends_s if self._in_flight else None
        known = (self._scheduler.next_deadline(), self._former.next_deadline(), step_ends, self._membership.next_deadline)
        return min(at for at in known if at is not None)

    @property
    def joined(self) -> bool:
        return self._membership.joined

    @property
    def idle(self) -> bool:
        return not self._in_flight

    def leave(self) -> None:
        """Tell the router that this incarnation is gone."""
        goodbye = self._membership.goodbye()
        self._mail.send(goodbye.to, goodbye.message)

    def _take_steps(self, now: float) -> None:
        """What has been computed since the last turn: whole steps, and layers of the one that is under way."""
        while self._in_flight:
            step = self._in_flight[0]
            result = step.handle.poll()
            if result is None:
                layers = step.handle.layers_done
                if layers > step.layers_seen:
                    step.layers_seen = layers
                    self._act(self._scheduler.layers_done(step.plan, layers, now))
                return
            self._in_flight.popleft()
            self._act(self._scheduler.step_done(result, now))

    def _launch(self, now: float) -> None:
        while len(self._in_flight) < STEPS_IN_FLIGHT:
            decision = self._scheduler.decide(now)
            self._act(decision.actions)
            if decision.plan is None:
                return
            self._in_flight.append(_InFlight(decision.plan, self._executor.launch(decision.plan), now))

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._mail.send(action.to, action.message)
                case Push() | Allow() | Settle():
                    self._transfers.submit(action)
                case _:
                    assert_never(action)

    def _report(self, now: float) -> None:
        """Tell the router how we are; a router that does not answer any more has lost its requests."""
        if self._membership.router_lost():
            self._act(self._scheduler.abandon(now))
        step_s = now - self._in_flight[0].launched_s if self._in_flight else 0.0
        transfer_s = max(0.0, now - self._transfers.progress_s)
        load = msgspec.structs.replace(self._scheduler.load(), oldest_step_s=step_s, oldest_transfer_s=transfer_s)
        links = tuple(msgspec.structs.replace(link, traffic=self._scheduler.traffic(link.peer)) for link in self._links.values())
        self._act(self._membership.due(now, load, self._counters(), links, self._draining))

    def _counters(self) -> Counters:
        refused, lost = sum(self._mail.frames_refused.values()), sum(self._mail.messages_lost.values())
        return msgspec.structs.replace(self._scheduler.counters(), frames_refused=refused, messages_lost=lost)

    def _welcomed(self, message: Welcome | Refused, now: float) -> None:
        if self._membership.receive(message):
            self._act(self._scheduler.abandon(now))
        address = self._membership.detokenizer
        if address != self._detokenizer:
            self._detokenizer = address
            self._mail.route(DETOKENIZER, address)

    def _link_changed(self, link: LinkInfo, now: float) -> None:
        """Report it, unless the peer has left or come back as another since."""
        known = self._links.get(link.peer)
        if known is not None and known.incarnation == link.incarnation:
            self._links[link.peer] = link
            self._membership.hurry(now)
            if link.state != "connecting":
                speed = "" if link.bytes_per_s is None else f", {link.bytes_per_s / 1e9:.2f} GB/s"
                _log.info("link to %s %s: %s%s", link.peer, link.state, link.detail, speed)
            if link.warning:
                _log.warning("link to %s is %s", link.peer, link.warning)

    def _meet(self, peers: Peers, now: float) -> None:
        """The set of peers is new: learn their addresses, and link to them if we write to them.

        The address of a peer that left is kept for a while: it may only have been silent, and wait for our word about its pages.
        """
        ids = {peer.id for peer in peers.instances}
        ours = {rank.host for rank in self._membership.info.ranks}
        self._has_distant_peers = any(rank.host not in ours for peer in peers.instances for rank in peer.ranks)
        for gone in [id for id in self._links if id not in ids]:
            del self._links[gone]
            self._former.set(gone, now + ROUTE_MEMORY_S)
        for peer in peers.instances:
            self._former.clear(peer.id)
            self._mail.route(peer.id, peer.inbox)
            known = self._links.get(peer.id)
            if known is None or known.incarnation != peer.incarnation:
                state: LinkState = "connecting" if self._pushes else "ready"
                if not self._pushes:
                    self._measured_by_s = now + MEASURED_S
                self._links[peer.id] = LinkInfo(peer=peer.id, incarnation=peer.incarnation, state=state)
        if self._pushes:
            self._transfers.submit(Connect(peers.instances))
        self._membership.hurry(now)


Clock = Callable[[], float]
Wait = Callable[[float], None]


def run(worker: InstanceWorker[M], wait: Wait, clock: Clock, should_drain: Callable[[], bool]) -> None:
    """Turn the worker until it is told to drain and has drained. wait: blocks for at most so many seconds, less when something
    is ready.

    However it ends, the router is told, so that nobody waits for a heartbeat that will not come.
    """
    try:
        while not worker.drained:
            if should_drain():
                worker.drain(clock())
            worker.turn(clock())
            wait(0.0 if worker.drained else max(0.0, worker.next_deadline() - clock()))
    finally:
        worker.leave()
