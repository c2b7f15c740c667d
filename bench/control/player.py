"""The player: a fleet of instances without engines, played from one process over real ZeroMQ.

Owns their sockets and their time, and counts the bytes of every message in both directions. Each played instance says what the
product's instances say, because it says it through their `Membership` and `PeerSets`; every link that it is told to make is ready
at once. It is never given a request. Does not know what is measured.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from common.config import DEMO_MODEL
from common.ids import Incarnation, InstanceId, Role
from common.instance.membership import Membership, State
from common.instance.peer_sets import PeerSets
from common.instance.ports import PeersChanged
from common.messages import (
    AnyMessage,
    Counters,
    InstanceInfo,
    LinkInfo,
    LinkReport,
    LinkTraffic,
    Load,
    ModelIdentity,
    Peers,
    PoolDescriptor,
    PrefillInbox,
    RankInfo,
    Refused,
    TellLinks,
    Welcome,
)
from common.pages.layout import KVLayout
from common.processes.local_fleet import FleetFailed
from common.refusals import EVENTS, RefusalWatch
from common.text.tokenizer_manager import TokenizerManager
from common.wire import SEND_LIMIT, pack_frame, unpack_frame

SENDERS_PER_SOCKET = 16
MAX_SOCKETS = 16_384
TURN_S = 0.005
"""All inboxes are looked at this often: a look at a thousand of them takes a tenth of that."""
PAGES = 100_000
WIRE_BYTES = 450
"""As long as NIXL's description of an agent."""
JOIN_S = 3600.0

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder[PrefillInbox](PrefillInbox)


@dataclass(slots=True, eq=False)
class Played:
    """One instance. links: to those it was told of. untold: whose link was not reported yet. links_version: of the last report.
    said: it has said all that is new. heard: it was answered after that."""

    info: InstanceInfo
    membership: Membership
    inbox: "zmq.Socket[bytes]"
    outbox: "zmq.Socket[bytes]"
    peers: PeerSets = field(default_factory=PeerSets)
    links: dict[InstanceId, LinkInfo] = field(default_factory=dict)
    untold: dict[InstanceId, None] = field(default_factory=dict)
    links_version: int = 0
    said: bool = False
    heard: bool = False
    router: InstanceId | None = None

    def meet(self, change: PeersChanged | None) -> None:
        """Link to other peers; the router is to hear of it."""
        self.said = self.heard = False
        if change is not None:
            for gone in change.left:
                self.links.pop(gone, None)
                self.untold.pop(gone, None)
            for info in change.joined:
                self.links[info.id] = _link(info)
                self.untold[info.id] = None


