"""The memberships of an instance: one at each router that it was given, with the peers that this router wants it to work with.

Owns the times of registration and of heartbeats in both directions, which router is which, and the union of the peers of all
routers, which the instance acts on. Opens no socket, reads no clock. Knows neither links nor requests.

    Register(address) ─► Welcome(router, address) ─► its requests are served          at other times Welcome comes without address
    Welcome of another life, Refused, ABANDON_AFTER_S of silence, or its process is gone ─► its requests end

The router answers heartbeats. When it falls silent, the instance goes on serving and registers again until a router welcomes it
there. If that is the same life, it was only held up, and still waits for every answer. If it is another life, if nobody answers
for ABANDON_AFTER_S, or if the router's process is proven to be gone, nobody waits for the answers any more.

An instance is ready when one router has welcomed it. The others may come later, or be refused their help: it goes on registering.
So it does when all refuse it later: the first that came to a router that has just started may be the odd one.

    Peers of router a ─► set of a ─┐
    Peers of router b ─► set of b ─┼─► union ─PeersChanged─► scheduler, routes
    (a former life of a) set kept ─┘    for one id with two incarnations, the latest description counts

A router that starts again learns its members one by one. So the set of its former life still counts until a router speaks, and
for KEEP_S after that: otherwise each instance would close its links, only to make and measure them again a moment later.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from common.addresses import ROUTER_NAME
from common.deadlines import earliest
from common.errors import FleetMismatch, PeerRefused
from common.ids import AttemptId, InstanceId
from common.instance.ports import PeersChanged, Send
from common.messages import AdaptersHeld, Goodbye, Heartbeat, InstanceInfo, Peers, Refused, Register, Timeline, Welcome
from common.messages.base import fits

Adapters: TypeAlias = Callable[[], AdaptersHeld | None]
"""Tells the instance's LoRA adapters; None: it has none."""
KEEP_S = 10.0
"""How long the set of a router's former life counts. By then every instance has met the new life or is dead."""


@dataclass(frozen=True, slots=True)
class _Described:
    """A peer as one router described it."""

    info: InstanceInfo
    serial: int
    """Rises with every description that the instance gets."""


@dataclass(slots=True, eq=False)
class _PeerSet:
    """The peers that one life of a router has named."""

    place: str
    """The router's address."""
    version: int = 0
    """0 before its first message."""
    peers: dict[InstanceId, _Described] = field(default_factory=dict)
    incomplete: dict[InstanceId, InstanceInfo] | None = None
    """A whole set of which only the first messages are here."""
    ends_s: float | None = None
    """When that of a former life ends. None: not before another router speaks."""


