"""The router's core: the fleet, the request book and a watch over the detokenizers, fed with messages and time; and the gateway,
which joins the core, its mail and its clock in one event loop.

The core owns what joins its parts: a change in one that the others must act on. It opens no socket and reads no clock, so a whole
fleet runs in one process under test. The gateway owns the delivery of what the core decides, and the one timer; it decides
nothing, and everything in it runs on the loop's thread and blocks nothing. A turn of the loop takes in mail for TURN_S at most,
so that everything else on the loop gets its share; while mail is left, no silence counts. Neither knows HTTP.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias, TypeVar, assert_never

from common.config import RouterConfig
from common.deadlines import earliest
from common.errors import DeadlinePassed, TandemError, Unavailable
from common.ids import InstanceId, Life, ServingRole, text_name
from common.instance.ports import Mail, Send
from common.messages import (
    AdaptersHeld,
    CacheChanges,
    DetokenizerHeartbeat,
    Failed,
    Goodbye,
    Heartbeat,
    LinkReport,
    Placed,
    Probed,
    Register,
    RoleKept,
    RouterInbox,
    Spans,
    TaskDone,
    TextBatch,
    WeightsStaged,
)
from common.messages.variants import AdapterEntry, Task
from common.tracing import SpanRecorder
from router.adapters import Operation
from router.fleet import NOBODY_DECODES, Members
from router.members import Change, Member
from router.request_book import RequestBook
from router.requests import ClientRequest
from router.scaling import ScalingBoard
from router.timelines import Observer
from router.traces import Traces
from router.weights import Updated, UpdateOrder

_log = logging.getLogger(__name__)
LEAST_S = 3.0
"""The shortest silence that counts: a detokenizer sends a heartbeat every second, however often instances send theirs."""


class DetokenizerWatch:
    """Whether a detokenizer is alive, and what it last reported. Every token passes through one."""

    def __init__(self, dead_after_s: float) -> None:
        self.dead_after_s = max(dead_after_s, LEAST_S)
        """How long it may be silent before it is taken for dead."""
        self.silent_at_s: float | None = None
        """When it will be, unless a heartbeat comes; None before the first one, and while it is silent."""
        self.last: DetokenizerHeartbeat | None = None
        """Its last report."""
        self.silent = False
        """It is taken for dead."""
        self.heard_s = math.inf
        """When its last heartbeat came; infinite before the first one, when nothing can be said, and minus infinite while it is
        silent."""
        self._excused = False
        """It has got more time since its last heartbeat."""

    def heard(self, heartbeat: DetokenizerHeartbeat, now: float) -> bool:
        """Take in a heartbeat. Returns whether it ends a silence."""
        was_silent, self.silent, self._excused = self.silent, False, False
        self.last, self.silent_at_s, self.heard_s = heartbeat, now + self.dead_after_s, now
        return was_silent

    def tick(self, now: float) -> None:
        """When this router was held up, a detokenizer whose time is over gets as long as it takes to be heard, once in each
        silence."""
        if self.silent_at_s is None or now < self.silent_at_s:
            return
        if _is_late(self.silent_at_s, now) and not self._excused:
            self.silent_at_s, self._excused = now + LEAST_S, True
        else:
            self.silent, self.silent_at_s, self.heard_s = True, None, -math.inf


LATE_S = 0.1
"""A tick that comes this long after its deadline shows that the loop was busy or the process stopped."""


class RouterCore:
    """Everything that the router decides.

    router: the name of this life of it. detokenizers: their addresses. vocab_size: of its tokenizer, which instances must have
    too; None: any. unix_s: what to add to the times of the caller's clock to have UNIX time.
    """

    def __init__(
        self,
        router: InstanceId,
        detokenizers: Sequence[str],
        config: RouterConfig,
        observer: Observer,
        vocab_size: int | None = None,
        unix_s: float = 0.0,
    ) -> None:
        self._config = config
        self.router = router
        self.unix_s = unix_s
        self.detokenizer_names = tuple(text_name(router, shard) for shard in range(len(detokenizers)))
        self.fleet = Members(router, detokenizers, config, vocab_size, unix_s)
        recorder = SpanRecorder(unix_s)
        self.requests = RequestBook(router, self.fleet, observer, config, self.detokenizer_names, recorder)
        self.traces = Traces(router, self.detokenizer_names, self.fleet, recorder, unix_s)
        self.scaling = ScalingBoard()
        self.detokenizers = [DetokenizerWatch(config.dead_after_s) for _ in detokenizers]
        """By number, as their names."""

    def receive(self, message: RouterInbox, now: float) -> list[Send]:
        sends = self._receive(message, now)
        return sends + self.follow_adapters(now) if self.fleet.adapters.has_news else sends

    def follow_adapters(self, now: float) -> list[Send]:
        """What members must know of adapters, and what becomes of requests whose adapter was replaced."""
        replaced = [send for each in self.fleet.adapters.take_replaced() for send in self.requests.adapter_replaced(each, now)]
        return self.fleet.adapters.take_sends() + replaced

    def _receive(self, message: RouterInbox, now: float) -> list[Send]:
        match message:
            case TextBatch():
                return [send for delta in message.deltas for send in self.requests.text(delta, now)]
            case Heartbeat():
                sends = self.apply(self.fleet.heartbeat(message, now), now)
                if message.timelines:
                    self._hear(message)
                return sends
            case Register():
                life = Life(message.instance.id, message.instance.incarnation)
                return self.apply(self.fleet.register(message, now), now) + self.traces.joined(life, now)
            case LinkReport() | CacheChanges() | WeightsStaged() | TaskDone() | RoleKept() | AdaptersHeld():
                return self.apply(self.fleet.told(message, now), now)
            case Goodbye():
                if (member := self._hear(message)) is not None:
                    self.requests.suspect(message.suspects, member, f"{message.id}: {message.reason}")
                return self.apply(self.fleet.goodbye(message, now), now)
            case Placed():
                return self.requests.placed(message.key, Life(message.id, message.incarnation), message.decode, now)
            case Probed():
                return self.requests.probed(message, now)
            case Spans():
                self.traces.receive(message)
                return []
            case DetokenizerHeartbeat():
                return self._detokenizer_heard(message, now)
            case _:
                assert_never(message)

    def _hear(self, message: Heartbeat | Goodbye) -> Member | None:
        """An instance tells of attempts that have left it. None: this life of it is no member."""
        member = self.fleet.find(Life(message.id, message.incarnation))
        if member is not None:
            self.requests.timelines.receive(member.info, message.timelines)
        return member

    def detokenizer_moved(self, shard: int, address: str, now: float) -> list[Send]:
        """A new detokenizer has replaced the former one, at this address: tell the members, and open what was open there."""
        self.detokenizers[shard] = DetokenizerWatch(self._config.dead_after_s)
        self.requests.detokenizer_moved(self.detokenizer_names[shard])
        return self.fleet.detokenizer_moved(shard, address) + self.traces.detokenizer_moved(shard, now)

    def _detokenizer_heard(self, beat: DetokenizerHeartbeat, now: float) -> list[Send]:
        if beat.shard >= len(self.detokenizers):
            return []
        name = self.detokenizer_names[beat.shard]
        return self.requests.probe_all(name, now) if self.detokenizers[beat.shard].heard(beat, now) else []

    def tick(self, now: float, *, caught_up: bool = True) -> list[Send]:
        """Act on every deadline that has passed. caught_up: False while mail waits to be read: then silence says nothing.

        A tick that comes late shows that this process was held up. It must not count its own absence as the silence of others:
        what they sent meanwhile may not have reached the inbox yet. So they get time to be heard, once in each silence: a loop
        that is always late must notice the dead too.
        """
        sends: list[Send] = []
        self.traces.tick(now)
        if caught_up:
            sends = self.apply(self.fleet.tick(now, is_late=_is_late(self.fleet.next_deadline(), now)), now)
            for watch in self.detokenizers:
                watch.tick(now)
        watched = zip(self.detokenizer_names, self.detokenizers, strict=True)
        heard_s = {name: watch.heard_s if caught_up else -math.inf for name, watch in watched}
        return sends + self.requests.tick(now, heard_s) + self.follow_adapters(now)

    def take_moves(self) -> list[tuple[InstanceId, str | None]]:
        """Where the instances are now whose address may have changed since the last call; None: they are to be forgotten. A
        detokenizer's route stays as its starter gave it: no instance can take its name."""
        return [(name, address) for name, address in self.fleet.take_moves() if name not in self.detokenizer_names]

    def flush(self, now: float) -> list[Send]:
        """What was gathered to be sent together. Call it at the end of each turn."""
        self.traces.tick(now)
        return self.fleet.peering.flush(now) + self.follow_adapters(now)

    def next_deadline(self) -> float | None:
        """When `tick` must be called; None when nothing is due."""
        silent_s = (watch.silent_at_s for watch in self.detokenizers)
        due_s = (each.next_deadline() for each in (self.fleet, self.requests, self.traces))
        return earliest(*silent_s, *due_s, self.fleet.peering.next_deadline())

    def unready(self) -> list[str]:
        """Why no request could be served now; empty when one could."""
        reasons = self.unhealthy() + self.requests.placer.unready()
        if self.requests.is_draining:
            reasons.append("the router is draining: it takes no more requests")
        if len(self.requests) >= self._config.max_requests:
            reasons.append(f"all {self._config.max_requests} places for requests are taken")
        return reasons

    def degraded(self) -> list[str]:
        """Why requests are served, but not by all that is there; empty when all is well."""
        return self.requests.placer.degraded()

    def unhealthy(self) -> list[str]:
        """What is wrong with the router itself."""
        return [
            f"detokenizer {shard} has not been heard of for {watch.dead_after_s:g} s"
            for shard, watch in enumerate(self.detokenizers)
            if watch.silent
        ]

    def adapt(self, operation: Operation, answer: Callable[[AdapterEntry | TandemError], object], now: float) -> list[Send]:
        """See `FleetAdapters.run`."""
        self.fleet.adapters.run(operation, answer, now)
        return self.follow_adapters(now)

    def _resume_of(self, member: Member, now: float) -> list[Send]:
        """Resume the requests of a member that is lost."""
        requests = self.requests.needing(member)
        if requests:
            what = f"{len(requests)} of its requests are resumed"
            self.fleet.history.tell("resumed", member.info.id, what, now)
        return self.requests.member_lost(member, requests, now)

    def apply(self, change: Change, now: float) -> list[Send]:
        """Carry out what follows from a change of the fleet."""
        sends = list(change.sends)
        for member in change.lost:
            sends += self._resume_of(member, now)
        if change.aborts:
            sends += self.requests.abort_all(now)
        if change.more_can_serve:
            sends += self.requests.retry_parked(now)
        return sends


