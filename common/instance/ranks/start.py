"""The start of an instance with several ranks: they gather, agree on a number of pages, and are ready.

Owns what each side of the start has sent and received. Opens no socket. `turn` takes in mail, reads the clock that it is given,
and sends what has become due. Another thread may load the model meanwhile, and say what this rank offers.

    follower   hello, again and again ─► welcome ─► offers, each answered with what is agreed ─► ready
    leader     missing ─hello of every rank, and open()─► welcome ─► rounds of offers: the least is agreed ─► all are ready

Before the welcome a rank may leave and come again: it is missing when its process is gone or says hello no more. After the
welcome, a rank that is lost ends the instance.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from common.errors import ConfigError, PeerRefused
from common.ids import InstanceId
from common.instance.ports import Mail
from common.instance.ranks.leader import Followers
from common.instance.ranks.line import PING_S, START_SILENCE_S, RankLine, RankLost, Refusals, describe
from common.messages import EngineChoices, ModelIdentity, PoolDescriptor, RankInfo
from common.messages.base import WIRE_VERSION
from common.messages.ranks import (
    Agreed,
    AskDrain,
    End,
    Offer,
    Ping,
    Pong,
    RankFailed,
    RankHello,
    RankReady,
    RankRefused,
    RankWelcome,
    ToFollower,
    ToLeader,
)

HELLO_S = 1.0
SOMEBODY = InstanceId("rank-0")
"""The leader, whose name is not known before it answers."""


class RankStart(ABC):
    """One side of the start."""

    def __init__(self) -> None:
        self._offers: list[int] = []
        """How many pages this rank can hold, by the number of the round."""
        self._agreed: list[int] = []
        """How many pages all ranks use, by the number of the round."""

    # --- for the thread that loads ---------------------------------------------------------------------------------------------

    def offer(self, pages: int) -> int:
        """This rank can hold so many pages. Returns the number of the round."""
        self._offers.append(pages)
        return len(self._offers) - 1

    def agreed(self, number: int) -> int | None:
        """The pages that all ranks use, of that round; None: it is not known yet."""
        return self._agreed[number] if number < len(self._agreed) else None

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Nothing is left to do for this side."""

    # --- for the thread that turns ---------------------------------------------------------------------------------------------

    @abstractmethod
    def turn(self, clock: Callable[[], float]) -> None:
        """Take in mail and send what is due. Raises RankLost, and what the side names."""

    @abstractmethod
    def next_deadline(self, now: float) -> float:
        """When the next turn is due even if nothing happens before."""

    @abstractmethod
    def end(self, reason: str) -> None:
        """Tell the other side that this rank cannot go on."""