class PeerSets:
    """The peers of all routers together. Every message and every deadline returns what it changes in the union; None when
    nothing."""

    def __init__(self) -> None:
        self._sets: dict[InstanceId, _PeerSet] = {}
        self._former: list[_PeerSet] = []
        """Those of former lives."""
        self._union: dict[InstanceId, InstanceInfo] = {}
        self._serial = 0

    def next_deadline(self) -> float | None:
        """When the next set of a former life ends."""
        return earliest(*(former.ends_s for former in self._former))

    def __iter__(self) -> Iterator[InstanceId]:
        """Those of the union."""
        return iter(self._union)

    def version(self, router: InstanceId) -> int:
        """The version of the router's set as it is here; 0: it has not sent any."""
        known = self._sets.get(router)
        return 0 if known is None else known.version

    def receive(self, router: InstanceId, message: Peers, place: str = "") -> PeersChanged | None:
        """place: the router's address, at which its successor will be. Changes that follow another version than ours are dropped:
        the router sends the whole set when it sees our version."""
        known = self._sets.setdefault(router, _PeerSet(place))
        if message.version == known.version or message.since not in (None, known.version):
            return None
        known.version = message.version
        if message.since is None:
            known.incomplete = {}
        if known.incomplete is None:
            return self._apply(known, message.joined, message.left)
        known.incomplete.update((peer.id, peer) for peer in message.joined)
        for gone in message.left:
            known.incomplete.pop(gone, None)
        if message.more:
            return None
        whole, known.incomplete = known.incomplete, None
        return self._apply(known, whole.values(), [peer for peer in known.peers if peer not in whole])

    def retire(self, router: InstanceId, now: float) -> None:
        """Another life has taken the router's place: it begins with a set of its own, and the former one counts for a while."""
        former = self._sets.pop(router, None)
        if former is not None:
            former.ends_s = now + KEEP_S if self._sets else None
            self._former.append(former)

    def tick(self, now: float) -> PeersChanged | None:
        """The sets of former lives end, but not while no router says anything: somebody must say with whom to work."""
        for former in self._former if self._sets else ():
            former.ends_s = former.ends_s or now + KEEP_S
        ended = [former for former in self._former if former.ends_s is not None and former.ends_s <= now]
        self._former = [former for former in self._former if former not in ended]
        return self._settle({peer for former in ended for peer in former.peers})

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _apply(self, known: _PeerSet, joined: Iterable[InstanceInfo], left: Iterable[InstanceId]) -> PeersChanged | None:
        touched: set[InstanceId] = set()
        for gone in left:
            touched.add(gone)
            known.peers.pop(gone, None)
            for former in self._former:
                if former.place == known.place:  # who left the new life has left the former too
                    former.peers.pop(gone, None)
        for info in joined:
            described = known.peers.get(info.id)
            if described is None or described.info.incarnation != info.incarnation:
                self._serial += 1
                known.peers[info.id] = _Described(info, self._serial)
                touched.add(info.id)
        return self._settle(touched)

    def _settle(self, touched: Iterable[InstanceId]) -> PeersChanged | None:
        """Bring the union up to date for these peers."""
        joined: list[InstanceInfo] = []
        left: list[InstanceId] = []
        for peer in sorted(touched):
            sets = (*self._sets.values(), *self._former)
            descriptions = [each.peers[peer] for each in sets if peer in each.peers]
            latest = max(descriptions, key=lambda each: each.serial, default=None)
            before = self._union.get(peer)
            if latest is None:
                if before is not None:
                    del self._union[peer]
                    left.append(peer)
            elif before is None or before.incarnation != latest.info.incarnation:
                self._union[peer] = latest.info
                joined.append(latest.info)
        return PeersChanged(tuple(joined), tuple(left)) if joined or left else None


REGISTER_EVERY_S, SELDOM_EVERY_S = 0.25, 5.0
"""How often it registers: first, and in the end, where somebody is there and does not answer."""
ABANDON_AFTER_S = 300.0
"""A router that has not answered for this long has failed: no stop, swap or burst of work takes minutes. Most requests have ended
by then; the rest would only hold memory."""
OVER_S = 60.0
"""For how long after its last word a life of a router that has a successor is not believed: its mail may be late. It may be back
later, where an address moves between routers."""
OVER_REMEMBERED = 4
"""How many such lives a membership remembers."""
WARN_AFTER_S, WARN_EVERY_S = 5.0, 30.0
"""When the log says that a router does not answer, and how often again."""
TIMELINES_AT_ONCE, TIMELINES_WAITING = 256, 4_096
"""How many timelines go with a heartbeat, and how many wait for one."""