def _is_late(due_s: float | None, now: float) -> bool:
    return due_s is not None and now - due_s > LATE_S


TURN_S, TURN_MESSAGES = 0.01, 1_024
"""How long one turn takes in mail, and how many messages at most."""
LINKS_S = 2.0
"""How long an instance may take to tell of its links."""
BACKLOG_S = 30.0
"""A router that has not caught up with its mail for this long treats silent instances as lost: what is left to read cannot be
from those that it waits for, because mail is read from all of them in turn."""


PauseMode: TypeAlias = Literal["abort", "retract", "in_place", "finish"]
T = TypeVar("T")


class Gateway:
    """The core as the HTTP side sees it: use `core` with `clock()`, and `deliver` what it decides. The mail's owner calls `pump`
    when something has arrived."""

    def __init__(self, core: RouterCore, mail: Mail[RouterInbox], clock: Callable[[], float]) -> None:
        self.core = core
        self.clock = clock
        self.mail = mail
        self.turn = 0
        """Counts the turns of mail."""
        self._closed = False
        self._last_left = asyncio.Event()
        """The router drains, and every request has left."""
        self._delivered = asyncio.Event()
        """Something was decided since somebody last cleared this."""
        self._behind_since_s: float | None = None
        """Since when mail has been left unread at the end of each turn; None: everything that had arrived was read."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")

    def detokenizer_moved(self, shard: int, address: str) -> None:
        """A new detokenizer has replaced the former one. Its route comes first, because it is told about all open requests."""
        if not self._closed:
            self.mail.route(self.core.detokenizer_names[shard], address)
            self.deliver(self.core.detokenizer_moved(shard, address, self.clock()))

    def pump(self) -> None:
        """Take in what has arrived, within the limits of a turn. Each message counts as heard when it is read: it may have waited
        long. The mail's owner calls again while mail is left."""
        self.turn += 1
        self._take_in(TURN_MESSAGES)
        self.deliver(self.core.flush(self.clock()))

    def _take_in(self, most: int) -> None:
        """most: so many messages, unless TURN_S is over before."""
        began_s = self.clock()
        for _ in range(most):
            mail = self.mail.receive(1)
            if not mail:
                self._behind_since_s = None
                return
            now = self.clock()
            self._send(self.core.receive(mail[0][1], now))
            if now - began_s >= TURN_S:
                break
        if self._behind_since_s is None:
            self._behind_since_s = began_s

    async def links_of(self, instance: InstanceId) -> LinkReport:
        """All links of a prefill instance, with their traffic, as it tells them now. Raises NotFound, BadRequest,
        DeadlinePassed."""
        ask = self.core.fleet.ask_links
        try:
            return await asyncio.wait_for(self._outcome(lambda answer, _: ask(instance, answer)), LINKS_S)
        except TimeoutError as error:
            raise DeadlinePassed(f"{instance} did not tell of its links within {LINKS_S:g} s") from error

    # --- requests --------------------------------------------------------------------------------------------------------

    def abort(self, owner: str, name: str | None) -> int:
        """See `RequestBook.abort`. Returns how many choices that ends."""
        count, sends = self.core.requests.abort(owner, name, self.clock())
        self.deliver(sends)
        return count

    def leave(self, client: ClientRequest) -> None:
        """Its response has ended: end what is open of it."""
        if sends := self.core.requests.leave(client, self.clock()):
            self.deliver(sends)
        if self.core.requests.is_draining and not self.core.requests.clients:
            self._last_left.set()

    async def drain(self, timeout_s: float, stop: asyncio.Event, at_once: asyncio.Event) -> None:
        """Wait for `stop`, take no more requests, and return when the last one has left. After `timeout_s`, or when `at_once` is
        set, those that are still open end with an error, and their responses may not have been sent yet when this returns."""
        await stop.wait()
        requests = self.core.requests
        requests.is_draining = True
        if requests.clients:
            _log.info("draining: %d requests are open and may take %g s", len(requests.clients), timeout_s)
        else:
            self._last_left.set()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._last_left, at_once)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if requests.clients:
            _log.warning("%d requests were still open when the drain ended: they end with an error", len(requests.clients))
            stopping = Unavailable("the router was stopped before the request had ended: send it again")
            self.deliver(requests.end_all(Failed.of(stopping), self.clock()))

    # --- instances and time ----------------------------------------------------------------------------------------------

    async def change_role(self, instance: InstanceId, role: ServingRole) -> Member:
        """Returns the life that serves in this role. Raises NotFound, Conflict, DeadlinePassed."""
        return await self._outcome(partial(self.core.fleet.change_role, instance, role))

    async def _outcome(self, begin: Callable[[Callable[[T | TandemError], object], float], Iterable[Send]]) -> T:
        """Begin something, given what to call with the outcome and the time, and wait for that. It goes on when its caller
        leaves. Raises what came of it."""
        over: asyncio.Future[T | TandemError] = asyncio.get_running_loop().create_future()
        self.deliver(begin(over.set_result, self.clock()))
        done = await asyncio.shield(over)
        if isinstance(done, TandemError):
            raise done
        return done

    def drain_instance(self, instance: InstanceId) -> str:
        """Give it no more requests. Returns a warning, or "". Raises NotFound."""
        self.apply(self.core.fleet.drain(instance, self.clock()))
        return NOBODY_DECODES if self.core.fleet.nobody_decodes else ""

    # --- weights ---------------------------------------------------------------------------------------------------------

    async def update_weights(self, order: UpdateOrder) -> Updated:
        """See `FleetWeights.begin`. Raises what came of it."""
        core = self.core
        return await self._outcome(lambda answer, now: core.apply(core.fleet.weights.begin(order, answer, now), now))

    async def pause(self, mode: PauseMode) -> None:
        """Place no request until `go_on`. abort: those that were dispatched end. retract: they give up what they have. in_place:
        they stay where they are, and no step is launched. finish: they go on, and this returns when the last of them has ended;
        the pause stays if its caller leaves. Raises Unavailable, with finish, when `go_on` comes first."""
        now, requests = self.clock(), self.core.requests
        self.apply(self.core.fleet.weights.pause(holds_steps=mode == "in_place"))
        match mode:
            case "abort":
                self.deliver(requests.abort_all(now))
            case "retract":
                self.deliver(requests.set_back_all(now))
            case "finish":
                await self._rest()
            case "in_place":
                pass
            case _:
                assert_never(mode)

    async def _rest(self) -> None:
        """Wait until no request is dispatched, while the fleet is paused. Each request has a deadline, so this has one."""
        weights = self.core.fleet.weights
        while weights.is_paused and self.core.requests.has_attempts:
            self._delivered.clear()
            await self._delivered.wait()
        if not weights.is_paused:
            raise Unavailable("the pause was ended before the requests that ran had")

    def go_on(self) -> None:
        self.apply(self.core.fleet.weights.go_on())

    # --- adapters --------------------------------------------------------------------------------------------------------

    async def adapt(self, operation: Operation) -> AdapterEntry:
        """See `FleetAdapters.run`. Raises what came of it."""
        return await self._outcome(partial(self.core.adapt, operation))

    # --- tasks -----------------------------------------------------------------------------------------------------------

    async def perform(self, tasks: Mapping[Life, Task], within_s: float) -> dict[Life, str]:
        """Have members do these, and wait for the results. Raises the first error."""
        begin = self.core.fleet.tasks.begin
        return await self._outcome(lambda answer, now: begin(tasks, answer, now + within_s))

    def apply(self, change: Change) -> None:
        """Carry out what follows from a change of the fleet."""
        self.deliver(self.core.apply(change, self.clock()))

    def flush_caches(self) -> int:
        """Have every instance forget its prefix cache. Returns how many were told."""
        sends = self.core.fleet.flush_caches()
        self.deliver(sends)
        return len(sends)

    def connection_broken(self, instance: InstanceId) -> None:
        """The instance closed the connection to its inbox."""
        if not self._closed:
            self.core.fleet.connection_broken(instance, self.clock())
            self.deliver(())

    def deliver(self, sends: Iterable[Send]) -> None:
        """Send what the core decided, and set the timer to its earliest deadline. Call it after everything that changes the core.

        A deadline that moves later costs one call of the timer that does nothing.
        """
        self._send(sends)
        self._delivered.set()
        deadline = self.core.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self.clock()), self._tick)

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, sends: Iterable[Send]) -> None:
        for name, address in self.core.take_moves():
            self.mail.route(name, address)
        for send in sends:
            self.mail.send(send.to, send.message)

    def _tick(self) -> None:
        """Read the mail first: an instance that wrote in time is not silent, however long this loop was held up.

        While mail is left, its owner calls `pump` before the loop looks at its sockets again. A second whole turn would make
        everybody else wait for twice as long, so one message is read here: that shows whether more is left."""
        self._timer = None
        if self._behind_since_s is None:
            self.pump()
        else:
            self._take_in(1)
        now = self.clock()
        caught_up = self._behind_since_s is None or now - self._behind_since_s > BACKLOG_S
        self.deliver(self.core.tick(now, caught_up=caught_up))
