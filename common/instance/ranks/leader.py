"""The leader's followers: who is let in as one, what all agree on, the lines to them, and what came over these.

Owns the start of an instance with several ranks as the leader sees it, and then the reports of the followers until the executor
or the transfers take them. Decides nothing but who is let in and that the instance ends: when a follower is gone, silent, has
failed, or a message of its was lost, `turn` raises RankLost. Opens no socket; its clock is its caller's.

    gathering   ─ hello of every rank, and open() ─► welcome
    starting    ─ rounds of offers: the least is agreed ─► all are ready
    serving     plans and commands go out, reports come back

Before the welcome a rank may leave and come again: it is missing when its process is gone or says hello no more. After the
welcome, a rank that is lost ends the instance. A process that says it is a rank which is there already may be that one's
successor: it is refused when the first is heard again after it; until then it gets no answer and asks again.

Another thread may load the model meanwhile, and say what this rank offers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from common.absence import Absence
from common.errors import ConfigError
from common.ids import InstanceId
from common.instance.ports import Mail
from common.instance.ranks.line import PING_S, SILENCE_S, START_SILENCE_S, RankLine, RankLost, RankStepFailed, describe
from common.messages import Failed, ModelIdentity, PoolDescriptor, RankInfo
from common.messages.base import WIRE_VERSION
from common.messages.ranks import (
    Agreed,
    AskDrain,
    DoOnRank,
    DropGrammars,
    End,
    Events,
    FromFollower,
    FromLeader,
    GrammarPrepared,
    LayersReached,
    Offer,
    Order,
    Ping,
    Pong,
    PrepareGrammar,
    RankDone,
    RankFailed,
    RankHello,
    RankReady,
    RankRefused,
    RankWelcome,
    StepReturned,
    ToLeader,
    TransferOrder,
)
from common.messages.transfers import Allow, PackedPush, Push, TransferCommand, TransferEvent
from common.messages.variants import Task, WeightsSource
from common.sampling_params import Grammar

ABSENT_S = 5.0
"""A rank that has said no hello for so long is missing. Hellos come every second until the welcome."""
PROOF_S = 1.0
"""How long a failed step waits for the proof that a rank is gone. When one dies, the steps of all others fail at once, and only
its end tells which it was: the host refuses connections after a third of a second."""
MOST_REFUSED = 64
"""The routes to so many that were refused are kept, and the reasons."""
WORK_REMEMBERED = 256
"""How many results of a rank's work are kept: more than are under way at once."""
IN_START = (Offer, RankReady)
"""What comes before all ranks serve, and not after."""
ALWAYS = (Pong, AskDrain, RankFailed)


@dataclass(slots=True, eq=False)
class FollowerLine:
    """The line to one follower, and its reports that were not taken yet."""

    rank: int
    line: RankLine
    info: RankInfo
    """As its hello said."""
    offer: int | None = None
    """How many pages it can hold, while that is not agreed."""
    ready: RankReady | None = None
    rival: tuple[InstanceId, RankHello, float] | None = None
    """Who says that it is this rank too, and since when."""
    returned: dict[int, int] = field(default_factory=dict)
    """Step → CRC of the tokens that it has sampled."""
    layers: dict[int, int] = field(default_factory=dict)
    """Running step → how many of its layers are written."""
    prepared: dict[int, Failed | None] = field(default_factory=dict)
    """Grammar → why it cannot be used, or None."""
    done: dict[int, RankDone] = field(default_factory=dict)
    """What it has done beside the steps, the latest last."""
    events: deque[TransferEvent] = field(default_factory=deque)
    held: list[TransferCommand] = field(default_factory=list)
    """Commands that wait until it is known how the clocks differ."""
    transfers_progress_s: float = 0.0
    has_failed: bool = False
    """It has said why it ends. That it is gone then proves nothing."""


