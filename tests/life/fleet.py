"""A whole fleet in one process on a hand-turned clock: the real router core, schedulers, workers, handoff and detokenizer.

Owns the clock and the network between them. Replaced are only the rims: mail is a list of encoded messages that arrive a moment
later, the model is the toy whose tokens depend on every byte of its KV (or, with a cost, steps that only take time), and pages
move by memmove.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from tokenizers import Tokenizer, models

from common.config import RouterConfig
from common.engine.plan import Chunk, Plan, RowStart
from common.engine.timed import StepCost, TimedExecutor
from common.engine.toy import TOY_VOCAB, ToyExecutor
from common.ids import DETOKENIZER, ROUTER, Incarnation, InstanceId, RequestId, Role, pack_ids
from common.instance.membership import Membership
from common.instance.ports import Mail, Send
from common.instance.worker import InstanceWorker
from common.messages import (
    AnyMessage,
    DecodeInbox,
    DetokenizerInbox,
    Ending,
    InstanceInfo,
    PrefillInbox,
    RankInfo,
    RouterInbox,
)
from common.pages.pool import PagePool
from common.sampling_params import SamplingParams
from common.text.detokenizer import Detokenizer
from decode.scheduler import DecodeScheduler
from kv_transfer.memory import MemoryNetwork, MemoryTransport
from kv_transfer.transfer_loop import TransferLoop
from prefill.scheduler import PrefillScheduler
from router.core import RouterCore
from router.outbox import Outbox
from router.requests import RequestSpec

M = TypeVar("M")
TURN_S = 0.001
DELAY_S = 0.001


@dataclass(slots=True, eq=False)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True, eq=False)
class Letter:
    """A message on its way, as bytes. kind: its class name, for people and for `log`."""

    arrives_s: float
    sender: InstanceId
    to: InstanceId
    kind: str
    body: bytes


class Network:
    """Everything that was sent, in order; delivered after DELAY_S. log: (sender, kind, receiver), without membership."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._on_the_way: deque[Letter] = deque()
        self.log: list[tuple[str, str, str]] = []

    def post(self, sender: InstanceId, to: InstanceId, message: AnyMessage) -> None:
        kind = type(message).__name__
        self._on_the_way.append(Letter(self._clock() + DELAY_S, sender, to, kind, msgspec.msgpack.encode(message)))
        if kind not in ("Heartbeat", "Register", "Welcome", "Peers"):
            self.log.append((sender, kind, to))

    def take(self, to: InstanceId) -> list[Letter]:
        arrived = [letter for letter in self._on_the_way if letter.to == to and letter.arrives_s <= self._clock()]
        for letter in arrived:
            self._on_the_way.remove(letter)
        return arrived


class Post(Generic[M]):
    """Implements `common.instance.ports.Mail` over the network. routes: who can be written to; what goes to others is lost."""

    def __init__(self, me: InstanceId, inbox: Any, network: Network, *routes: InstanceId) -> None:
        self._me = me
        self._network = network
        self._routes = set(routes)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(inbox)
        self.messages_lost: dict[str, int] = {"no route": 0}
        self.frames_refused: dict[str, int] = {}

    def send(self, to: InstanceId, message: AnyMessage) -> None:
        if to in self._routes:
            self._network.post(self._me, to, message)
        else:
            self.messages_lost["no route"] += 1

    def receive(self) -> list[tuple[InstanceId, M]]:
        return [(letter.sender, self._decoder.decode(letter.body)) for letter in self._network.take(self._me)]

    def route(self, to: InstanceId, address: str | None) -> None:
        if address is None:
            self._routes.discard(to)
        else:
            self._routes.add(to)


