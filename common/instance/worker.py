"""The worker of an instance: joins mail, scheduler, executor and transfers.

Owns the steps in flight and the grammars that are being made ready. Decides nothing: the scheduler does. Opens no socket and
reads no clock except through its ports, so the same code runs as a process and on a hand-turned clock.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec

from common.deadlines import DeadlineWheel, earliest
from common.executor import Executor, ExecutorFailed, StepHandle, StepPlan, Work, take_done
from common.ids import ROUTER, AttemptId, Digest, InstanceId, text_name
from common.instance.adapters import InstanceAdapters
from common.instance.cost_meter import CostMeter
from common.instance.membership import Memberships, RouterChange
from common.instance.ports import (
    Action,
    AdaptersChanged,
    AdapterUnused,
    Event,
    FormerRole,
    LayersDone,
    LeaveRole,
    Mail,
    PeerDied,
    PeersChanged,
    Prepare,
    Prepared,
    RouterJoined,
    RouterLost,
    Scheduler,
    Send,
    StayInRole,
    StepsMeasured,
    Transfers,
    WeightsReplaced,
)
from common.instance.roles import CHANGE_S, HAND_OFF_S, InstanceRole
from common.instance.tracer import InstanceTracer
from common.instance.weights import InstanceTasks, InstanceWeights
from common.logs import with_fields
from common.messages import (
    Cancel,
    Decline,
    DoTask,
    Drain,
    Generate,
    Grant,
    Handoff,
    Heartbeat,
    InstanceInbox,
    InstanceInfo,
    OrderOfRouter,
    Peers,
    Refused,
    Reserve,
    SetAdapters,
    TakeRole,
    Timeline,
    Trace,
    Welcome,
    Withdraw,
)
from common.messages.base import fits
from common.messages.variants import ReadAdapter
from common.step_cost import StepCost

MakeScheduler: TypeAlias = Callable[[InstanceInfo, FormerRole | None], Scheduler[Any]]

STEPS_IN_FLIGHT = 2
"""Step k + 1 is launched before the tokens of step k are read."""
SLACK = 3.0
"""A step that takes so many times as long as its like is late, not stuck."""
START_S = 0.05
"""How often an instance looks whether it holds what it is to hold before it joins a fleet."""
ROUTE_MEMORY_S = 60.0
"""How long the address of a peer that left is kept: longer than a push to it takes to end."""
TOLD_AT_DEBUG = (Cancel, Decline, Generate, Grant, Handoff, Reserve, Withdraw)
"""Messages about one request, which the log names at its lowest level."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _InFlight:
    """A step that was launched. follows_layers: the scheduler wants to hear of its layers; layers_seen: those it has heard of."""

    plan: StepPlan
    handle: StepHandle
    launched_s: float
    follows_layers: bool
    layers_seen: int = 0
    progress: int = 0
    """The handle's, when it was last looked at."""
    moved_s: float = 0.0
    """When it had last grown by then."""

    def still_s(self, now: float, cost: StepCost) -> float:
        """For how long the step has not moved, beyond SLACK times what its like have taken."""
        if self.handle.progress != self.progress:
            self.progress, self.moved_s = self.handle.progress, now
        plan = self.plan
        usual_s = cost.seconds(plan.chunk_tokens, plan.decoding, plan.held_tokens)
        return max(0.0, now - max(self.launched_s, self.moved_s) - SLACK * usual_s)