class Membership:
    """The instance's half of joining and staying at the router whose address this is. name: what the mail calls that router."""

    def __init__(self, info: InstanceInfo, address: str, now: float) -> None:
        self.address = address
        self.name = InstanceId(f"{ROUTER_NAME}@{address}")
        self.welcome: Welcome | None = None
        """The latest, from the life of the router whose requests this instance serves. None: it serves no requests from there."""
        self.refusal: str | None = None
        """Why the router does not want us, while it does not."""
        self._info = info
        self._latest: InstanceId | None = None
        """The life that was last believed, even if it is gone."""
        self._over: dict[InstanceId, float] = {}
        """Lives that have a successor, and until when they are not believed."""
        self.next_deadline = now
        self._pause_s = REGISTER_EVERY_S
        self._has_asked = False
        self._is_other_life = False
        """This life of ours has followed another one, and the router has not welcomed it yet."""
        self._sent_s: float | None = None
        self._timelines: deque[Timeline] = deque(maxlen=TIMELINES_WAITING)
        self.timelines_dropped = 0
        """The oldest, when too many waited."""
        self._unanswered_s = 0.0
        self._warn_s: float | None = None
        """When to warn next. None: the router answers."""

    @property
    def joined(self) -> bool:
        """Whether the router answers us."""
        return self.welcome is not None and self._unanswered_s <= self.welcome.dead_after_s

    @property
    def abandoned(self) -> bool:
        """Whether the router has been silent for so long that it must have failed."""
        return self.welcome is not None and self._unanswered_s > ABANDON_AFTER_S

    @property
    def was_welcome(self) -> bool:
        """Whether any life of the router has welcomed us here."""
        return self._latest is not None

    def warn_of_silence(self, now: float) -> None:
        """Say in the log that the router does not answer us, or refuses us, for as long as it is so."""
        if self.joined:
            self._warn_s = None
        elif self._warn_s is None:
            self._warn_s = now + WARN_AFTER_S
        elif now >= self._warn_s:
            self._warn_s = now + WARN_EVERY_S
            if self.refusal is None:
                _log.warning("the router at %s does not answer: %s", self.address, CHECKS)
            else:
                _log.warning("the router at %s still refuses us: %s", self.address, self.refusal)

    def is_over(self, router: InstanceId, now: float) -> bool:
        """Whether this life of the router has had a successor a short time ago: what it said is only late."""
        return router != self._latest and now < self._over.get(router, now)

    def receive(self, welcome: Welcome, now: float) -> None:
        if self._latest is not None and self._latest != welcome.router:
            self._over.pop(self._latest, None)
            self._over[self._latest] = now + OVER_S
            if len(self._over) > OVER_REMEMBERED:
                del self._over[next(iter(self._over))]
        self._latest = welcome.router
        if self.welcome is None or self._is_other_life:
            self.next_deadline = min(self.next_deadline, now)  # the next Register may be further than `dead_after_s`
        if welcome.address:  # it answers a Register
            self._is_other_life = False
        self.welcome, self.refusal, self._unanswered_s, self._pause_s = welcome, None, 0.0, REGISTER_EVERY_S

    def end(self, now: float) -> None:
        """The router is gone, or does not want us: begin anew."""
        self.welcome, self._unanswered_s, self._pause_s = None, 0.0, REGISTER_EVERY_S
        self._has_asked = False
        self._timelines.clear()
        self.next_deadline = min(self.next_deadline, now + REGISTER_EVERY_S)

    def become(self, info: InstanceInfo, now: float) -> None:
        """Another life of ours follows in this process, and registers."""
        self._info, self._is_other_life, self.next_deadline = info, True, now
        self._timelines.clear()

    def note(self, timeline: Timeline) -> None:
        """Tell the router with one of the next heartbeats."""
        self.timelines_dropped += len(self._timelines) == TIMELINES_WAITING
        self._timelines.append(timeline)

    def due(self, now: float, beat: Heartbeat, adapters: Adapters, peers_version: int, *, reachable: bool) -> list[Send]:
        """The messages to send at `next_deadline`, which then moves on. beat: a heartbeat but for what concerns this router
        alone. peers_version: of this router's set of peers. reachable: the connection to it is up. While it is not, one Register
        waits for it, and no more, because they would all arrive."""
        if self.welcome is not None:
            # At most `heartbeat_s` counts between two messages: a process that was stopped has sent none.
            waited_s = 0.0 if self._sent_s is None else min(now - self._sent_s, self.welcome.heartbeat_s)
            self._unanswered_s, self._sent_s = self._unanswered_s + waited_s, now
        if self.welcome is None:
            asks, self._has_asked = reachable or not self._has_asked, True
            self.next_deadline = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, SELDOM_EVERY_S) if reachable else REGISTER_EVERY_S
            return [self._register(beat, adapters)] if asks else []
        self.next_deadline = now + (REGISTER_EVERY_S if self._is_other_life else self.welcome.heartbeat_s)
        if self._is_other_life or not self.joined:
            return [self._register(beat, adapters)] if reachable else []
        told = replace(beat, peers_version=peers_version, timelines=self._take_timelines())
        return [Send(self.name, told)]

    def _register(self, beat: Heartbeat, adapters: Adapters) -> Send:
        register = Register(
            instance=self._info,
            address=self.address,
            was_welcome=self.was_welcome,
            weights=beat.weights,
            weight_version=beat.weight_version,
            weight_changes=beat.weight_changes,
            adapters=adapters(),
        )
        return Send(self.name, register)

    def _take_timelines(self) -> tuple[Timeline, ...]:
        return tuple(self._timelines.popleft() for _ in range(min(len(self._timelines), TIMELINES_AT_ONCE)))

    def hurry(self, now: float) -> None:
        """Something changed that the router should know soon: send a heartbeat at the next turn."""
        if self.joined:
            self.next_deadline = min(self.next_deadline, now)

    def goodbye(self, reason: str = "", suspects: Sequence[AttemptId] = (), *, is_quiet: bool = False) -> Send:
        """With all timelines that wait: no heartbeat follows. suspects: see `Goodbye`; of all routers."""
        goodbye = Goodbye(
            id=self._info.id,
            incarnation=self._info.incarnation,
            timelines=tuple(self._timelines),
            reason=reason,
            is_quiet=is_quiet,
            suspects=tuple(key for key in suspects if self.welcome is not None and key.router == self.welcome.router),
        )
        return Send(self.name, goodbye)