class Player:
    """The fleet. control: the router's address. model: what the instances serve.

    sent, received: bytes by the name of the message. unsent: messages that nobody took in time.
    """

    def __init__(self, control: str, model: ModelIdentity) -> None:
        self._control = control
        self._model = model
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._refusals = RefusalWatch(self._context, lambda: None)
        self._poller = zmq.Poller()
        self._outboxes: list[zmq.Socket[bytes]] = []
        self._played: dict[InstanceId, Played] = {}
        self._by_inbox: dict[zmq.Socket[bytes], Played] = {}
        self._due: list[tuple[float, InstanceId]] = []
        self._made = 0
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.unsent = 0

    def add(self, count: int) -> None:
        """So many more instances start, prefill and decode in turn."""
        for _ in range(count):
            if self._made % SENDERS_PER_SOCKET == 0:
                self._outboxes.append(self._connect())
            inbox = self._context.socket(zmq.PULL)
            inbox.set(zmq.RCVHWM, SEND_LIMIT)
            port = inbox.bind_to_random_port("tcp://127.0.0.1")
            self._start(describe(self._made, self._model, port), inbox)
            self._made += 1

    def lose(self, count: int) -> None:
        """So many die at once, half of each role: they fall silent, and their connections break."""
        for played in list(self._played.values())[-count:]:
            del self._played[played.info.id], self._by_inbox[played.inbox]
            self._poller.unregister(played.inbox)
            played.inbox.close(linger=0)

    @property
    def settled(self) -> bool:
        """Every instance has peers, and knows none that is gone, and the router has heard of all links."""
        names = {role: {each.info.id for each in self._played.values() if each.info.role == role} for role in _OTHER}
        return all(
            each.heard and bool(each.links) and names[_OTHER[each.info.role]] >= each.links.keys()
            for each in self._played.values()
        )

    def routers(self) -> set[InstanceId | None]:
        """The routers that the instances are members of; None: of no router yet."""
        return {each.router for each in self._played.values()}

    def run(self, seconds: float) -> None:
        """Play for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._turn()

    def run_until(self, done: Callable[[], bool], patience_s: float, what: str) -> float:
        """Play until it is done. Returns how long that took. Raises FleetFailed."""
        began = time.monotonic()
        while not done():
            if time.monotonic() > began + patience_s:
                raise FleetFailed(f"{what} took longer than {patience_s:g} s")
            self._turn()
        return time.monotonic() - began

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.disable_monitor()
        for each in (*self._outboxes, *self._by_inbox):
            each.close(linger=0)
        self._refusals.close()
        self._context.term()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _connect(self) -> "zmq.Socket[bytes]":
        outbox = self._context.socket(zmq.PUSH)
        outbox.set(zmq.SNDHWM, SEND_LIMIT)
        self._refusals.follow(self._control, outbox.get_monitor_socket(EVENTS))
        outbox.connect(self._control)
        return outbox

    def _start(self, info: InstanceInfo, inbox: "zmq.Socket[bytes]") -> None:
        now = time.monotonic()
        played = Played(info, Membership(info, self._control, now), inbox, self._outboxes[-1])
        self._played[info.id] = self._by_inbox[inbox] = played
        self._poller.register(inbox, zmq.POLLIN)
        heapq.heappush(self._due, (now, info.id))

    def _turn(self) -> None:
        time.sleep(TURN_S)
        if self._refusals.take():
            self._lose_router()
        for inbox, _ in self._poller.poll(0):
            self._read(self._by_inbox[inbox])
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, name = heapq.heappop(self._due)
            played = self._played.get(name)
            if played is not None:
                if played.membership.next_deadline <= now:
                    self._report(played, now)
                heapq.heappush(self._due, (played.membership.next_deadline, name))

    def _lose_router(self) -> None:
        """Its process is proven to be gone: everybody begins anew, and keeps his links for a while."""
        now = time.monotonic()
        for played in self._played.values():
            if played.router is not None:
                played.membership.end(now)
                played.peers.retire(played.router, now)
                played.router, played.said, played.heard = None, False, False
        self._due = [(played.membership.next_deadline, name) for name, played in self._played.items()]
        heapq.heapify(self._due)

    def _read(self, played: Played) -> None:
        while True:
            try:
                frame = played.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = _decoder.decode(unpack_frame(frame)[1])
            self.received[type(message).__name__] += len(frame)
            match message:
                case Welcome():
                    played.membership.receive(message, time.monotonic())
                    self._welcomed(played, message)
                case Refused():
                    raise FleetFailed(f"a played instance was refused: {message.reason}")
                case Peers():
                    if played.router is not None:
                        played.meet(played.peers.receive(played.router, message))
                        self._report(played, time.monotonic())
                case TellLinks():
                    self._send(played, _report(played, None, tuple(played.links.values())))
                case _:
                    raise FleetFailed(f"a played instance got a {type(message).__name__}")

    def _welcomed(self, played: Played, message: Welcome) -> None:
        """An instance keeps its links when its router is another one, and waits for that one's word on its peers."""
        if played.router != message.router:
            if played.router is not None:
                played.peers.retire(played.router, time.monotonic())
            played.router, played.said = message.router, False
        played.heard = played.said

    def _report(self, played: Played, now: float) -> None:
        change = played.peers.tick(now)
        if change is not None:
            played.meet(change)
        if played.untold and played.info.role == "prefill":
            links, since = tuple(played.links[peer] for peer in played.untold), played.links_version
            played.links_version += 1
            self._send(played, _report(played, since, links))
        played.untold.clear()
        peers_version = 0 if played.router is None else played.peers.version(played.router)
        load = Load(pages_free=PAGES, pages_total=PAGES)
        state = State(load, Counters(), played.links_version, draining=False)
        reachable = self._refusals.reaches(self._control)
        for send in played.membership.due(now, state, peers_version, reachable=reachable):
            self._send(played, send.message)
        played.said = played.membership.joined and peers_version > 0

    def _send(self, played: Played, message: AnyMessage) -> None:
        frame = pack_frame(played.info.id, _encode(message))
        try:
            played.outbox.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self.unsent += 1
            return
        self.sent[type(message).__name__] += len(frame)


def played_model() -> ModelIdentity:
    """A model that a router with the demo model's tokenizer takes in."""
    tokenizer = TokenizerManager(DEMO_MODEL)
    return ModelIdentity(
        name="played",
        fingerprint="played",
        architecture="Played",
        dtype="float32",
        vocab_size=tokenizer.vocab_size,
        context_tokens=tokenizer.context_tokens,
    )


def describe(number: int, model: ModelIdentity, port: int) -> InstanceInfo:
    """The instance of this number, as it registers."""
    role: Role = "prefill" if number % 2 == 0 else "decode"
    name = InstanceId(f"{role}-{number:04d}")
    return InstanceInfo(
        id=name,
        incarnation=Incarnation(f"{name}-1"),
        role=role,
        inbox=f"tcp://127.0.0.1:{port}",
        ranks=(RankInfo(rank=0, pid=1, host="played", device="cuda:0"),),
        model=model,
        pools=(
            PoolDescriptor(
                backend="nixl",
                agent=f"nixl-{name}-{'0' * 32}",
                address=2**40,
                total_pages=PAGES,
                device="cuda:0",
                layout=KVLayout(layers=32, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16"),
                wire=bytes(WIRE_BYTES),
            ),
        ),
        max_running=256,
    )


_OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


def _report(played: Played, since: int | None, links: tuple[LinkInfo, ...]) -> LinkReport:
    info = played.info
    return LinkReport(id=info.id, incarnation=info.incarnation, version=played.links_version, since=since, links=links)


def _link(peer: InstanceInfo) -> LinkInfo:
    traffic = LinkTraffic(pushes=100, runs=1000, bytes_pushed=10**9, push_seconds=1.5, handoffs=50, exposed_seconds=0.2)
    return LinkInfo(
        peer=peer.id,
        incarnation=peer.incarnation,
        state="ready",
        detail="NIXL UCX: mlx5_0",
        bytes_per_s=1e10,
        host_bytes_per_s=2e10,
        traffic=traffic,
    )