class Joining(RankStart):
    """A follower's side. leader: the address of rank 0."""

    def __init__(self, mail: Mail[ToFollower], leader: str, hello: RankHello) -> None:
        super().__init__()
        self._mail = mail
        self._leader = leader
        self._hello = hello
        self._hello_s = 0.0
        self._line: RankLine | None = None
        self._offered = 0
        """How many of the offers were sent."""
        self._ready: tuple[ModelIdentity, PoolDescriptor, EngineChoices] | None = None
        self._complete = False
        self.welcome: RankWelcome | None = None
        mail.route(SOMEBODY, leader, watch=True)

    def ready(self, model: ModelIdentity, pool: PoolDescriptor, engine: EngineChoices = EngineChoices()) -> None:  # noqa: B008
        """This rank can take plans and writes. They may come from then on: no `turn` takes them in."""
        self._ready = model, pool, engine

    @property
    def waits_for(self) -> str:
        """Why it is not welcome yet, for people; empty when it is. For any thread."""
        if self.welcome is not None:
            return ""
        if self._mail.reaches(SOMEBODY):
            return f"rank 0 at {self._leader} waits for other ranks, which it names"
        return f"nobody answered at {self._leader}: does rank 0 listen there, with the same --cluster-key?"

    @property
    def complete(self) -> bool:
        """The leader was sent that this rank is ready."""
        return self._complete

    @property
    def line(self) -> RankLine:
        """To the leader. Only after the welcome."""
        assert self._line is not None
        return self._line

    # --- the protocol ----------------------------------------------------------------------------------------------------------

    def turn(self, clock: Callable[[], float]) -> None:
        """Raises PeerRefused when this cannot be a rank of the instance, and RankLost."""
        if self._complete:
            return
        gone = self._mail.refused()  # read in each turn, and before the mail: a leader that was gone before is not this one
        if self._line is not None and self._line.to in gone:
            raise RankLost(f"{self._line.who} is gone")
        now = clock()
        for sender, message in self._mail.receive():
            match message:
                case RankWelcome():
                    if self._line is None:
                        self._line = RankLine(self._mail, sender, f"rank 0 at {self._leader}", now)
                        self._mail.route(sender, self._leader, watch=True)
                        self.welcome = message
                case RankRefused(reason=reason):
                    if self._line is None:
                        raise PeerRefused(f"rank 0 at {self._leader} refuses rank {self._hello.rank}: {reason}")
                case _:
                    if self._line is not None and sender == self._line.to:
                        self._line.take(message, now)
                        self._take(message, now)
        if self._line is None:
            if now >= self._hello_s:
                self._hello_s = now + HELLO_S
                self._mail.send(SOMEBODY, self._hello)
            return
        self._line.check(now, START_SILENCE_S)
        while self._offered < len(self._offers):
            self._line.send(Offer(pages=self._offers[self._offered]))
            self._offered += 1
        if self._ready is not None:
            model, pool, engine = self._ready
            self._line.send(RankReady(model=model, pool=pool, engine=engine))
            self._complete = True

    def next_deadline(self, now: float) -> float:
        return self._hello_s if self._line is None else now + HELLO_S

    def end(self, reason: str) -> None:
        if self._line is not None:
            self._line.send(RankFailed(reason=reason))

    def _take(self, message: ToFollower, now: float) -> None:
        assert self._line is not None
        match message:
            case Ping(sent_s=sent_s):
                self._line.send(Pong(sent_s=sent_s, heard_s=now))
            case Agreed(pages=pages):
                self._agreed.append(pages)
            case End(reason=reason):
                raise RankLost(f"{self._line.who} has ended the start: {reason}")
            case _:
                raise RankLost(f"{self._line.who} sent {type(message).__name__} while the instance starts")


ABSENT_S = 5.0
"""A rank that has said no hello for so long is missing. Hellos come every second until the welcome."""


@dataclass(slots=True, eq=False)
class _JoinedFollower:
    """A follower that has said hello."""

    name: InstanceId
    info: RankInfo
    line: RankLine
    offers: list[int] = field(default_factory=list)
    """Its offers in the order of rounds."""
    ready: RankReady | None = None