class Followers:
    """ranks: how many the instance has. setup: what must be equal on all of them (`RankHello.setup`). `turn` is called until all
    is complete, then `serve`; from then on `turn` is called before each turn of the instance's worker."""

    def __init__(self, mail: Mail[ToLeader], ranks: int, setup: Mapping[str, str]) -> None:
        self._mail = mail
        self._ranks = ranks
        self._setup = setup
        self._all: list[FollowerLine] = []
        """Those that are there, in the order of ranks."""
        self._by_name: dict[InstanceId, FollowerLine] = {}
        self._refused: dict[InstanceId, tuple[int, str]] = {}
        """Rank and reason of those that were refused, for people. The oldest first; the routes to them are kept."""
        self._meeting: str | None = None
        self._own: tuple[ModelIdentity, PoolDescriptor] | None = None
        self._offer: int | None = None
        self.agreed: int | None = None
        """How many pages all ranks use; None: that is not known yet for the latest offer."""
        self.welcomed = False
        self._serves = False
        self._grammars: set[int] = set()
        """Those that followers keep."""
        self._last_work = 0
        self._now = self._ping_s = 0.0
        self._ended = False
        self._absence = Absence()
        self._failure: tuple[RankLost, float] | None = None
        """The first failure of a step, and until when it waits for the proof that another rank has caused it."""
        self.stale = 0
        """Messages from former lives of ranks."""
        self.drain_asked = False
        """A follower's process was told to stop."""

    def __iter__(self) -> Iterator[FollowerLine]:
        return iter(self._all)

    # --- start: for the thread that loads ---------------------------------------------------------------------------------------

    def open(self, meeting: str) -> None:
        """The ranks' collectives may meet there: welcome the followers as soon as all are here."""
        self._meeting = meeting

    def offer(self, pages: int) -> None:
        """This rank can hold so many pages. Offer again only when it is known what is agreed."""
        self._offer, self.agreed = pages, None

    def ready(self, model: ModelIdentity, pool: PoolDescriptor) -> None:
        """This rank can take plans and writes."""
        self._own = model, pool

    @property
    def complete(self) -> bool:
        """All ranks are ready."""
        return self._own is not None and self.welcomed and all(each.ready is not None for each in self._all)

    def serve(self, now: float) -> None:
        """All ranks take plans and writes from now on."""
        self._serves, self._now, self._ping_s = True, now, now
        for follower in self._all:
            follower.transfers_progress_s = now

    @property
    def missing(self) -> list[int]:
        """The ranks that have not said hello. For any thread."""
        there = {each.rank for each in self._all}
        return [rank for rank in range(1, self._ranks) if rank not in there]

    @property
    def refused(self) -> list[str]:
        """Who was refused and is missed, or is no rank at all, and why: the latest of each number. For people."""
        there = {each.rank for each in self._all}
        latest = {rank: reason for rank, reason in self._refused.values() if rank not in there or not 1 <= rank < self._ranks}
        return list(latest.values())

    @property
    def infos(self) -> list[RankInfo]:
        """In the order of ranks. Only when it is complete."""
        readies = [(each.info, each.ready) for each in self._all if each.ready is not None]
        return [replace(info, device=ready.pool.device, engine=ready.engine) for info, ready in readies]

    @property
    def pools(self) -> list[PoolDescriptor]:
        """In the order of ranks. Only when it is complete."""
        return [each.ready.pool for each in self._all if each.ready is not None]

    # --- turns ------------------------------------------------------------------------------------------------------------------

    def turn(self, clock: Callable[[], float]) -> None:
        """Take in mail, and send what is due. Raises RankLost, and ConfigError while the instance starts."""
        began = clock()
        if self._absence.begins(began):
            for follower in self._all:
                follower.line.forgive(began)
        self._take_turn(clock, began)
        self._absence.ends(began, clock(), self.next_deadline())

    def _take_turn(self, clock: Callable[[], float], began: float) -> None:
        mail = self._mail.receive()
        now = self._now = clock()  # not before the mail has arrived: `RankLine.compare_clocks`
        for sender, message in mail:
            follower = self._by_name.get(sender)
            if isinstance(message, RankHello):
                self._hello(sender, message, now)
            elif follower is None or not self.welcomed:
                self.stale += 1
            else:
                follower.line.take(message, now)
                self._refuse_rival(follower, now)
                self._take(follower, message, now)
        lost = [self._by_name[name] for name in self._mail.refused() if name in self._by_name]
        if not self.welcomed:
            self._gather(lost, began)
            return
        for follower in lost:
            if not follower.has_failed:
                raise RankLost(f"{follower.line.who} is gone")
        for follower in self._all:
            follower.line.check(began, self._silence_s)  # mail may wait that came later
        if self._failure is not None and now >= self._failure[1]:
            raise self._failure[0]
        if now >= self._ping_s:
            self._ping_s = now + PING_S
            self.send(Ping(sent_s=now, serving=self._serves))
        if not self._serves:
            self._agree()

    def next_deadline(self) -> float:
        """When the next turn is due even if nothing happens before."""
        if not self.welcomed:
            return self._now + PING_S
        proven_s = self._ping_s if self._failure is None else self._failure[1]
        return min(self._ping_s, proven_s, *(follower.line.heard_s + self._silence_s for follower in self._all))

    @property
    def _silence_s(self) -> float:
        """A rank that is silent for longer is lost: importing and compiling keep an interpreter for seconds."""
        return SILENCE_S if self._serves else START_SILENCE_S

    def failed(self, reason: str, step: int | None) -> None:
        """A rank cannot go on: the instance ends, for this reason unless another rank proves to be gone. step: the one that has
        failed there; None: it was no step."""
        error = RankLost(reason) if step is None else RankStepFailed(reason, step)
        self._failure = self._failure or (error, self._now + PROOF_S)

    def send(self, message: FromLeader) -> None:
        """To all."""
        for follower in self._all:
            follower.line.send(message)

    def prepare(self, grammar_id: int, grammar: Grammar, owner: str = "") -> None:
        self._grammars.add(grammar_id)
        grammar = Grammar(grammar.kind, grammar.text)  # a message that waits keeps no request's alive
        self.send(PrepareGrammar(grammar_id=grammar_id, grammar=grammar, owner=owner))

    def drop_grammars(self, grammar_ids: Sequence[int]) -> None:
        self._grammars -= set(grammar_ids)
        for follower in self._all:
            for grammar_id in grammar_ids:
                follower.prepared.pop(grammar_id, None)
        self.send(DropGrammars(grammar_ids=tuple(grammar_ids)))

    def perform(self, task: WeightsSource | Task) -> int:
        """Have all do this beside the steps. Returns the number under which they report it."""
        self._last_work += 1
        self.send(DoOnRank(work=self._last_work, task=task))
        return self._last_work

    def command(self, follower: FollowerLine, command: TransferCommand) -> None:
        """For its transfers. Commands wait, in order, until the first ping is answered."""
        offset_s = follower.line.clock_offset_s
        if offset_s is None:
            follower.held.append(command)
            return
        match command:
            case Push():
                order: Order = PackedPush.pack(command)
            case Allow():
                order = replace(command, until_s=command.until_s + offset_s)
            case _:
                order = command
        follower.line.send(TransferOrder(order=order))

    def end(self, reason: str, *, orderly: bool = False) -> None:
        """Tell all that were welcomed to exit. orderly: the instance has drained. Idempotent."""
        if self.welcomed and not self._ended:
            self._ended = True
            self.send(End(reason=reason, orderly=orderly))

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _hello(self, sender: InstanceId, hello: RankHello, now: float) -> None:
        """Once all are there, one that is lost may have a successor, whom the next life of the leader judges and lets in."""
        known = next((each for each in self._all if each.rank == hello.rank), None)
        if known is not None and known.line.to == sender:
            if not self.welcomed:
                known.line.heard_s = now
            self._refuse_rival(known, now)
        elif not (self.welcomed and known) and (reason := self._why_not(hello)) is not None:
            self._refuse(sender, hello, reason)
        elif known is None:
            self.admit(sender, hello, now)
        elif known.rival is None or known.rival[0] != sender:
            known.rival = sender, hello, now

    def admit(self, sender: InstanceId, hello: RankHello, now: float) -> None:
        """This process is that rank."""
        self._mail.route(sender, hello.address, watch=True)
        follower = FollowerLine(hello.rank, RankLine(self._mail, sender, describe(hello), now), hello.info)
        self._by_name[sender] = follower
        self._all = sorted(self._by_name.values(), key=lambda each: each.rank)

    def _refuse(self, sender: InstanceId, hello: RankHello, reason: str) -> None:
        self._refused.pop(sender, None)
        self._refused[sender] = hello.rank, f"{describe(hello)} was refused: {reason}"
        self._mail.route(sender, hello.address)
        self._mail.send(sender, RankRefused(reason=reason))
        if len(self._refused) > MOST_REFUSED:
            oldest = next(iter(self._refused))
            del self._refused[oldest]
            self._mail.route(oldest, None)

    def _refuse_rival(self, follower: FollowerLine, now: float) -> None:
        """The rank that is there has been heard. What came in the same turn may be older than its rival."""
        if follower.rival is not None and follower.rival[2] < now:
            rival, hello, _ = follower.rival
            follower.rival = None
            self._refuse(rival, hello, f"{follower.line.who} is there already")

    def _why_not(self, hello: RankHello) -> str | None:
        if hello.wire_version != WIRE_VERSION:
            return f"it has wire version {hello.wire_version}, and rank 0 has {WIRE_VERSION}: all ranks need the same version"
        if hello.ranks != self._ranks:
            return f"it was started with --tp {hello.ranks}, and rank 0 with --tp {self._ranks}"
        if not 1 <= hello.rank < self._ranks:
            return f"there is no rank {hello.rank} besides rank 0 with --tp {self._ranks}"
        for name in sorted({*self._setup, *hello.setup}):
            ours, theirs = self._setup.get(name, "nothing"), hello.setup.get(name, "nothing")
            if ours != theirs:
                return f"{name} is {theirs} there, and {ours} on rank 0: all ranks need the same"
        return None

    def _gather(self, lost: Sequence[FollowerLine], now: float) -> None:
        """Forget those that are gone or say hello no more; welcome all as soon as they are here and may meet."""
        for follower in list(self._all):
            if follower in lost or now - follower.line.heard_s > ABSENT_S:
                self._all.remove(follower)
                del self._by_name[follower.line.to]
                self._mail.route(follower.line.to, None)
        if self._meeting is not None and not self.missing:
            self.welcomed = True
            for follower in self._all:
                follower.line.heard_s = now
                self._mail.send(follower.line.to, RankWelcome(meeting=self._meeting))

    def _agree(self) -> None:
        """Raises ConfigError when a rank is ready that is unlike this one."""
        offers = [offer for offer in (self._offer, *(each.offer for each in self._all)) if offer is not None]
        if len(offers) == self._ranks:
            self.agreed, self._offer = min(offers), None
            for each in self._all:
                each.offer = None
            self.send(Agreed(pages=self.agreed))
        for each in self._all:
            if self._own is not None and each.ready is not None:
                _compare(each.rank, each.ready, *self._own)

    def _take(self, follower: FollowerLine, message: FromFollower, now: float) -> None:
        """Raises RankLost."""
        if isinstance(message, IN_START) if self._serves else not isinstance(message, IN_START + ALWAYS):
            raise follower.line.unexpected(message, self._serves)
        match message:
            case StepReturned(step=step, digest=digest):
                follower.returned[step] = digest
            case LayersReached(step=step, layers=layers):
                follower.layers[step] = layers
            case Events(news=news):
                follower.events.extend(news)
            case GrammarPrepared(grammar_id=grammar_id, refused=refused):
                if grammar_id in self._grammars:
                    follower.prepared[grammar_id] = refused
            case RankDone(work=work):
                follower.done[work] = message
                if len(follower.done) > WORK_REMEMBERED:
                    del follower.done[next(iter(follower.done))]
            case Pong():
                follower.line.compare_clocks(message.heard_s, now)
                follower.transfers_progress_s = now - message.transfer_age_s
                held, follower.held = follower.held, []
                for command in held:
                    self.command(follower, command)
            case Offer(pages=pages):
                follower.offer = pages
            case RankReady():
                follower.ready = message
            case AskDrain():
                if not self._serves:
                    raise RankLost(f"{follower.line.who} was told to stop")
                self.drain_asked = True
            case RankFailed(reason=reason, step=step):
                if not self._serves:
                    raise RankLost(f"{follower.line.who} failed: {reason}")
                follower.has_failed = True
                self.failed(f"{follower.line.who} failed: {reason}", step)
            case _:
                assert_never(message)


