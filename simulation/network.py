"""The network of a simulated fleet: letters on their way, and how each fares.

Owns the letters and the mailboxes. Opens no socket. What becomes of a letter is the weather's to say. Knows no roles.

The CPU time of the processes of one role, by what they do.

Owns the sample. Some turns are timed and stand for all: a clock of CPU time costs as much as a small message. The simulated clock
never depends on it, so a run can be repeated exactly however long its turns took.

What was sent between the processes of a simulated fleet: messages and bytes, by kind and direction.

Owns the counts. Knows no messages and no time.
"""

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Generic, Protocol, TypeVar, assert_never

import msgspec

from common import messages as m
from common.ids import AttemptId, InstanceId
from common.mail import RECEIVE_LIMIT, FrameRefused, decode_body, pack_frame
from common.messages import AnyMessage
from common.messages.ranks import Command, Numbered, PushOrder, RankHello, RankRefused, RankWelcome, SettleOrder
from simulation.clock import NEVER, Clock

STRIDE = 13
"""One turn in so many is timed. Prime, so that it meets every member of a fleet whose size is a round number."""


class Meter:
    """One for all processes of a role, whose turns do not overlap. clock: CPU seconds of this thread."""

    def __init__(self, clock: Callable[[], float] = time.thread_time, stride: int = STRIDE) -> None:
        self._clock = clock
        self._stride = stride
        self._turns = self._timed = 0
        self._seconds: dict[str, float] = {}
        self._since_s = 0.0
        self.timing = False
        """Whether the present turn is timed."""

    def begin(self) -> None:
        """A turn begins."""
        self._turns += 1
        self.timing = self._turns % self._stride == 0
        if self.timing:
            self._timed += 1
            self._since_s = self._clock()

    def lap(self, what: str) -> None:
        """What was done since the last lap, or since the turn began, was this."""
        if self.timing:
            now = self._clock()
            self._seconds[what] = self._seconds.get(what, 0.0) + now - self._since_s
            self._since_s = now

    def clear(self) -> None:
        """Begin to measure anew."""
        self._turns = self._timed = 0
        self._seconds.clear()

    def seconds(self) -> Mapping[str, float]:
        """CPU seconds by what was done, as far as the sample tells."""
        share = self._timed / self._turns if self._turns else 1.0
        return {what: seconds / share for what, seconds in self._seconds.items()}


@dataclass(slots=True, eq=False)
class MessageCount:
    """Messages of one kind in one direction, and the bytes of their frames."""

    messages: int = 0
    frame_bytes: int = 0


class NetworkTraffic:
    """by_way: by (role of the sender, kind of the message, role of the receiver). Each send counts once, also if it is lost."""

    def __init__(self) -> None:
        self.messages = self.frame_bytes = 0
        self._by_way: dict[tuple[str, str, str], MessageCount] = {}

    @property
    def by_way(self) -> Mapping[tuple[str, str, str], MessageCount]:
        return self._by_way

    def add(self, sender: str, kind: str, receiver: str, frame_bytes: int) -> None:
        tally = self._by_way.get((sender, kind, receiver))
        if tally is None:
            tally = self._by_way[sender, kind, receiver] = MessageCount()
        tally.messages += 1
        tally.frame_bytes += frame_bytes
        self.messages += 1
        self.frame_bytes += frame_bytes

    def clear(self) -> None:
        """Begin to count anew."""
        self._by_way.clear()
        self.messages = self.frame_bytes = 0


M = TypeVar("M")
DELAY_S = 0.001
KNOCKS_S = 0.3
"""How long it takes to find out that a process is gone."""
MEMBERSHIP = frozenset({"Heartbeat", "Register", "Welcome", "Peers", "TellLinks", "LinkReport", "DetokenizerHeartbeat"})
"""Kinds of letters that are sent all the time."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message on its way, and its bytes. kind: its class name, for people and for `log`. message: None for any bytes."""

    sender: InstanceId
    to: InstanceId
    kind: str
    message: AnyMessage | None
    body: bytes


