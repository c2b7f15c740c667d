"""A fleet of instances without engines, played in one process over real ZeroMQ.

Owns the sockets of the instances and their time, and counts the bytes of every message in both directions. A played instance
says what the product's instances say, because it says it through their `Memberships` and `LinkBook`; every link that it is to
make is ready at once. It never gets a request. Does not know what is measured.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec
import zmq
from msgspec.structs import replace

from common.config import DEMO_MODEL
from common.gate import EVENTS, ConnectionWatch
from common.ids import Incarnation, InstanceId, Role
from common.instance.membership import Memberships
from common.instance.ports import PeersChanged
from common.mail import SEND_LIMIT, pack_frame, unpack_frame
from common.messages import (
    AnyMessage,
    Counters,
    Heartbeat,
    InstanceInfo,
    LinkInfo,
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
from common.text.tokenizer_manager import TokenizerManager
from prefill.requests import LinkBook

SENDERS_PER_SOCKET = 16
MAX_SOCKETS = 16_384
TURN_S = 0.005
"""All inboxes are looked at this often: a look at a thousand of them takes a tenth of that."""
STARTUP_S = 600.0
PAGES = 100_000
NIXL_AGENT_BYTES = 450
"""As long as NIXL's description of an agent."""
TRAFFIC = LinkTraffic(pushes=100, runs=1000, bytes_pushed=10**9, push_seconds=1.5, handoffs=50, exposed_seconds=0.2)
LAYOUT = KVLayout(layers=32, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder[PrefillInbox](PrefillInbox)


class PlayedInstance:
    """What one instance knows, and what it sends. Opens no socket and reads no clock."""

    def __init__(self, info: InstanceInfo, control: str, now: float) -> None:
        self.info = info
        self.memberships = Memberships(info, [control], STARTUP_S, now)
        (self._membership,) = self.memberships
        self._book = LinkBook(info.id, info.incarnation)
        self.is_settled = False
        """The router has answered since all that is new was sent."""
        self._has_sent_all = False
        """The router was sent all that is new."""

    @property
    def router(self) -> InstanceId | None:
        """The router whose member it is."""
        welcome = self._membership.welcome
        return None if welcome is None else welcome.router

    def receive(self, message: PrefillInbox, now: float) -> list[AnyMessage]:
        """Returns what it sends then. Raises FleetFailed for what no played instance should get."""
        match message:
            case Welcome():
                if self.memberships.receive(message, now):
                    self._has_sent_all = False  # the router is another one: its word on the peers is to come
                self.is_settled = self._has_sent_all
            case Refused():
                raise FleetFailed(f"a played instance was refused: {message.reason}")
            case Peers():
                if self.router is not None:
                    self._meet(self.memberships.receive_peers(self.router, message, now))
            case TellLinks():
                return [self._book.all_links(lambda peer: TRAFFIC)]
            case _:
                raise FleetFailed(f"a played instance got a {type(message).__name__}")
        return []

    def due(self, now: float, *, reachable: bool) -> list[AnyMessage]:
        """What it sends at its deadline. reachable: the connection to the router is up."""
        change = self.memberships.peers.tick(now)
        if change is not None:
            self._meet(change)
        messages: list[AnyMessage] = []
        if self.info.role == "prefill" and (changes := self._book.changes()) is not None:
            messages.append(changes)
        me, load = self.info, Load(pages_free=PAGES, pages_total=PAGES)
        beat = Heartbeat(
            id=me.id,
            incarnation=me.incarnation,
            load=load,
            counters=Counters(),
            peers_version=0,
            links_version=self._book.version,
        )
        messages += [send.message for send in self.memberships.due(now, beat, lambda: None, lambda router: reachable)]
        named = self.router is not None and self.memberships.peers.version(self.router) > 0
        self._has_sent_all = self.memberships.joined and named
        return messages

    def lose_router(self, now: float) -> None:
        """The router's process is proven to be gone: begin anew, and keep the links for a while."""
        self.memberships.gone([self._membership.name], now)
        self._has_sent_all = self.is_settled = False

    def _meet(self, change: PeersChanged | None) -> None:
        """Link to other peers, of which the router is to hear."""
        self._has_sent_all = self.is_settled = False
        if change is not None:
            self._book.meet(change)
            for info in change.joined:
                link = LinkInfo(
                    peer=info.id, incarnation=info.incarnation, state="ready", detail="NIXL UCX: mlx5_0", traffic=TRAFFIC
                )
                self._book.changed(replace(link, bytes_per_s=1e10, host_bytes_per_s=2e10))


class PlayedFleet:
    """The instances of a fleet, prefill and decode in turn. control: the address of a router with the demo model's tokenizer."""

    def __init__(self, control: str) -> None:
        self.moved_bytes: Counter[str] = Counter()
        """Bytes of all messages in both directions, by the name of the message."""
        self._control = control
        tokenizer = TokenizerManager(DEMO_MODEL)
        self._model = ModelIdentity(
            name="played",
            fingerprint="played",
            architecture="Played",
            dtype="float32",
            vocab_size=tokenizer.vocab_size,
            context_tokens=tokenizer.context_tokens,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._refusals = ConnectionWatch(self._context, lambda: None)
        self._poller = zmq.Poller()
        self._outboxes: list[zmq.Socket[bytes]] = []
        self._played: dict[zmq.Socket[bytes], tuple[PlayedInstance, zmq.Socket[bytes]]] = {}
        """The instance of each inbox, and its outbox."""
        self._made = 0

    def add(self, count: int) -> None:
        """So many more instances start."""
        for _ in range(count):
            if self._made % SENDERS_PER_SOCKET == 0:
                self._outboxes.append(self._connect())
            inbox = self._context.socket(zmq.PULL)
            inbox.set(zmq.RCVHWM, SEND_LIMIT)
            info = describe(self._made, self._model, inbox.bind_to_random_port("tcp://127.0.0.1"))
            self._played[inbox] = PlayedInstance(info, self._control, time.monotonic()), self._outboxes[-1]
            self._poller.register(inbox, zmq.POLLIN)
            self._made += 1

    def lose(self, count: int) -> None:
        """So many die at once, half of each role: they fall silent, and their connections break."""
        for inbox in list(self._played)[-count:]:
            del self._played[inbox]
            self._poller.unregister(inbox)
            inbox.close(linger=0)

    @property
    def is_settled(self) -> bool:
        """Every instance has peers, and knows none that is gone, and the router knows all links."""
        played = [instance for instance, _ in self._played.values()]
        others = {
            "prefill": {each.info.id for each in played if each.info.role == "decode"},
            "decode": {each.info.id for each in played if each.info.role == "prefill"},
        }
        peers = [set(each.memberships.peers) for each in played]
        return all(
            each.is_settled and known and others[each.info.role] >= known for each, known in zip(played, peers, strict=True)
        )

    def routers(self) -> set[InstanceId | None]:
        """The routers that the instances are members of; None: of no router yet."""
        return {instance.router for instance, _ in self._played.values()}

    def run(self, seconds: float) -> None:
        """Play for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._turn()

    def run_until(self, done: Callable[[], bool], patience_s: float, what: str) -> None:
        """Play until it is done. Raises FleetFailed."""
        until = time.monotonic() + patience_s
        while not done():
            if time.monotonic() > until:
                raise FleetFailed(f"{what} took longer than {patience_s:g} s")
            self._turn()

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.disable_monitor()
        for each in (*self._outboxes, *self._played):
            each.close(linger=0)
        self._refusals.close()
        self._context.term()

    def _connect(self) -> "zmq.Socket[bytes]":
        outbox = self._context.socket(zmq.PUSH)
        outbox.set(zmq.SNDHWM, SEND_LIMIT)
        self._refusals.follow(self._control, outbox.get_monitor_socket(EVENTS), knocks=True)
        outbox.connect(self._control)
        return outbox

    def _turn(self) -> None:
        time.sleep(TURN_S)
        if self._refusals.take():
            for instance, _ in self._played.values():
                instance.lose_router(time.monotonic())
        reachable = self._refusals.reaches(self._control)
        for inbox, _ in self._poller.poll(0):
            instance, outbox = self._played[inbox]
            for message in self._received(inbox):
                self._send(instance, outbox, instance.receive(message, time.monotonic()))
        now = time.monotonic()
        for instance, outbox in self._played.values():
            if instance.memberships.next_deadline <= now:
                self._send(instance, outbox, instance.due(now, reachable=reachable))

    def _received(self, inbox: "zmq.Socket[bytes]") -> Iterator[PrefillInbox]:
        with contextlib.suppress(zmq.Again):
            while True:
                frame = inbox.recv(zmq.NOBLOCK)
                message = _decoder.decode(unpack_frame(frame)[1])
                self.moved_bytes[type(message).__name__] += len(frame)
                yield message

    def _send(self, instance: PlayedInstance, outbox: "zmq.Socket[bytes]", messages: Iterable[AnyMessage]) -> None:
        """A message that the router does not take in time is lost."""
        for message in messages:
            frame = pack_frame(instance.info.id, _encode(message))
            with contextlib.suppress(zmq.Again):
                outbox.send(frame, zmq.NOBLOCK)
                self.moved_bytes[type(message).__name__] += len(frame)


def describe(number: int, model: ModelIdentity, port: int) -> InstanceInfo:
    """The instance of this number, as it registers."""
    role: Role = "prefill" if number % 2 == 0 else "decode"
    name = InstanceId(f"{role}-{number:04d}")
    pool = PoolDescriptor(
        backend="nixl",
        agent=f"nixl-{name}-{'0' * 32}",
        address=2**40,
        total_pages=PAGES,
        device="cuda:0",
        layout=LAYOUT,
        wire=bytes(NIXL_AGENT_BYTES),
    )
    return InstanceInfo(
        id=name,
        incarnation=Incarnation(f"{name}-1"),
        role=role,
        inbox=f"tcp://127.0.0.1:{port}",
        ranks=(RankInfo(rank=0, pid=1, host="played", device="cuda:0"),),
        model=model,
        pools=(pool,),
        max_running=256,
    )