class Gathering(RankStart):
    """The leader's side. ranks: how many the instance has. setup: what must be equal on all of them (`RankHello.setup`)."""

    def __init__(self, mail: Mail[ToLeader], ranks: int, setup: Mapping[str, str]) -> None:
        super().__init__()
        self._mail = mail
        self._ranks = ranks
        self._setup = setup
        self._joined: dict[int, _JoinedFollower] = {}
        self._refusals = Refusals(mail)
        self._meeting: str | None = None
        self._welcomed = False
        self._own: tuple[ModelIdentity, PoolDescriptor] | None = None
        self._ping_s = 0.0

    def open(self, meeting: str) -> None:
        """The ranks' collectives may meet there: welcome the followers as soon as all are here."""
        self._meeting = meeting

    def ready(self, model: ModelIdentity, pool: PoolDescriptor) -> None:
        """This rank can take plans and writes."""
        self._own = model, pool

    @property
    def missing(self) -> list[int]:
        """The ranks that have not said hello."""
        return [rank for rank in range(1, self._ranks) if rank not in self._joined]

    @property
    def refused(self) -> list[str]:
        """Who was refused and is missed, or is no rank at all, and why. For people."""
        return self._refusals.reasons(self._ranks, set(self._joined))

    @property
    def welcomed(self) -> bool:
        return self._welcomed

    @property
    def complete(self) -> bool:
        """All ranks are ready."""
        return self._own is not None and self._welcomed and all(each.ready is not None for each in self._joined.values())

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        """The followers, in the order of ranks. Only when it is complete."""
        infos = [self._joined[rank].info for rank in range(1, self._ranks)]
        readies = zip(infos, self._readies, strict=True)
        return tuple(replace(info, device=ready.pool.device, engine=ready.engine) for info, ready in readies)

    @property
    def pools(self) -> tuple[PoolDescriptor, ...]:
        """The followers' pools, in the order of ranks. Only when it is complete."""
        return tuple(ready.pool for ready in self._readies)

    @property
    def _readies(self) -> list[RankReady]:
        readies = [self._joined[rank].ready for rank in range(1, self._ranks)]
        return [ready for ready in readies if ready is not None]

    def followers(self, now: float) -> Followers:
        """Those that serve from now on. Only when it is complete; this object is not used any more."""
        return Followers(self._mail, [self._joined[rank].line for rank in range(1, self._ranks)], now, self._refusals)

    # --- the protocol ----------------------------------------------------------------------------------------------------------

    def turn(self, clock: Callable[[], float]) -> None:
        """Raises RankLost, ConfigError."""
        began = clock()
        mail = self._mail.receive()
        now = clock()  # not before the mail has arrived: `RankLine.compare_clocks`
        for sender, message in mail:
            if isinstance(message, RankHello):
                self._hello(sender, message, now)
                continue
            rank = next((rank for rank, each in self._joined.items() if each.name == sender), None)
            if rank is not None and self._welcomed:
                joined = self._joined[rank]
                joined.line.take(message, now)
                self._refusals.heard(rank, joined.line.who, now)
                self._take(joined, message, now)
        self._drop_gone(self._mail.refused(), began)
        if not self._welcomed and self._meeting is not None and not self.missing:
            self._welcomed = True
            for each in self._joined.values():
                each.line.heard_s = now
                self._mail.send(each.name, RankWelcome(meeting=self._meeting))
        if self._welcomed:
            self._go_on(began)

    def next_deadline(self, now: float) -> float:
        return self._ping_s if self._welcomed else now + PING_S

    def end(self, reason: str) -> None:
        if self._welcomed:
            for each in self._joined.values():
                each.line.send(End(reason=reason))

    def _go_on(self, now: float) -> None:
        for each in self._joined.values():
            each.line.check(now, START_SILENCE_S)
            if now >= self._ping_s:
                each.line.send(Ping(sent_s=now))
        if now >= self._ping_s:
            self._ping_s = now + PING_S
        number = len(self._agreed)
        if len(self._offers) > number and all(len(each.offers) > number for each in self._joined.values()):
            pages = min(self._offers[number], *(each.offers[number] for each in self._joined.values()))
            self._agreed.append(pages)
            for each in self._joined.values():
                each.line.send(Agreed(pages=pages))
        if self._own is not None:
            for rank, each in self._joined.items():
                if each.ready is not None:
                    _compare(rank, each.ready, *self._own)

    def _hello(self, sender: InstanceId, hello: RankHello, now: float) -> None:
        known = self._joined.get(hello.rank)
        if known is not None and known.name == sender:
            if not self._welcomed:
                known.line.heard_s = now
            self._refusals.heard(hello.rank, known.line.who, now)
        elif (reason := self._why_not(hello)) is not None:
            self._refusals.refuse(sender, hello, reason)
        elif known is not None:
            self._refusals.wait(sender, hello, now)
        else:
            self._refusals.joined(hello.rank)
            self._mail.route(sender, hello.address, watch=True)
            self._joined[hello.rank] = _JoinedFollower(sender, hello.info, RankLine(self._mail, sender, describe(hello), now))

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

    def _drop_gone(self, gone: list[InstanceId], now: float) -> None:
        """The processes of these are gone. Raises RankLost after the welcome."""
        for rank, each in list(self._joined.items()):
            if self._welcomed and each.name in gone:
                raise RankLost(f"{each.line.who} is gone")
            if not self._welcomed and (each.name in gone or now - each.line.heard_s > ABSENT_S):
                del self._joined[rank]
                self._mail.route(each.name, None)

    def _take(self, joined: _JoinedFollower, message: ToLeader, now: float) -> None:
        match message:
            case Offer(pages=pages):
                joined.offers.append(pages)
            case RankReady():
                joined.ready = message
            case Pong(heard_s=heard_s):
                joined.line.compare_clocks(heard_s, now)
            case RankFailed(reason=reason):
                raise RankLost(f"{joined.line.who} failed: {reason}")
            case AskDrain():
                raise RankLost(f"{joined.line.who} was told to stop")
            case _:
                raise RankLost(f"{joined.line.who} sent {type(message).__name__} while the instance starts")


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