class RemoteTransfers:
    """The transfers of one follower. Implements `common.instance.ports.Transfers` by messages."""

    def __init__(self, followers: Followers, follower: FollowerLine) -> None:
        self._followers = followers
        self._follower = follower

    def submit(self, command: TransferCommand) -> None:
        self._followers.command(self._follower, command)

    def poll(self) -> list[TransferEvent]:
        events = list(self._follower.events)
        self._follower.events.clear()
        return events

    @property
    def progress_s(self) -> float:
        return self._follower.transfers_progress_s

    def close(self) -> None:
        """The follower closes its transfers when it is told to end."""


def remote_transfers(followers: Followers) -> list[RemoteTransfers]:
    """Those of each follower, in the order of ranks."""
    return [RemoteTransfers(followers, follower) for follower in followers]


def _compare(rank: int, theirs: RankReady, model: ModelIdentity, pool: PoolDescriptor) -> None:
    """Raises ConfigError that names the first difference."""
    other = theirs.pool
    for name, there, ours in (
        ("the model", theirs.model, model),
        ("the transport", other.backend, pool.backend),
        ("a page", other.layout, pool.layout),
        ("the number of pages", other.total_pages, pool.total_pages),
    ):
        if there != ours:
            raise ConfigError(f"rank {rank} differs from rank 0 in {name}: {there} there, {ours} on rank 0")