def keys_of(message: AnyMessage) -> set[AttemptId]:
    """The requests that a message is about."""
    match message:
        case m.TokenBatch() | m.TextBatch():
            return {delta.key for delta in message.deltas}
        case m.Renew():
            return {claim.key for claim in message.claims}
        case m.Renewed():
            return set(message.over)
        case m.Probe():
            return set(message.keys)
        case m.Repeat():
            return {key for key, _ in message.tokens}
        case m.Probed():
            return {standing.key for standing in message.standings}
        case m.Generate() | m.Cancel() | m.Placed() | m.Reserve() | m.Grant() | m.Decline() | m.Handoff() | m.Withdraw():
            return {message.key}
        case m.ExpectAnswer() | m.ForgetAnswer():
            return {message.key}
        case m.Register() | m.Heartbeat() | m.Goodbye() | m.DetokenizerHeartbeat() | m.Welcome() | m.Refused() | m.Peers():
            return set()
        case m.Drain() | m.FlushCache() | m.TellCache() | m.CacheChanges() | m.TellLinks() | m.LinkReport():
            return set()
        case m.Trace() | m.Spans():
            return set()
        case Command(order=PushOrder() | SettleOrder() as order):
            return {order.key}
        case Numbered() | RankHello() | RankWelcome() | RankRefused():
            return set()
        case _:
            assert_never(message)


@cache
def frame_bytes(sender: InstanceId) -> int:
    """What the wire adds to a message of this sender."""
    return len(pack_frame(sender, b""))


class Weather(Protocol):
    """Who says what becomes of letters."""

    def delays(self, sender: InstanceId, to: InstanceId, now: float, kind: str) -> tuple[float, ...]:
        """After how many seconds a letter of this kind arrives, once for each time that it does; none: it is lost."""


class Calm:
    """Every letter arrives, once, after the same time."""

    def __init__(self, delay_s: float = DELAY_S) -> None:
        self._delays = (delay_s,)

    def delays(self, sender: InstanceId, to: InstanceId, now: float, kind: str) -> tuple[float, ...]:
        return self._delays


@dataclass(slots=True, eq=False)
class SimulatedMailbox:
    """What has been sent to one address. owner: who reads it. wake: called with the time at which a letter arrives. role: the
    owner's, for people. is_open: its process lives. watchers: who want to know when it is gone."""

    owner: InstanceId
    wake: Callable[[float], None]
    role: str
    is_open: bool = True
    watchers: list["Post[Any]"] = field(default_factory=list)
    letters: list[tuple[float, int, Letter]] = field(default_factory=list)

    def next_deadline(self) -> float:
        return self.letters[0][0] if self.letters else NEVER

    def take(self, now: float, most: int) -> list[Letter]:
        """What has arrived, in the order of arrival, but at most so many letters."""
        taken: list[Letter] = []
        while len(taken) < most and self.letters and self.letters[0][0] <= now:
            taken.append(heapq.heappop(self.letters)[2])
        return taken