CHECKS = (
    "is --router right, is it running, and do both sides have the same --cluster-key, or none? (the log of a router names those "
    "that it turns away)"
)
"""What to look at when a router does not answer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterChange:
    """A life of a router has welcomed us, its detokenizers have moved, or it is lost: gone, or it does not want us any more."""

    at: Membership
    router: InstanceId
    detokenizers: tuple[str, ...]
    """Their addresses."""
    is_lost: bool = False


class Memberships:
    """The memberships at all routers. Raises PeerRefused, from `receive` when no router wants us or ever has, one says that a
    newer life has taken our place, or two addresses lead to one router at the start, and from `check` when none has answered
    within `startup_timeout_s`."""

    def __init__(self, info: InstanceInfo, addresses: Sequence[str], startup_timeout_s: float, now: float) -> None:
        """addresses: those of the routers."""
        self.info = info
        self.peers = PeerSets()
        self._all = [Membership(info, address, now) for address in addresses]
        self._started_s = now + startup_timeout_s
        """From then on it is no mistake of the start when two addresses lead to one router."""
        self._give_up_s: float | None = self._started_s
        self.stale = 0
        """Messages from lives of routers that are over, or to another life of ours."""

    def __iter__(self) -> Iterator[Membership]:
        return iter(self._all)

    @property
    def welcomes(self) -> list[Welcome]:
        """Those of the routers whose requests this instance serves."""
        return [membership.welcome for membership in self._all if membership.welcome is not None]

    @property
    def joined(self) -> bool:
        """Whether a router answers us."""
        return any(membership.joined for membership in self._all)

    @property
    def next_deadline(self) -> float:
        """When `due` has something to send."""
        return min(membership.next_deadline for membership in self._all)

    def of(self, router: InstanceId) -> Membership | None:
        """Where this life of a router has welcomed us."""
        return next((one for one in self._all if one.welcome is not None and one.welcome.router == router), None)

    def receive(self, message: Welcome | Refused, now: float) -> list[RouterChange]:
        if isinstance(message, Refused):
            return self._refused(message, now)
        known = self.of(message.router)
        at = next((one for one in self._all if one.address == message.address), known)
        if at is None or at.is_over(message.router, now):
            self.stale += 1  # from a life that is over, or from nobody whom we asked
            return []
        if known is not None and known is not at:
            return self._twice(known, at, message.router, now)
        self._give_up_s, before = None, at.welcome
        at.receive(message, now)
        joined = RouterChange(at, message.router, message.detokenizers)
        if before is not None and before.router == message.router:
            return [joined] if before.detokenizers != message.detokenizers else []
        _log.info("welcomed by %s at %s", message.router, at.address)
        if before is None:
            return [joined]
        self.peers.retire(before.router, now)
        return [RouterChange(at, before.router, before.detokenizers, is_lost=True), joined]

    def _twice(self, known: Membership, at: Membership, router: InstanceId, now: float) -> list[RouterChange]:
        """A router that is known answers at another address too. Later than at the start it is ignored: names may be moved."""
        reason = f"it is {router}, which has welcomed us at {known.address} already"
        if now < self._started_s and not at.was_welcome:
            raise PeerRefused(f"--router names one router twice: {known.address} and {at.address} are both {router}")
        if at.refusal != reason:
            at.refusal = reason
            _log.warning("the router at %s is of no use: %s", at.address, reason)
        return []

    def _refused(self, message: Refused, now: float) -> list[RouterChange]:
        if not fits(message.incarnation, self.info.incarnation) or message.id not in ("", self.info.id):
            self.stale += 1
            return []
        if message.final:
            raise FleetMismatch(f"a router refused {self.info.id} for good: {message.reason}")
        at = next((one for one in self._all if one.address == message.address or len(self._all) == 1), None)
        if at is None:
            return []
        is_other, at.refusal = at.refusal != message.reason, message.reason
        never_welcome = not any(one.was_welcome for one in self._all)
        if never_welcome and all(one.refusal is not None for one in self._all):
            reasons = (f"the router at {one.address} refused {self.info.id}: {one.refusal}" for one in self._all)
            raise (FleetMismatch if message.is_mismatch else PeerRefused)("; ".join(reasons))
        if is_other:
            _log.warning("the router at %s refused us: %s", at.address, message.reason)
        return self._lose(at, now)

    def gone(self, names: Iterable[InstanceId], now: float) -> list[RouterChange]:
        """The processes of these routers, as the mail calls them, are proven to be gone."""
        named = set(names)
        return [change for one in self._all if one.name in named for change in self._lose(one, now)]

    def check(self, now: float) -> list[RouterChange]:
        """The routers that have been silent for too long."""
        if self._give_up_s is not None and now >= self._give_up_s:
            asked = ", ".join(one.address if one.refusal is None else f"{one.address} ({one.refusal})" for one in self._all)
            raise PeerRefused(f"no router answered the registration in time, of {asked}: {CHECKS}")
        for one in self._all:
            one.warn_of_silence(now)
        return [change for one in self._all if one.abandoned for change in self._lose(one, now)]

    def receive_peers(self, router: InstanceId, message: Peers, now: float) -> PeersChanged | None:
        """A router names the peers to work with. It uses no link of which it does not know that both ends know of it, so it hears
        from us soon."""
        membership = self.of(router)
        if membership is None:
            return None
        membership.hurry(now)
        return self.peers.receive(router, message, membership.address)

    def due(self, now: float, beat: Heartbeat, adapters: Adapters, reaches: Callable[[InstanceId], bool]) -> list[Send]:
        """The messages to send now. beat: what all routers are told. reaches: whether the connection to a router is up."""
        sends: list[Send] = []
        for membership in self._all:
            if now >= membership.next_deadline:
                version = 0 if membership.welcome is None else self.peers.version(membership.welcome.router)
                sends += membership.due(now, beat, adapters, version, reachable=reaches(membership.name))
        return sends

    def become(self, info: InstanceInfo, now: float) -> list[Send]:
        """Another life follows in this process, which knows no peers yet. Returns the last words of the former one."""
        goodbyes = [
            membership.goodbye(f"it takes the role {info.role}") for membership in self._all if membership.welcome is not None
        ]
        self.info, self.peers = info, PeerSets()
        for membership in self._all:
            membership.become(info, now)
        return goodbyes

    def wait_until(self, next_s: float) -> None:
        """The instance is not ready to join yet."""
        for membership in self._all:
            membership.next_deadline = next_s

    def hurry(self, now: float) -> None:
        """Something changed that the routers should know soon."""
        for membership in self._all:
            membership.hurry(now)

    def _lose(self, at: Membership, now: float) -> list[RouterChange]:
        welcome = at.welcome
        if welcome is None:
            return []
        at.end(now)
        _log.info("%s at %s is gone", welcome.router, at.address)
        self.peers.retire(welcome.router, now)
        return [RouterChange(at, welcome.router, welcome.detokenizers, is_lost=True)]