class InstanceWorker:
    """One instance. unix_s: what to add to the times of the caller's clock to have UNIX time."""

    def __init__(
        self,
        memberships: Memberships,
        make_scheduler: MakeScheduler,
        executor: Executor,
        transfers: Transfers,
        mail: Mail[InstanceInbox],
        unix_s: float = 0.0,
        adapters: Mapping[str, str] | None = None,
        *,
        serves_whole: bool = False,
    ) -> None:
        """make_scheduler: from a life of the instance, and what its former role has left, to the scheduler of its role.
        adapters: see `InstanceAdapters`. serves_whole: see `InstanceRole`."""
        self._memberships = memberships
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler(memberships.info, None)
        """That of the present role."""
        self._role = InstanceRole(memberships.info, serves_whole)
        self._executor = executor
        self._transfers = transfers
        self._mail = mail
        self._unix_s = unix_s
        self._in_flight: deque[_InFlight] = deque()
        self._preparing: dict[AttemptId, Work] = {}
        self._former: DeadlineWheel[InstanceId] = DeadlineWheel()
        self._routed: dict[InstanceId, InstanceInfo] = {}
        """The peers whose address the mail knows."""
        self._draining = False
        self._stale = 0
        self._weights = InstanceWeights(self._role, executor)
        self._tasks = InstanceTasks(self._role, executor)
        self._adapters = InstanceAdapters(self._role, executor, adapters or {}, lambda: self._tasks.is_reading_adapter)
        self._cost = CostMeter()
        self._cost_told = StepCost()
        """What the scheduler knows of it."""
        self._tracer = InstanceTracer(memberships.info, self.scheduler.key_in, unix_s)
        for membership in memberships:
            mail.route(membership.name, membership.address, watch=True)

    def turn(self, now: float) -> None:
        """Take in everything that happened, act on it, and keep the executor busy."""
        self._tracer.now = now
        gone = self._mail.refused()
        self._follow(self._memberships.gone(gone, now), now)
        self._bury(gone, now)
        for sender, message in self._mail.receive():
            match message:
                case Welcome() | Refused():
                    self._follow(self._memberships.receive(message, now), now)
                case Drain(incarnation=life):
                    if fits(life, self._memberships.info.incarnation):
                        self.drain(now)
                    else:
                        self._stale += 1
                case Generate(incarnation=life) if not fits(life, self._memberships.info.incarnation):
                    self._stale += 1
                case Peers():
                    self._meet(self._memberships.receive_peers(sender, message, now), now)
                case _ if isinstance(message, OrderOfRouter):
                    self._order(sender, message, now)
                case _ if not self._is_for_role(message):
                    self._stale += 1
                case _:
                    self._note_message(sender, message)
                    self._act(self.scheduler.receive(sender, message, now))
        for event in self._transfers.poll():
            if self._tracer.recorder.on:
                self._tracer.transfer_ended(event)
            self._act(self.scheduler.handle(event, now))
        for key, _, refused in take_done(self._preparing):
            self._act(self.scheduler.handle(Prepared(key, refused), now))
        self._take_steps(now)
        self._follow_weights(now)
        self._follow_role(now)
        self._meet(self._memberships.peers.tick(now), now)
        for name in self._former.expired(now):
            self._mail.route(name, None)
            del self._routed[name]
        self._act(self.scheduler.tick(now))
        self._launch(now)
        self._note_timelines()
        if now >= self._memberships.next_deadline:
            if self._adapters.is_ready:
                self._report(now)
            else:
                self._memberships.wait_until(now + START_S)
        if self._tracer.runs:
            for router, spans in self._tracer.due(now):
                self._mail.send(router, spans)

    def _order(self, router: InstanceId, order: OrderOfRouter, now: float) -> None:
        """A router orders something."""
        if self._memberships.of(router) is None:
            return
        match order:
            case Trace():
                self._tracer.ask(router, order, now)
            case DoTask():
                self._act(self._tasks.order(router, order))
            case SetAdapters():
                self._act(self._adapters.order(router, order))
            case TakeRole():
                self._take_role(router, order, now)
            case _:
                before = self._weights.told
                self._act(self._weights.order(router, order))
                if self._weights.told != before:
                    self._memberships.hurry(now)

    def _is_for_role(self, message: object) -> bool:
        """What was sent to a former role may come late."""
        return isinstance(message, self.scheduler.takes)

    def drain(self, now: float) -> None:
        """Leave in order: accept nothing new, finish or hand off what runs. Idempotent."""
        if not self._draining:
            self._draining = True
            if self._role.wanted is not None:
                self._act([*self.scheduler.handle(StayInRole(), now), *self._role.keep("it is leaving the fleet")])
            self._act(self.scheduler.receive(self._memberships.info.id, Drain(), now))
            self._memberships.hurry(now)

    @property
    def drained(self) -> bool:
        return self._draining and not self._in_flight and self.scheduler.report().drained

    def next_deadline(self) -> float:
        """When the next turn is due even if nothing happens before."""
        step_ends = self._in_flight[0].handle.ends_s if self._in_flight else None
        peers = earliest(self._former.next_deadline(), self._memberships.peers.next_deadline())
        prepared = [each.ends_s for each in self._preparing.values()]
        known = earliest(
            self.scheduler.next_deadline(),
            peers,
            step_ends,
            self._tracer.next_deadline(),
            self._weights.ends_s,
            self._role.ends_s,
            *self._tasks.ends_s,
            *self._adapters.ends_s,
            *prepared,
        )
        return self._memberships.next_deadline if known is None else min(known, self._memberships.next_deadline)

    def skip(self, seconds: float, actions: Sequence[Action]) -> None:
        """A simulation has taken steps of so many seconds at once, all before those in flight. actions: what came of them."""
        self._cost.skip(seconds)
        self._act(actions)

    @property
    def joined(self) -> bool:
        return self._memberships.joined

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the routers that this incarnation is gone. error: why; None when it was told to leave.

        When a step has failed, each router is told which of its requests were in it: one of them may be the reason."""
        self._act([Send(*each) for each in self._tracer.finish(self._tracer.now)])
        reason = "" if error is None else str(error)
        is_quiet = error is None and self.drained and not self.scheduler.report().load.pages_in_use
        suspects = self._requests_of_step(error.step) if isinstance(error, ExecutorFailed) else ()
        if suspects:
            _log.error("%s; its requests: %s", reason, ", ".join(key.request_id for key in suspects))
        self._act([membership.goodbye(reason, suspects, is_quiet=is_quiet) for membership in self._memberships])

    def _requests_of_step(self, step: int | None) -> tuple[AttemptId, ...]:
        """Those that a step in flight computes."""
        plan = next((each.plan for each in self._in_flight if each.plan.step == step), None)
        if plan is None:
            return ()
        rows = {*(chunk.row for chunk in plan.chunks), *plan.decode_rows.tolist()}
        return tuple(self.scheduler.key_in(row) for row in sorted(rows))

    def _take_steps(self, now: float) -> None:
        """Take in what was computed since the last turn: whole steps, and layers of the running one."""
        while self._in_flight:
            step = self._in_flight[0]
            result = step.handle.poll()
            if result is None:
                layers = step.handle.layers_done if step.follows_layers else 0
                if layers > step.layers_seen:
                    step.layers_seen = layers
                    self._act(self.scheduler.handle(LayersDone(step.plan, layers), now))
                return
            self._in_flight.popleft()
            if self._in_flight:
                self._in_flight[0].moved_s = now  # it begins where this one ends
            if self._tracer.recorder.on:
                self._tracer.step_done(step.plan, step.launched_s)
            self._cost.step(step.plan, step.launched_s, now, sum(result.drafting_s))
            self._act(self.scheduler.step_done(result, now))

    def _follow_weights(self, now: float) -> None:
        """Tell what became of staged weights, and change to them when they are ordered and no step is in flight."""
        self._act(self._weights.poll())
        for task, answer, router in self._tasks.poll():
            if isinstance(task, ReadAdapter) and answer.failed is None:
                self._adapters.read(router, answer.number, Digest(answer.result))
            self._act([Send(router, answer)])
        if self._adapters.poll():
            self._act(self.scheduler.handle(AdaptersChanged(self._adapters.served, self._adapters.unused), now))
            self._act([Send(each.router, self._adapters.report(each.router)) for each in self._memberships.welcomes])
        if self._weights.is_switching and not self._in_flight:
            self._weights.switch()
            self._act(self.scheduler.handle(WeightsReplaced(self._weights.digest), now))
            self._memberships.hurry(now)

    def _take_role(self, router: InstanceId, order: TakeRole, now: float) -> None:
        role = self._role
        if not fits(order.incarnation, role.me.incarnation) or role.is_late(router, order):
            self._stale += 1
        elif refusal := role.former_refusal(router, order):
            self._act(refusal)
        elif order.role not in (role.present, role.wanted):
            is_busy = None if role.wanted is None else f"it is taking the role {role.wanted} at this moment"
            if (reason := is_busy or self._why_not_another_role()) is not None:
                self._act(role.refuse(router, order, reason))
            elif role.me.role == "decode" and order.role != "prefill":
                role.serves_whole = order.role == "both"
            else:
                role.begin(router, order, now)
                self._act(self.scheduler.handle(LeaveRole(HAND_OFF_S[role.me.role]), now))
            self._memberships.hurry(now)  # not for an order that comes again: it comes with each heartbeat

    def _why_not_another_role(self) -> str | None:
        """None: nothing keeps it in its role now."""
        if self._draining:
            return "it is leaving the fleet"
        if self._weights.staged_update or self._weights.is_holding:
            return "its weights are being changed, or its steps are held, at this moment"
        if self._tasks.is_reading_adapter:
            return "it reads an adapter at this moment"
        if groups := ", ".join(self._tasks.groups):
            return f"it is in the group {groups} of a trainer, which counts on its role: end that first"
        return None

    def _follow_role(self, now: float) -> None:
        """Begin in the role that is wanted, when nothing of the present one is left; give it up when that takes too long."""
        role = self._role
        if role.ends_s is None:
            return
        report = self.scheduler.report()
        reason = self._why_not_another_role()  # an update of weights may have begun meanwhile
        if reason is None and report.drained and not self._in_flight:
            if not report.load.pages_quarantined:
                self._begin_role(now)
                return
            reason = f"{report.load.pages_quarantined} of its pages may still be read or written: start it anew"
        if reason is None and now >= role.ends_s:
            reason = f"after {CHANGE_S:g} s it still had {report.load.running_requests} requests and their transfers"
        if reason is not None:
            self._act([*self.scheduler.handle(StayInRole(), now), *role.keep(reason)])
            self._memberships.hurry(now)

    def _begin_role(self, now: float) -> None:
        """The next life begins, in the other role: with the weights, pool, engine and transfers of this one."""
        self._note_timelines()
        self._act([Send(*each) for each in self._tracer.finish(now)])
        self._meet(PeersChanged(left=tuple(self._memberships.peers)), now)
        self._stale = self._memberships.stale = 0
        info, former = self._role.become(), FormerRole(self.scheduler.pool, self.scheduler.last_step)
        self._act(self._memberships.become(info, now))
        self.scheduler = self._make_scheduler(info, former)
        self._tracer = InstanceTracer(info, self.scheduler.key_in, self._unix_s)
        joined = [RouterJoined(each.router, len(each.detokenizers)) for each in self._memberships.welcomes]
        adapters = AdaptersChanged(self._adapters.served, self._adapters.unused)
        events: list[Event] = [*joined, adapters, StepsMeasured(self._cost_told)]
        for event in events:
            self._act(self.scheduler.handle(event, now))

    def _launch(self, now: float) -> None:
        while len(self._in_flight) < STEPS_IN_FLIGHT and not self._weights.is_holding:
            decision = self.scheduler.decide(now)
            self._act(decision.actions)
            if decision.plan is None:
                return
            handle = self._executor.launch(decision.plan)
            self._in_flight.append(_InFlight(decision.plan, handle, now, decision.follows_layers))

    def _act(self, actions: Sequence[Action]) -> None:
        if self._tracer.recorder.on:
            self._tracer.act(actions)
        for action in actions:
            if isinstance(action, Send) and action.to == ROUTER:
                for membership in self._memberships:
                    if membership.welcome is not None:
                        self._mail.send(membership.name, action.message)
            elif isinstance(action, Send):
                self._mail.send(action.to, action.message)
            elif isinstance(action, Prepare):
                self._preparing[action.key] = self._executor.prepare(action.grammar, action.owner)
            elif isinstance(action, AdapterUnused):
                self._adapters.unused_by_all(action.adapter)
            else:
                self._transfers.submit(action)

    def _note_message(self, sender: InstanceId, message: InstanceInbox) -> None:
        """For people: the scheduler gets this message."""
        if isinstance(message, TOLD_AT_DEBUG) and _log.isEnabledFor(logging.DEBUG):
            known = with_fields(message.key.request_id, attempt=message.key.attempt, sender=sender)
            _log.debug("%s", type(message).__name__, extra=known)
        if self._tracer.recorder.on:
            self._tracer.receive(message)

    def _note_timelines(self) -> None:
        """What has become of requests goes to the routers that asked, with their heartbeats."""
        for timeline in self.scheduler.take_timelines():
            if _log.isEnabledFor(logging.DEBUG):
                known = with_fields(timeline.key.request_id, attempt=timeline.key.attempt)
                _log.debug("served: %s", timeline.times, extra=known)
            membership = self._memberships.of(timeline.key.router)
            if membership is not None:
                membership.note(Timeline(timeline.key, timeline.times.later(self._unix_s)))

    def _report(self, now: float) -> None:
        """Tell the routers how this instance is. One that has not answered for minutes has lost its requests."""
        self._follow(self._memberships.check(now), now)
        report, cost = self.scheduler.report(), self._cost.read()
        if cost != self._cost_told:
            self._cost_told = cost
            self._act(self.scheduler.handle(StepsMeasured(cost), now))
        load = msgspec.structs.replace(
            report.load,
            oldest_step_s=self._in_flight[0].still_s(now, cost) if self._in_flight else 0.0,
            oldest_transfer_s=max(0.0, now - self._transfers.progress_s),
            **msgspec.structs.asdict(cost),
        )
        counters = msgspec.structs.replace(
            report.counters,
            frames_refused=sum(self._mail.frames_refused.values()),
            messages_lost=sum(self._mail.messages_lost.values()),
            messages_stale=report.counters.messages_stale + self._stale + self._memberships.stale,
            timelines_dropped=sum(membership.timelines_dropped for membership in self._memberships),
        )
        me, weights, adapters = self._memberships.info, self._weights, self._adapters
        beat = Heartbeat(
            id=me.id,
            incarnation=me.incarnation,
            load=load,
            counters=counters,
            peers_version=0,
            links_version=report.links_version,
            cache_version=report.cache_version,
            draining=report.draining,
            weights=weights.digest,
            weight_version=weights.version,
            weight_changes=weights.changes,
            staged_update=weights.staged_update,
            holding=weights.is_held,
            adapters_version=adapters.version,
            serves_whole=self._role.serves_whole,
        )
        held = partial(adapters.report, ROUTER) if adapters.version else lambda: None
        self._act(self._memberships.due(now, beat, held, self._mail.reaches))

    def _follow(self, changes: Sequence[RouterChange], now: float) -> None:
        """Routers came or are gone: learn or forget where they and their detokenizers are, and tell the scheduler."""
        for change in changes:
            router = change.router
            detokenizers = [text_name(router, shard) for shard in range(len(change.detokenizers))]
            if change.is_lost:
                for part in (self._tracer, self._weights, self._tasks, self._adapters, self._role):
                    part.forget(router)
                self._act(self.scheduler.handle(RouterLost(router), now))
                for name in (router, *detokenizers):
                    self._mail.route(name, None)
            else:
                self._mail.route(router, change.at.address)
                for name, address in zip(detokenizers, change.detokenizers, strict=True):
                    self._mail.route(name, address)
                self._act(self.scheduler.handle(RouterJoined(router, len(detokenizers)), now))

    def _meet(self, change: PeersChanged | None, now: float) -> None:
        """Other peers: learn their addresses, and tell the scheduler.

        The address of a peer that left is kept for a while. It may only have been silent, and still wait for a message about its
        pages.
        """
        if change is None:
            return
        for gone in change.left:
            self._former.set(gone, now + ROUTE_MEMORY_S)
        for peer in change.joined:
            self._former.clear(peer.id)
            before, self._routed[peer.id] = self._routed.get(peer.id), peer
            self._mail.route(peer.id, peer.inbox, watch=True)
            if before is not None and before.inbox == peer.inbox and before.began_before(peer):
                self._act(self.scheduler.handle(PeerDied(before), now))  # two cannot listen at one address
        self._act(self.scheduler.handle(change, now))

    def _bury(self, names: Sequence[InstanceId], now: float) -> None:
        """The processes of these peers are gone, unless somebody listens there again: that may be a successor."""
        for name in names:
            peer = self._routed.get(name)
            if peer is not None and not self._mail.reaches(name):
                self._act(self.scheduler.handle(PeerDied(peer), now))


ReadClock = Callable[[], float]
Wait = Callable[[float], None]


def run(worker: InstanceWorker, wait: Wait, clock: ReadClock, should_drain: Callable[[], bool]) -> None:
    """Turn the worker until it is told to drain and has drained. wait: blocks for at most this many seconds, less when something
    is ready.

    However it ends, the routers are told, so that none waits for another heartbeat, and so that /cluster shows why.
    """
    try:
        while not worker.drained:
            if should_drain():
                worker.drain(clock())
            worker.turn(clock())
            wait(0.0 if worker.drained else max(0.0, worker.next_deadline() - clock()))
    finally:
        worker.leave(sys.exception())