class Network:
    """Every mailbox by its address. log: (sender, kind, receiver), without membership. taps: told of every letter that is sent,
    with its message and its delays. traffic: what was sent, in totals.

    brief: for long runs. It keeps no log, and a message is decoded only where that is timed: messages are
    frozen, so readers may share them.
    """

    def __init__(self, clock: Clock, weather: Weather, brief: bool = False) -> None:
        self.clock = clock
        self.weather = weather
        self.brief = brief
        self.traffic = NetworkTraffic()
        self.meters: dict[str, Meter] = {}
        self.log: list[tuple[str, str, str]] = []
        self.taps: list[Callable[[Letter, AnyMessage, tuple[float, ...]], None]] = []
        self._mailboxes: dict[str, SimulatedMailbox] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._last: AnyMessage | None = None
        self._last_body = b""
        self.letters = 0
        """Sent so far, each copy counted."""

    def open(self, address: str, owner: InstanceId, wake: Callable[[float], None], role: str) -> SimulatedMailbox:
        """The mailbox at this address, whose letters go to whoever opened it last."""
        mailbox = self._at(address)
        mailbox.owner, mailbox.wake, mailbox.role, mailbox.is_open = owner, wake, role, True
        return mailbox

    def close(self, address: str) -> None:
        """The process of its owner is gone, and its host refuses connections."""
        mailbox = self._at(address)
        mailbox.is_open = False
        for watcher in mailbox.watchers:
            self._knock(address, mailbox, watcher)

    def _knock(self, address: str, mailbox: SimulatedMailbox, watcher: "Post[Any]") -> None:
        """He tries to connect again, until it is refused, or somebody is there."""
        if mailbox.is_open:
            return
        delays = self.weather.delays(mailbox.owner, watcher.me, self.clock.now, "knock")
        answered_s = self.clock.now + KNOCKS_S + (delays[0] if delays else 0.0)
        again = partial(self._knock, address, mailbox, watcher)
        self.clock.at(answered_s, partial(watcher.knocked, address, mailbox) if delays else again)

    def is_open(self, address: str) -> bool:
        return self._at(address).is_open

    def watch(self, address: str, watcher: "Post[Any]") -> None:
        """Tell it when the owner's process is gone."""
        self._at(address).watchers.append(watcher)

    def _at(self, address: str) -> SimulatedMailbox:
        nobody: Callable[[float], None] = lambda at_s: None  # noqa: E731  nobody has opened it yet
        return self._mailboxes.setdefault(address, SimulatedMailbox(InstanceId(address), nobody, "nobody"))

    def throw(self, sender: InstanceId, address: str, body: bytes) -> None:
        """These bytes arrive there now, whoever sent them and whatever they are."""
        mailbox = self._at(address)
        self.letters += 1
        letter = Letter(sender, mailbox.owner, "bytes", None, body)
        heapq.heappush(mailbox.letters, (self.clock.now, self.letters, letter))
        mailbox.wake(self.clock.now)

    def meter(self, role: str) -> Meter:
        """That of all processes of this role."""
        return self.meters.setdefault(role, Meter())

    def post(self, sender: InstanceId, to: InstanceId, address: str, message: AnyMessage, role: str) -> None:
        """What is sent to an address at which nobody ever was is lost. role: the sender's."""
        if message is not self._last:  # what goes to many is encoded once, as on the wire
            self._last, self._last_body = message, self._encode(message)
        mailbox = self._mailboxes.get(address)
        to = to if mailbox is None else mailbox.owner
        letter = Letter(sender, to, type(message).__name__, message, self._last_body)
        delays = self.weather.delays(sender, to, self.clock.now, letter.kind)
        if not self.brief and letter.kind not in MEMBERSHIP:
            self.log.append((sender, letter.kind, to))
        for tap in self.taps:
            tap(letter, message, delays)
        if mailbox is None:
            return
        self.traffic.add(role, letter.kind, mailbox.role, len(letter.body) + frame_bytes(sender))
        for delay_s in delays:
            arrives_s = self.clock.now + delay_s
            self.letters += 1
            heapq.heappush(mailbox.letters, (arrives_s, self.letters, letter))
            mailbox.wake(arrives_s)


class Post(Generic[M]):
    """Implements `common.instance.ports.Mail` over the network. What goes to somebody whose address is not known is lost."""

    def __init__(
        self, me: InstanceId, inbox: Any, network: Network, mailbox: SimulatedMailbox, routes: Mapping[InstanceId, str]
    ) -> None:
        self.me = me
        self._gone: list[InstanceId] = []
        self._meter = network.meter(mailbox.role)
        self._network = network
        self._mailbox = mailbox
        self._routes = dict(routes)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(inbox)
        self.messages_lost: dict[str, int] = {"no route": 0}
        self.frames_refused: dict[str, int] = {}

    def send(self, to: InstanceId, message: AnyMessage) -> None:
        address = self._routes.get(to)
        if address is None:
            self.messages_lost["no route"] += 1
        else:
            self._network.post(self.me, to, address, message, self._mailbox.role)

    def receive(self, most: int = RECEIVE_LIMIT) -> list[tuple[InstanceId, M]]:
        letters = self._mailbox.take(self._network.clock.now, most)
        if self._network.brief and not self._meter.timing:
            return [(letter.sender, letter.message) for letter in letters]  # type: ignore[misc]
        mail: list[tuple[InstanceId, M]] = []
        for letter in letters:
            try:
                mail.append((letter.sender, decode_body(self._decoder, letter.sender, letter.body)))
            except FrameRefused as error:
                self.frames_refused[error.reason] = self.frames_refused.get(error.reason, 0) + 1
            self._meter.lap(letter.kind)
        return mail

    def route(self, to: InstanceId, address: str | None, *, watch: bool = False) -> None:
        if address is None:
            self._routes.pop(to, None)
        elif self._routes.get(to) != address:
            self._routes[to] = address
            if watch:
                self._network.watch(address, self)

    def knocked(self, address: str, mailbox: SimulatedMailbox) -> None:
        """Somebody who is watched was gone a moment ago: find out whether he still is."""
        if not mailbox.is_open:
            self._gone += [name for name, at in self._routes.items() if at == address]
            self._mailbox.wake(self._network.clock.now)

    def reaches(self, to: InstanceId) -> bool:
        return self._network.is_open(self._routes[to])

    def refused(self) -> list[InstanceId]:
        gone, self._gone = self._gone, []
        return gone

    def next_deadline(self) -> float:
        """When the next letter arrives."""
        return self._mailbox.next_deadline()
