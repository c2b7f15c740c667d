"""The worker of an instance: joins mail, scheduler, executor and transfers.

Owns the steps in flight. Decides nothing: the scheduler does. Opens no socket and reads no clock but through its ports, so
the same code runs as a process and on a hand-turned clock.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from common.deadlines import DeadlineWheel
from common.engine.executor import Executor, StepHandle
from common.ids import DETOKENIZER, InstanceId
from common.instance.membership import Membership
from common.instance.ports import Action, LinkChanged, Mail, Push, Scheduler, Send, Transfers
from common.messages import Counters, LinkInfo, LinkState, Peers, Refused, Welcome

STEPS_IN_FLIGHT = 2
"""Step k + 1 is launched before the tokens of step k are read."""

ROUTE_MEMORY_S = 60.0
"""How long a peer that left is still written to: longer than a push to it takes to end."""

M = TypeVar("M")


class InstanceWorker(Generic[M]):
    """One instance. M is the union of messages that its scheduler takes; Welcome and Refused are the membership's.

    pushes: whether this instance writes into its peers' pages (and so needs links to them).
    """

    def __init__(
        self,
        membership: Membership,
        scheduler: Scheduler[M],
        executor: Executor,
        transfers: Transfers,
        mail: Mail[M | Welcome | Refused],
        pushes: bool,
    ) -> None:
        self._membership = membership
        self._scheduler = scheduler
        self._executor = executor
        self._transfers = transfers
        self._mail = mail
        self._pushes = pushes
        self._in_flight: deque[StepHandle] = deque()
        self._links: dict[InstanceId, LinkInfo] = {}
        self._former: DeadlineWheel[InstanceId] = DeadlineWheel()
        self._detokenizer = ""

    def turn(self, now: float) -> None:
        """Take in everything that happened, act on it, and keep the executor busy."""
        scheduler = self._scheduler
        for sender, message in self._mail.receive():
            if isinstance(message, Welcome | Refused):
                self._learn_detokenizer(self._membership.receive(message))
                continue
            if isinstance(message, Peers):
                self._meet(message, now)
            self._act(scheduler.receive(sender, message, now))
        for event in self._transfers.poll():
            if isinstance(event, LinkChanged):
                self._links[event.link.peer] = event.link
                self._membership.hurry(now)
            self._act(scheduler.transfer_event(event, now))
        while self._in_flight and (result := self._in_flight[0].poll()) is not None:
            self._in_flight.popleft()
            self._act(scheduler.step_done(result, now))
        for gone in self._former.expired(now):
            self._mail.route(gone, None)
        self._act(scheduler.tick(now))
        self._launch(now)
        self._transfers.expect(scheduler.open_reservations)
        if now >= self._membership.next_at:
            self._act(self._membership.due(now, scheduler.load(), self._counters(), tuple(self._links.values())))

    def next_at(self) -> float:
        """When the next turn is due even if nothing happens before."""
        step_ends = self._in_flight[0].ends_s if self._in_flight else None
        known = (self._scheduler.next_deadline(), self._former.next_at(), step_ends, self._membership.next_at)
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

    def _launch(self, now: float) -> None:
        while len(self._in_flight) < STEPS_IN_FLIGHT:
            decision = self._scheduler.decide(now)
            self._act(decision.actions)
            if decision.plan is None:
                return
            self._in_flight.append(self._executor.launch(decision.plan))

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._mail.send(action.to, action.message)
                case Push():
                    self._transfers.push(action)

    def _counters(self) -> Counters:
        refused, lost = sum(self._mail.frames_refused.values()), sum(self._mail.messages_lost.values())
        return msgspec.structs.replace(self._scheduler.counters(), frames_refused=refused, messages_lost=lost)

    def _learn_detokenizer(self, address: str | None) -> None:
        if address is not None and address != self._detokenizer:
            self._detokenizer = address
            self._mail.route(DETOKENIZER, address)

    def _meet(self, peers: Peers, now: float) -> None:
        """The set of peers is new: learn their addresses, and link to them if we write to them.

        The address of a peer that left is kept for a while: it may only have been silent, and wait for our word about its pages.
        """
        ids = {peer.id for peer in peers.instances}
        for gone in [id for id in self._links if id not in ids]:
            del self._links[gone]
            self._former.set(gone, now + ROUTE_MEMORY_S)
        for peer in peers.instances:
            self._former.clear(peer.id)
            self._mail.route(peer.id, peer.inbox)
            known = self._links.get(peer.id)
            if known is None or known.incarnation != peer.incarnation:
                state: LinkState = "connecting" if self._pushes else "ready"
                self._links[peer.id] = LinkInfo(peer=peer.id, incarnation=peer.incarnation, state=state)
        if self._pushes:
            self._transfers.connect(peers.instances)
        self._membership.hurry(now)


Clock = Callable[[], float]
Wait = Callable[[float], None]


def run(worker: InstanceWorker[M], wait: Wait, clock: Clock, should_stop: Callable[[], bool]) -> None:
    """Turn the worker until told to stop. wait: blocks for at most so many seconds, less when something is ready.

    However it ends, the router is told, so that nobody waits for a heartbeat that will not come.
    """
    try:
        while not should_stop():
            worker.turn(clock())
            wait(max(0.0, worker.next_at() - clock()))
    finally:
        worker.leave()
