"""The network of a simulated fleet: letters on their way, how each fares, and what was sent and how much CPU time it took.

Owns the letters, the mailboxes, the counts of messages and the samples of CPU time. Opens no socket and knows no roles. What
becomes of a letter is the weather's to say. The simulated clock never depends on CPU time, so a run can be repeated exactly.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from common.ids import InstanceId
from common.mail import RECEIVE_LIMIT, FrameRefused, decode_body, pack_frame
from common.messages import AnyMessage
from simulation.clock import NEVER, Clock

STRIDE = 13
"""One turn in so many is timed. Prime, so that it meets every member of a fleet whose size is a round number."""


class Meter:
    """Samples the CPU time of all processes of a role, whose turns do not overlap.

    Some turns are timed and stand for all: a clock of CPU time costs as much as a small message.
    """

    def __init__(self) -> None:
        self._turns = self._timed = 0
        self._seconds: dict[str, float] = {}
        self._since_s = 0.0
        self.timing = False
        """Whether the present turn is timed."""

    def begin(self) -> None:
        """A turn begins."""
        self._turns += 1
        self.timing = self._turns % STRIDE == 0
        if self.timing:
            self._timed += 1
            self._since_s = time.thread_time()

    def lap(self, what: str) -> None:
        """What was done since the last lap, or since the turn began, was this."""
        if self.timing:
            now = time.thread_time()
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


M = TypeVar("M")
DELAY_S = 0.001
KNOCKS_S = 0.3
"""How long it takes to find out that a process is gone."""

MessageWay: TypeAlias = tuple[str, str, str]
"""The role of the sender, the kind of the message, and the role of the receiver."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message on its way."""

    sender: InstanceId
    to: InstanceId
    kind: str
    """The name of the message's class, for people and for counts."""
    message: AnyMessage | None
    """None for bytes that are no message."""
    body: bytes


@cache
def frame_bytes(sender: InstanceId) -> int:
    """What the wire adds to a message of this sender."""
    return len(pack_frame(sender, b""))


class Weather(Protocol):
    """What becomes of letters."""

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
    """What has been sent to one address."""

    owner: InstanceId
    """The process that reads it."""
    wake: Callable[[float], None]
    """Called with the time at which a letter arrives."""
    role: str
    """The owner's role, for people."""
    is_open: bool = True
    """The owner's process lives."""
    watchers: list["Post[Any]"] = field(default_factory=list)
    """Processes that want to know when the owner is gone."""
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
    """Every mailbox by its address."""

    def __init__(self, clock: Clock, weather: Weather) -> None:
        self.clock = clock
        self.weather = weather
        self.decodes_all = False
        """Messages are frozen, so readers may share them: they are decoded only where that is timed, unless this is set."""
        self.messages: Counter[MessageWay] = Counter()
        """How many messages were sent. Each send counts once, also if it is lost."""
        self.frame_bytes: Counter[MessageWay] = Counter()
        """The bytes of their frames."""
        self.meters: dict[str, Meter] = {}
        self.taps: list[Callable[[Letter, AnyMessage, tuple[float, ...]], None]] = []
        """Called with every letter that is sent, its message and its delays."""
        self._mailboxes: dict[str, SimulatedMailbox] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._last: AnyMessage | None = None
        self._last_body = b""
        self.letters = 0
        """Sent so far, each copy counted."""

    def clear(self) -> None:
        """Begin to count and to measure anew."""
        self.messages.clear()
        self.frame_bytes.clear()
        for meter in self.meters.values():
            meter.clear()

    def open(self, address: str, owner: InstanceId, wake: Callable[[float], None], role: str) -> SimulatedMailbox:
        """The mailbox at this address, whose letters go to the process that opened it last."""
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
        """The watcher tries to connect again, until that is refused, or somebody is there."""
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

    def meter(self, role: str) -> Meter:
        """The meter of all processes of this role."""
        return self.meters.setdefault(role, Meter())

    def post(
        self, sender: InstanceId, to: InstanceId, address: str, message: AnyMessage, role: str, after_s: float = 0.0
    ) -> None:
        """What is sent to an address at which nobody ever was is lost. role: the sender's. after_s: so much later it leaves."""
        if message is not self._last:  # what goes to many is encoded once, as on the wire
            self._last, self._last_body = message, self._encode(message)
        mailbox = self._mailboxes.get(address)
        to = to if mailbox is None else mailbox.owner
        letter = Letter(sender, to, type(message).__name__, message, self._last_body)
        delays = self.weather.delays(sender, to, self.clock.now, letter.kind)
        for tap in self.taps:
            tap(letter, message, delays)
        if mailbox is None:
            return
        way = role, letter.kind, mailbox.role
        self.messages[way] += 1
        self.frame_bytes[way] += len(letter.body) + frame_bytes(sender)
        for delay_s in delays:
            arrives_s = self.clock.now + after_s + delay_s
            self.letters += 1
            heapq.heappush(mailbox.letters, (arrives_s, self.letters, letter))
            mailbox.wake(arrives_s)


class Post(Generic[M]):
    """Implements `common.instance.ports.Mail` over the network. A message to a process whose address is not known is lost."""

    def __init__(self, me: InstanceId, inbox: Any, network: Network, mailbox: SimulatedMailbox) -> None:
        self.me = me
        self._gone: list[InstanceId] = []
        self._meter = network.meter(mailbox.role)
        self._network = network
        self._mailbox = mailbox
        self._routes: dict[InstanceId, str] = {}
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(inbox)
        self.work_s: Callable[[], float] = lambda: 0.0
        """Seconds of work that come before what is sent now."""
        self.messages_lost: dict[str, int] = {"no route": 0}
        self.frames_refused: dict[str, int] = {}

    def send(self, to: InstanceId, message: AnyMessage) -> None:
        address = self._routes.get(to)
        if address is None:
            self.messages_lost["no route"] += 1
        else:
            self._network.post(self.me, to, address, message, self._mailbox.role, self.work_s())

    def receive(self, most: int = RECEIVE_LIMIT) -> list[tuple[InstanceId, M]]:
        letters = self._mailbox.take(self._network.clock.now, most)
        if not (self._network.decodes_all or self._meter.timing):
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
        """A watched process was gone a moment ago: find out whether it still is."""
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
