"""The peer sets of an instance: with whom each router wants it to work, and what that comes to together.

Owns one set for each router, and the union, which the instance acts on. Knows neither links nor requests nor sockets.

    Peers of router a ─► set of a ─┐
    Peers of router b ─► set of b ─┼─► union ─PeersChanged─► scheduler, routes
    (a former life of a) set kept ─┘    for one id with two incarnations, the latest news counts

A router that starts again learns its members one by one. So the set of its former life still counts until a router speaks, and
for KEEP_S after that: otherwise each instance would close its links, only to make and measure them again a moment later.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.deadlines import DeadlineWheel
from common.ids import InstanceId
from common.instance.ports import PeersChanged
from common.messages import InstanceInfo, Peers

KEEP_S = 10.0
"""How long the set of a router's former life counts. By then every instance has met the new life or is dead."""


@dataclass(frozen=True, slots=True)
class _News:
    """A peer as one router described it. serial: rises with all news that the instance gets."""

    info: InstanceInfo
    serial: int


@dataclass(slots=True, eq=False)
class _Set:
    """What one router said. place: its address. version: 0 before its first word. coming: a whole set of which only the first
    messages are here."""

    place: str
    version: int = 0
    peers: dict[InstanceId, _News] = field(default_factory=dict)
    coming: dict[InstanceId, InstanceInfo] | None = None


class PeerSets:
    """Every message and every deadline returns what it changes in the union; None when nothing."""

    def __init__(self) -> None:
        self._sets: dict[InstanceId, _Set] = {}
        self._former: DeadlineWheel[int] = DeadlineWheel()
        self._former_sets: dict[int, _Set] = {}
        self._orphaned: list[int] = []
        """Former sets that last until another router speaks."""
        self._union: dict[InstanceId, InstanceInfo] = {}
        self._serial = 0
        self.next_deadline = self._former.next_deadline
        """When the next set of a former life ends."""

    def version(self, router: InstanceId) -> int:
        """Of the router's set as it is here; 0: it has not sent any."""
        known = self._sets.get(router)
        return 0 if known is None else known.version

    def receive(self, router: InstanceId, message: Peers, place: str = "") -> PeersChanged | None:
        """place: the router's address, at which its successor will be. Changes that follow another version than ours are dropped:
        the router sends the whole set when it sees our version."""
        known = self._sets.setdefault(router, _Set(place))
        if message.version == known.version or message.since not in (None, known.version):
            return None
        known.version = message.version
        if message.since is None:
            known.coming = {}
        if known.coming is None:
            return self._apply(known, message.joined, message.left)
        known.coming.update((peer.id, peer) for peer in message.joined)
        for gone in message.left:
            known.coming.pop(gone, None)
        if message.more:
            return None
        whole, known.coming = known.coming, None
        return self._apply(known, whole.values(), [peer for peer in known.peers if peer not in whole])

    def retire(self, router: InstanceId, now: float) -> None:
        """Another life has taken the router's place: it begins with a set of its own, and the former one counts for a while."""
        former = self._sets.pop(router, None)
        if former is not None:
            self._serial += 1
            self._former_sets[self._serial] = former
            self._orphaned.append(self._serial)
            self.tick(now)

    def tick(self, now: float) -> PeersChanged | None:
        """The sets of former lives end, but not while no router says anything: somebody must say with whom to work."""
        if self._orphaned and self._sets:
            for number in self._orphaned:
                self._former.set(number, now + KEEP_S)
            self._orphaned.clear()
        ended = [self._former_sets.pop(number) for number in self._former.expired(now)]
        return self._settle({peer for former in ended for peer in former.peers})

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _apply(self, known: _Set, joined: Iterable[InstanceInfo], left: Iterable[InstanceId]) -> PeersChanged | None:
        touched: set[InstanceId] = set()
        for gone in left:
            touched.add(gone)
            known.peers.pop(gone, None)
            for former in self._former_sets.values():
                if former.place == known.place:  # who left the new life has left the former too
                    former.peers.pop(gone, None)
        for info in joined:
            said = known.peers.get(info.id)
            if said is None or said.info.incarnation != info.incarnation:
                self._serial += 1
                known.peers[info.id] = _News(info, self._serial)
                touched.add(info.id)
        return self._settle(touched)

    def _settle(self, touched: Iterable[InstanceId]) -> PeersChanged | None:
        """Bring the union up to date for these peers."""
        joined: list[InstanceInfo] = []
        left: list[InstanceId] = []
        for peer in sorted(touched):
            sets = (*self._sets.values(), *self._former_sets.values())
            news = max((each.peers[peer] for each in sets if peer in each.peers), key=lambda news: news.serial, default=None)
            before = self._union.get(peer)
            if news is None:
                if before is not None:
                    del self._union[peer]
                    left.append(peer)
            elif before is None or before.incarnation != news.info.incarnation:
                self._union[peer] = news.info
                joined.append(news.info)
        return PeersChanged(tuple(joined), tuple(left)) if joined or left else None
