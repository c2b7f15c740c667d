"""A fleet under a schedule: clients ask and leave, instances die, hang and leave, letters and writes fare as they may.

Owns the carrying out of a schedule, and when nobody could have served. Judges nothing: `checks` does.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import assert_never

import msgspec

from common.config import RouterConfig
from common.errors import Conflict, NotFound, Overloaded, TandemError, Unavailable
from common.ids import DETOKENIZER, ROUTER, AttemptId, Incarnation, InstanceId, RequestId, Role
from common.messages import (
    AnyMessage,
    CacheChanges,
    ExpectAnswer,
    Generate,
    Goodbye,
    Handoff,
    Heartbeat,
    Register,
    Reserve,
    TellCache,
)
from common.messages.ranks import rank_name
from decode.scheduler import DecodeScheduler
from kv_transfer.transport import Transport
from prefill.scheduler import PrefillScheduler
from router.members import QUARANTINE_DIVISOR, Member
from simulation.clock import Clock
from simulation.instance import Instance
from simulation.network import Letter
from tests.life.asks import Ask
from tests.life.deeds import (
    ChangeRole,
    Deed,
    Flush,
    Hang,
    HangRank,
    Kill,
    KillDetokenizer,
    KillRank,
    KillRouter,
    Leave,
    Part,
    PartRanks,
    RankDeed,
    Slow,
    Stall,
    Supplant,
    Watch,
)
from tests.life.expected import Asked, expect, spec_of
from tests.life.fabric import Fabric, FabricTransport, Host, Tides
from tests.life.fleet import ToyFleet, ToyRouter, World
from tests.life.ledger import Ledger
from tests.life.letters import keys_of
from tests.life.ranks import SimulatedFollower, ToyInstance, toys_of
from tests.life.schedule import WINDOW_S, Fault, Schedule
from tests.life.weather import Cut, Storm

LOOK_S = 0.25
"""How often it is looked who could serve."""
LATE_S = 0.02
"""A letter that takes longer may be overtaken, where letters are."""
ASK_AGAIN_S = 1.0
PATIENCE_S = 40.0
"""How long a client asks again that is told to come back later."""
LEFT_S = 0.5
"""After which an instance that left is started again."""
REQUEST_TIMEOUT_S = 60.0
ORPHANS_S = 3.0
"""Within which requests of a dead router are over, if nothing else befalls their instances."""


class Trial(ToyFleet):
    """The fleet is ready when it has been made; `run_window` begins the schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._random = Random(f"trial {schedule.seed}")
        clock = Clock()
        self.storm = Storm(Random(f"storm {schedule.seed}"), schedule.chances, ends_s=0.0)
        tides = Tides(Random(f"tides {schedule.seed}"), schedule.rough, self.storm)
        self.fabric = Fabric(
            clock, tides, Random(f"fabric {schedule.seed}"), schedule.rough.buffered, self._strike, not schedule.size.apart
        )
        self.ledgers: dict[str, Ledger] = {}
        """By agent."""
        self.on_event: Callable[[str], None] = lambda _: None
        self.blows: Counter[RequestId] = Counter()
        """How often something befell an attempt of a request: a letter lost, an instance of its, or a write between them."""
        self.told: Counter[tuple[Incarnation, AttemptId]] = Counter()
        """How often an instance's heartbeats told of an attempt."""
        self._serving: dict[RequestId, tuple[InstanceId, ...]] = {}
        """Who serves the last attempt of each request."""
        self._routers: dict[RequestId, InstanceId] = {}
        """Who asked for it."""
        self.cache_letters: Counter[str] = Counter()
        """Letters about prefix caches, by their kind, and those that were lost."""
        self.orphans = self.detokenizers_killed = self.quiet_goodbyes = 0
        """Requests that instances served when their router died."""
        self.roles_answered: list[Member | TandemError] = []
        """What came of orders to change the role."""
        self.problems: list[str] = []
        """What was found not to hold meanwhile."""
        self.asked = [Asked(ask, tuple(expect(choice) for choice in ask.choices)) for ask in schedule.asks]
        self._armed: dict[str, list[Deed]] = {}
        self._leaving: set[ToyInstance] = set()
        config = RouterConfig(
            heartbeat_s=schedule.heartbeat_s,
            request_timeout_s=REQUEST_TIMEOUT_S,
            peers_per_instance=schedule.peers_per_instance,
            detokenizers=schedule.detokenizers,
            prefill_policy=schedule.policy,
            decode_policy=schedule.policy,
            dispatch=schedule.dispatch,
        )
        super().__init__(
            schedule.prefill,
            schedule.decode,
            config=config,
            size=schedule.size,
            world=World(clock, self.storm, self.fabric),
            routers=schedule.routers,
            ranks=dict(zip(("prefill", "decode"), schedule.ranks, strict=True)),
        )
        self.network.taps.append(self._on_letter)

    def run_window(self) -> None:
        """Everything of the schedule happens; then the weather turns fine, though some of it lasts. It ends early when nothing is
        left that could befall a request."""
        begins_s = self.clock.now
        faults_end_s = begins_s + max((fault.at_s for fault in self.schedule.faults if fault.trigger is None), default=0.0)
        self.storm.ends_s = begins_s + WINDOW_S
        for asked in self.asked:
            self._plan_ask(asked, begins_s)
        for fault in self.schedule.faults:
            self._plan_fault(fault, begins_s)
        self._look()
        while self.clock.now < self.storm.ends_s and not (
            self.clock.now > faults_end_s and all(asked.over for asked in self.asked)
        ):
            self.run_for(LOOK_S)
        self.storm.ends_s = min(self.storm.ends_s, self.clock.now)
        self._armed.clear()

    def ask_once_more(self) -> None:
        """Another client of each router asks for what the first one did: whatever has happened, the fleet serves."""
        first = self.asked[0]
        for router in range(len(self.routers)):
            choices = tuple(
                replace(each, request_id=RequestId(f"again-{router}.{each.request_id}")) for each in first.ask.choices
            )
            asked = Asked(Ask(at_s=0.0, choices=choices, router=router), first.expected)
            self.asked.append(asked)
            self._plan_ask(asked, self.clock.now)
        self._look()

    # --- who is there ------------------------------------------------------------------------------------------------------

    def ledger_of(self, instance: ToyInstance) -> Ledger:
        return self.ledgers[instance.info.pools[0].agent]

    def make_transport(self, wake: Callable[[], None]) -> Transport:
        return FabricTransport(self.fabric)

    def start(self, name: str, role: Role, address: str | None = None, began_s: float = 0.0) -> ToyInstance:
        instance = super().start(name, role, address, began_s or self._random.uniform(1.0, 1000.0))
        ledger = self.ledgers[instance.info.pools[0].agent] = Ledger(instance.pool, toys_of(instance))
        for pool in instance.info.pools:
            self.fabric.hosts[pool.agent] = Host(instance.name.id, ledger, pool.layout.page_bytes)
        self._note(f"{name} starts, life {instance.name.life}")
        return instance

    def kill(self, name: str, noticed_s: float = 0.0) -> ToyInstance:
        instance = self.instances[name]
        for rank in range(len(instance.ranks)):
            self.kill_rank(name, rank, noticed_s)
        return instance

    def kill_rank(self, name: str, rank: int, noticed_s: float = 0.0) -> None:
        """The process of this rank is gone; those of others end by themselves."""
        instance = self.instances[name]
        if rank:
            instance.followers[rank - 1].kill()
        else:
            instance.kill()
        self.fabric.died(instance.info.pools[rank].agent, noticed_s)

    def follower_ended(self, follower: SimulatedFollower, reason: str) -> None:
        super().follower_ended(follower, reason)
        self._note(f"{follower.name} ended by itself: {reason}")
        self.fabric.died(follower.rank.loop.descriptor.agent, 0.0)

    def instance_ended(self, instance: Instance, reason: str) -> None:
        assert isinstance(instance, ToyInstance)
        if self.instances.get(instance.name.id) is instance and "newer incarnation" in reason:
            self.problems.append(f"{instance.info.incarnation} is the last of its name, and ended: {reason}")
        super().instance_ended(instance, reason)
        self._note(f"{instance.name.id} ended by itself: {reason}")
        if instance.followers:
            self._strike(instance.name.id)  # by what befell one of its ranks before
        self.fabric.died(instance.info.pools[0].agent, 0.0)
        if instance.name.id not in self.instances:
            self.clock.at(self.clock.now + LEFT_S, lambda: self._start_again(instance, inherits=False))

    def _start_again(self, former: ToyInstance, inherits: bool) -> None:
        self.start(former.name.id, former.name.role, former.name.address if inherits else None)

    # --- clients -----------------------------------------------------------------------------------------------------------

    def _plan_ask(self, asked: Asked, begins_s: float) -> None:
        ask = asked.ask
        self.clock.at(begins_s + ask.at_s, lambda: self._ask(asked))
        if ask.leaves_s is not None:
            self.clock.at(begins_s + ask.leaves_s, lambda: self._leave(asked))

    def _ask(self, asked: Asked) -> None:
        """A client that is told to come back later does, for a while."""
        if asked.left:
            return
        if asked.gives_up_s is None:
            asked.gives_up_s = self.clock.now + PATIENCE_S
        choices = zip(asked.ask.choices, asked.expected, strict=True)
        specs = [spec_of(choice, expected, asked.ask, index) for index, (choice, expected) in enumerate(choices)]
        seats = (asked.ask.router, *(each.seat for each in self.routers))
        asked.seat = next((seat for seat in seats if self.routers[seat].alive), asked.ask.router)
        try:
            asked.client = self.ask(*specs, seat=asked.seat)
        except (Unavailable, Overloaded) as error:
            self._note(f"{asked.ask.choices[0].request_id} is told to come back later: {error}")
            if self.clock.now >= asked.gives_up_s:
                asked.given_up = True
            else:
                self.clock.at(self.clock.now + ASK_AGAIN_S, lambda: self._ask(asked))
        else:
            asked.client.request.read_by(lambda: self._hear(asked))

    def _leave(self, asked: Asked) -> None:
        asked.left = True
        if asked.client is not None and not asked.client.ended:
            self._note(f"the client of {asked.ask.choices[0].request_id} leaves")
            self.leave(*(choice.request_id for choice in asked.ask.choices))

    # --- faults ------------------------------------------------------------------------------------------------------------

    def _plan_fault(self, fault: Fault, begins_s: float) -> None:
        trigger, deed = fault.trigger, fault.deed
        if trigger is None:
            self.clock.at(begins_s + fault.at_s, lambda: self._do(deed))
        else:
            self.clock.at(begins_s + fault.at_s, lambda: self._armed.setdefault(trigger, []).append(deed))

    def _on_letter(self, letter: Letter, message: AnyMessage, delays: Sequence[float]) -> None:
        if isinstance(message, Generate):
            request_id, router = message.key.request_id, message.key.router
            self._serving[request_id], self._routers[request_id] = (letter.to, *message.decodes), router
            could_decode = not message.decodes or any(self._is_up(name, router) for name in message.decodes)
            self.blows[request_id] += not (self._is_up(letter.to, router) and could_decode)
        if isinstance(message, ExpectAnswer):
            texts = (each for router in self.routers for each in router.detokenizers)
            self.blows[message.key.request_id] += not any(each.alive and each.name == letter.to for each in texts)
        if isinstance(message, Reserve):
            self._serving[message.key.request_id] = (letter.sender, letter.to)
            self.blows[message.key.request_id] += not self._is_up(letter.to, message.key.router)
        if isinstance(message, Handoff) and self.schedule.chances.overtaking and delays and max(delays) > LATE_S:
            self.blows[message.key.request_id] += 1  # a Renew may overtake it, and then it is taken for lost
        if isinstance(message, Heartbeat):
            self.told.update((message.incarnation, timeline.key) for timeline in message.timelines)
        if isinstance(message, Goodbye) and message.is_quiet:
            self.quiet_goodbyes += 1
            (sender,) = (life for life in self.lives if life.info.incarnation == message.incarnation)
            for pool in sender.info.pools:
                self.fabric.hosts[pool.agent].is_quiet = True
        if isinstance(message, TellCache | CacheChanges):
            self.cache_letters[letter.kind if delays else "lost"] += 1
        if not delays:
            self.blows.update({key.request_id for key in keys_of(message)})
        for deed in self._armed.pop(letter.kind, ()):
            after_s = self._random.choice((0.0, 0.001, 0.02))
            self.clock.at(self.clock.now + after_s, lambda deed=deed: self._do(deed))  # type: ignore[misc]

    def _do(self, deed: Deed) -> None:
        now = self.clock.now
        self._note(str(deed))
        match deed:
            case Kill():
                self._strike(deed.name)
                if deed.name in self.instances:
                    killed = self.kill(deed.name, deed.noticed_s)
                    del self.instances[deed.name]
                    if deed.breaks:
                        self.connection_broken(killed.name.id)
                    self.clock.at(now + deed.back_s, lambda: self._start_again(killed, deed.inherits))
            case Hang():
                self._strike(deed.name)
                if deed.name in self.instances:
                    self._stop(self.instances[deed.name], deed.seconds)
            case Supplant():
                self._strike(deed.name)
                if deed.name in self.instances:
                    former = self.instances[deed.name]
                    self._stop(former, deed.seconds)
                    self.clock.at(now + deed.next_s, lambda: self._supplant(former))
            case Stall():
                self.routers[deed.router].stop_until(now + deed.seconds)
            case Slow():
                self.routers[deed.router].slow_until(now + deed.seconds, deed.turn_s)
            case KillRouter():
                if self.routers[deed.router].alive:
                    self.kill_router(deed.router)
                    self.clock.at(now + deed.back_s, lambda: self.start_router(deed.router))
            case KillDetokenizer():
                self._kill_detokenizer(deed)
            case Watch():
                self._watch(deed)
            case Flush():
                if self.routers[deed.router].alive:
                    self.routers[deed.router].flush_caches()
            case Leave():
                self._strike(deed.name)
                self._drain(deed)
            case ChangeRole():
                self._strike(deed.name)
                self._change_role(deed)
            case Part():
                self._strike(deed.one, deed.other)
                router, one = self.routers[deed.router], InstanceId(deed.one)
                other = {ROUTER: router.name, DETOKENIZER: router.detokenizers[0].name}.get(InstanceId(deed.other), deed.other)
                self.storm.cut(one, InstanceId(other), Cut(now + deed.seconds, deed.queued))
                if deed.breaks and deed.other == ROUTER and router.alive:
                    router.connection_broken(one)
            case KillRank() | HangRank() | PartRanks():
                self._strike(deed.name)
                if deed.name in self.instances:
                    self._befall(self.instances[deed.name], deed)
            case _:
                assert_never(deed)

    def _change_role(self, deed: ChangeRole) -> None:
        if not self.routers[deed.router].alive:
            return
        try:
            self.routers[deed.router].tell_role(InstanceId(deed.name), deed.role, self.roles_answered.append)
        except (NotFound, Conflict) as error:
            self._note(str(error))

    def _befall(self, instance: ToyInstance, deed: RankDeed) -> None:
        """Something befalls a single rank."""
        now, name = self.clock.now, instance.name.id
        match deed:
            case KillRank():
                self.kill_rank(name, deed.rank, deed.noticed_s)
                if deed.rank == 0:
                    del self.instances[name]
                    self.clock.at(now + deed.back_s, lambda: self._start_again(instance, inherits=False))
            case HangRank():
                instance.processes[deed.rank].stop_until(now + deed.seconds)
            case PartRanks():
                leader, follower = rank_name(name, 0, instance.name.incarnation), instance.followers[deed.rank - 1].name
                self.storm.cut(leader, follower, Cut(now + deed.seconds, deed.queued))

    def _stop(self, instance: ToyInstance, seconds: float) -> None:
        """All its processes are stopped."""
        for process in instance.processes:
            process.stop_until(self.clock.now + seconds)

    def _supplant(self, former: ToyInstance) -> None:
        if self.instances.get(former.name.id) is former:
            self._start_again(former, inherits=False)
            self._strike(former.name.id)

    def _watch(self, deed: Watch) -> None:
        router = self.routers[deed.router]
        try:
            if router.alive:
                router.trace(deed.seconds)
        except Conflict as error:
            self._note(str(error))

    def _strike(self, *names: str) -> None:
        """Something befalls an instance, or everything between two."""
        for request_id, serving in self._serving.items():
            self.blows[request_id] += not set(names).isdisjoint(serving)

    def _kill_detokenizer(self, deed: KillDetokenizer) -> None:
        router = self.routers[deed.router]
        if not router.alive:
            return
        self.detokenizers_killed += 1
        router.detokenizers[deed.shard].kill()

        def start() -> None:
            if router.alive:
                router.restart_detokenizer(deed.shard)

        self.clock.at(self.clock.now + deed.back_s, start)

    def kill_router(self, seat: int) -> None:
        """Nobody waits for the answers of its requests any more, so soon nothing is left of them."""
        dead = self.routers[seat].name
        super().kill_router(seat)
        self.orphans += sum(len(self._open_of(dead, instance)) for instance in self.instances.values())
        if self.schedule.only_routers:
            self.clock.at(self.clock.now + ORPHANS_S, lambda: self._look_for_orphans(dead))

    def start_router(self, seat: int) -> None:
        super().start_router(seat)
        for number in range(self.schedule.strangers):
            self._ask_as_stranger(self.routers[seat], InstanceId(f"stranger-{number}"))
        self._note(f"{self.routers[seat].name} starts")

    def _ask_as_stranger(self, router: ToyRouter, name: InstanceId) -> None:
        info = next(life.info for life in self.lives if life.name.role == "prefill")
        model = msgspec.structs.replace(info.model, fingerprint="of another model")
        stranger = msgspec.structs.replace(info, id=name, inbox="tcp://127.0.0.9:1", model=model)
        router.core.receive(Register(instance=stranger), self.clock.now)

    def _open_of(self, router: InstanceId, instance: ToyInstance) -> list[AttemptId]:
        """The requests of this router that hold something at this instance."""
        scheduler = instance.scheduler
        assert isinstance(scheduler, PrefillScheduler | DecodeScheduler)
        table = scheduler._requests
        return [request.key for request in table if request.key.router == router]

    def _look_for_orphans(self, router: InstanceId) -> None:
        for instance in self.instances.values():
            keys = ", ".join(map(str, self._open_of(router, instance)))
            if keys:
                self.problems.append(f"{instance.name.id} serves {keys} {ORPHANS_S:g} s after the death of {router}")

    def _drain(self, deed: Leave) -> None:
        instance = self.instances.get(deed.name)
        if instance is None:
            return
        self._leaving.add(instance)
        if deed.by_signal:
            processes = instance.processes
            (self._random.choice(processes) if len(processes) > 1 else instance).drain()
            return
        for router in self.routers:
            try:
                router.drain_instance(instance.name.id)
            except NotFound as error:
                self._note(str(error))

    # --- who could serve ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        rooms = [max((self._room(each, router) for each in self.instances.values()), default=0) for router in self.routers]
        for asked in self.asked:
            is_waiting = asked.gives_up_s is not None and not asked.over
            asked.unserved = asked.unserved or (is_waiting and asked.pages > rooms[asked.seat])
        if not all(asked.over for asked in self.asked):
            self.clock.at(self.clock.now + LOOK_S, self._look)

    def _hear(self, asked: Asked) -> None:
        """Between two looks an answer may fail because nobody could serve it for a moment."""
        if asked.over and not asked.unserved:
            router = self.routers[asked.seat]
            asked.unserved = asked.pages > max((self._room(each, router) for each in self.instances.values()), default=0)

    def _room(self, instance: ToyInstance, router: ToyRouter) -> int:
        """Pages that it could give to one request of this router: a decode instance serves alone, if need be, unless too much of
        its memory waits for the end of writes."""
        is_up = router.alive and self._is_up(instance.name.id, router.name)
        if instance.info.role != "decode" or not is_up or instance in self._leaving or instance.worker._role.wanted == "prefill":
            return 0
        load = instance.scheduler.report().load
        is_whole = load.pages_quarantined * QUARANTINE_DIVISOR <= load.pages_total
        return load.pages_total - load.pages_quarantined if is_whole else 0

    def _is_up(self, name: InstanceId, router: InstanceId) -> bool:
        """Its process runs, and the router can reach it."""
        now, instance = self.clock.now, self.instances.get(name)
        return instance is not None and instance.is_up and self.storm.cut_until(name, router, now) <= now

    def _note(self, event: str) -> None:
        self.on_event(f"{self.clock.now:9.4f}  == {event}")