class Observer:
    """The router's measurements, kept for the test. seconds_between: of tokens of one answer, all answers together."""

    def __init__(self) -> None:
        self.endings: list[Ending] = []
        self.seconds_to_first: list[float] = []
        self.seconds_between: list[float] = []

    def first_token(self, seconds: float) -> None:
        self.seconds_to_first.append(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self.seconds_between.append(seconds)

    def ended(self, ending: Ending, seconds: float) -> None:
        self.endings.append(ending)


class Instance:
    """One instance: its real scheduler and worker over a toy engine and an in-process transport.

    cost: steps take this long and compute nothing; None: they compute the toy and end at the next turn.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        clock: Clock,
        network: Network,
        memory: MemoryNetwork,
        pages: int,
        rows: int,
        cost: StepCost | None,
    ) -> None:
        self.id = InstanceId(name)
        self._toy = ToyExecutor(pages, rows, eos_token_ids=(), manual=True)
        engine = self._toy.description
        executor = self._toy if cost is None else TimedExecutor(engine, cost, clock)
        self.transport = MemoryTransport(memory)
        self.transfers = TransferLoop(self.transport, "memory", engine.memory, engine.layout, pages, clock)
        info = InstanceInfo(
            id=self.id,
            incarnation=Incarnation(f"{name}-1"),
            role=role,
            inbox="tcp://127.0.0.1:1",
            ranks=(RankInfo(rank=0, pid=1, host="here", device="cpu"),),
            model=engine.model,
            pool=self.transfers.descriptor,
            max_running=rows,
        )
        kind = PrefillScheduler if role == "prefill" else DecodeScheduler
        self.scheduler = kind(self.id, engine, chunk_tokens=8, max_waiting=64, request_timeout_s=60.0)
        inbox: Any = PrefillInbox if role == "prefill" else DecodeInbox
        mail: Mail[Any] = Post(self.id, inbox, network, ROUTER)
        self.worker: InstanceWorker[Any] = InstanceWorker(
            Membership(info, startup_timeout_s=5.0, now=0.0),
            self.scheduler,
            executor,
            self.transfers,
            mail,
            pushes=role == "prefill",
        )

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

    def turn(self, now: float) -> None:
        self.transfers.step()
        self._toy.complete()
        self.worker.turn(now)


@dataclass(slots=True, eq=False)
class Client:
    """What one client asked for and has got."""

    outbox: Outbox
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    endings: list[Ending] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Reads what there is first."""
        self.read()
        return bool(self.endings)

    def read(self) -> None:
        for delta in self.outbox.take():
            self.token_ids += delta.token_ids
            self.text += delta.text
            if delta.ending is not None:
                self.endings.append(delta.ending)


class Fleet:
    """Router, detokenizer and instances. `turn` moves the clock and lets each of them act once."""

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        pages: int = 64,
        rows: int = 4,
        config: RouterConfig | None = None,
        cost: StepCost | None = None,
    ) -> None:
        self.clock = Clock()
        self.network = Network(self.clock)
        self.memory = MemoryNetwork()
        self.observer = Observer()
        self.router = RouterCore(Incarnation("router-1"), "tcp://127.0.0.1:2", config or RouterConfig(), self.observer)
        self.detokenizer = Detokenizer(words_tokenizer())
        self._detokenizer_mail: Post[DetokenizerInbox] = Post(DETOKENIZER, DetokenizerInbox, self.network, ROUTER)
        names: list[tuple[str, Role]] = [(f"prefill-{n}", "prefill") for n in range(prefill)]
        names += [(f"decode-{n}", "decode") for n in range(decode)]
        self._router_mail: Post[RouterInbox] = Post(
            ROUTER, RouterInbox, self.network, DETOKENIZER, *(InstanceId(name) for name, _ in names)
        )
        self.instances = {
            name: Instance(name, role, self.clock, self.network, self.memory, pages, rows, cost) for name, role in names
        }
        self.turn_until(lambda: not self.router.unready())

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int) -> Client:
        """A client asks for a greedy answer."""
        client = Client(Outbox(lambda: None))
        sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0.0)
        spec = RequestSpec(RequestId(name), 0, pack_ids(prompt), sampling)
        self._send(self.router.submit([spec], client.outbox, self.clock.now))
        return client

    def leave(self, name: str) -> None:
        """The client of a request hangs up."""
        self._send(self.router.cancel([RequestId(name)], self.clock.now))

    def pause(self, name: str, seconds: float) -> None:
        """The instance does nothing for so long, as a stopped process; what is sent to it waits."""
        paused = self.instances.pop(name)
        ends = self.clock.now + seconds
        while self.clock.now < ends:
            self.turn()
        self.instances[name] = paused

    def turn(self) -> None:
        self.clock.now += TURN_S
        now = self.clock.now
        for _, message in self._router_mail.receive():
            self._send(self.router.receive(message, now))
        self._send(self.router.tick(now))
        for _, text in self._detokenizer_mail.receive():
            for batch in self.detokenizer.receive(text, now):
                self._detokenizer_mail.send(ROUTER, batch)
        for instance in self.instances.values():
            instance.turn(now)

    def turn_until(self, done: Callable[[], bool], turns: int = 5000) -> None:
        """Turn until the condition holds. Raises AssertionError when it does not within so many turns."""
        for _ in range(turns):
            if done():
                return
            self.turn()
        raise AssertionError(f"not within {turns} turns; last messages: {self.network.log[-10:]}")

    def run(self, *clients: Client) -> None:
        """Turn until every client has its ending, and then until everything has come home."""
        self.turn_until(lambda: all(client.ended for client in clients))
        self.turn_until(self.is_home)

    def is_home(self) -> bool:
        """Every page in its pool, no request anywhere."""
        loads = [instance.scheduler.load() for instance in self.instances.values()]
        pages = all(load.pages_free == load.pages_total for load in loads)
        idle = all(load.waiting_requests + load.running_requests + load.reservations == 0 for load in loads)
        return pages and idle and len(self.router.requests) == 0

    def _send(self, sends: Sequence[Send]) -> None:
        for send in sends:
            self._router_mail.send(send.to, send.message)


def words_tokenizer() -> Tokenizer:
    """Token n is the word "n"."""
    return Tokenizer(models.WordLevel({str(n): n for n in range(TOY_VOCAB)}, unk_token="0"))


def undisturbed(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The toy's answer with all KV in one place: what any fleet must answer."""
    executor = ToyExecutor(64, 1)
    ids = np.array(prompt, dtype=np.int32)
    start = RowStart(0, np.arange(64, dtype=np.int32), SamplingParams(max_new_tokens=max_tokens))
    plans = [Plan(1, starts=(start,), chunks=(Chunk(0, 0, ids, last=True),))]
    plans += [Plan(2 + n, decode_rows=np.zeros(1, dtype=np.int32)) for n in range(max_tokens - 1)]
    results = [executor.launch(plan).poll() for plan in plans]
    return [int(result.tokens[0]) for result in results if result is not None]
