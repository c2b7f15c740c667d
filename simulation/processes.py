"""The router and the detokenizer of a simulated fleet: the real cores, joined to their mail as their processes join them.

Owns their loops. Opens no socket and decides nothing.
"""

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, models

from common.config import RouterConfig
from common.engine.toy import TOY_VOCAB
from common.ids import DETOKENIZER, ROUTER, InstanceId, RequestId
from common.instance.ports import Send
from common.messages import DetokenizerHeartbeat, DetokenizerInbox, RouterInbox, TextDelta
from common.text.batches import cut
from common.text.detokenizer import Detokenizer
from router.core import RouterCore
from router.requests import RequestSpec
from simulation.client import Client, Observer
from simulation.clock import NEVER, Clock, Loop
from simulation.instance import ROUTER_ADDRESS
from simulation.network import Network, Post

DETOKENIZER_ADDRESS = "tcp://127.0.0.1:2"
HEARTBEAT_S = 1.0
"""Of the detokenizer."""


class RouterProcess:
    """The router: its core and its mail, as `router.gateway` joins them. name: of this life of it."""

    def __init__(
        self, clock: Clock, network: Network, config: RouterConfig, observer: Observer, name: InstanceId = ROUTER
    ) -> None:
        self._clock = clock
        self._loop = Loop(clock, self)
        self.core = RouterCore(name, [DETOKENIZER_ADDRESS], config, observer)
        mailbox = network.open(ROUTER_ADDRESS, name, self._loop.wake, "router")
        self._meter = network.meter("router")
        texts = dict.fromkeys(self.core.detokenizer_names, DETOKENIZER_ADDRESS)
        self._mail: Post[RouterInbox] = Post(name, RouterInbox, network, mailbox, texts)
        self._routes_version = 0
        self._routes: dict[InstanceId, str] = {}

    def act(self) -> None:
        now = self._clock.now
        self._meter.begin()
        for _, message in self._mail.receive():
            self._deliver(self.core.receive(message, now))
            self._meter.lap(type(message).__name__)
        self._deliver(self.core.tick(now) + self.core.flush(now))
        self._meter.lap("deadlines")

    def next_deadline(self) -> float:
        deadline = self.core.next_deadline()
        return min(NEVER if deadline is None else deadline, self._mail.next_deadline())

    def submit(self, specs: Sequence[RequestSpec], client: Client) -> None:
        """Raises what the core raises."""
        now = self._clock.now
        self._meter.begin()
        self._deliver(self.core.requests.submit(specs, client.outbox, now, now))
        self._meter.lap("requests")
        self._loop.wake(self.next_deadline())

    def cancel(self, names: Sequence[RequestId]) -> None:
        self._deliver(self.core.requests.cancel(names, self._clock.now))

    def stop_until(self, until_s: float) -> None:
        """Do nothing before then."""
        self._loop.stop_until(until_s)

    def kill(self) -> None:
        """As SIGKILL does: it never acts again."""
        self._loop.end()

    def drain(self, instance: InstanceId) -> None:
        """As POST /cluster/{instance}/drain does."""
        self._deliver(self.core.fleet.drain(instance))

    def connection_broken(self, instance: InstanceId) -> None:
        """As the mailbox says when the other side has closed."""
        self.core.fleet.connection_broken(instance, self._clock.now)
        self._loop.wake(self.next_deadline())

    def _deliver(self, sends: Sequence[Send]) -> None:
        if self.core.fleet.addresses_version != self._routes_version:
            self._learn_routes()
        for send in sends:
            self._mail.send(send.to, send.message)

    def _learn_routes(self) -> None:
        self._routes_version = self.core.fleet.addresses_version
        addresses = dict(self.core.fleet.addresses())
        for name in {**self._routes, **addresses}:
            self._mail.route(name, addresses.get(name))
        self._routes = addresses


class DetokenizerProcess:
    """The detokenizer: its core and its mail, as `common.text.detokenizer_manager` joins them."""

    def __init__(self, clock: Clock, network: Network) -> None:
        self._clock = clock
        self._loop = Loop(clock, self)
        self.core = Detokenizer(words_tokenizer())
        mailbox = network.open(DETOKENIZER_ADDRESS, DETOKENIZER, self._loop.wake, "detokenizer")
        self._meter = network.meter("detokenizer")
        self._mail: Post[DetokenizerInbox] = Post(DETOKENIZER, DetokenizerInbox, network, mailbox, {ROUTER: ROUTER_ADDRESS})
        self._beats_s = 0.0
        self._loop.wake(0.0)

    def act(self) -> None:
        now = self._clock.now
        self._meter.begin()
        texts: list[TextDelta] = []
        for _, message in self._mail.receive():
            texts += self.core.receive(message, now)
            self._meter.lap(type(message).__name__)
        texts += self.core.tick(now)
        for batch in cut(texts):
            self._mail.send(ROUTER, batch)
        self._meter.lap("TextBatch")
        if now >= self._beats_s:
            self._beats_s = now + HEARTBEAT_S
            dropped = sum(self.core.dropped.values())
            beat = DetokenizerHeartbeat(
                open_answers=self.core.open_answers, early_answers=self.core.early_answers, dropped=dropped
            )
            self._mail.send(ROUTER, beat)

    def next_deadline(self) -> float:
        deadline = self.core.next_deadline()
        return min(self._beats_s, NEVER if deadline is None else deadline, self._mail.next_deadline())


@cache
def words_tokenizer() -> Tokenizer:
    """Token n is the word "n"."""
    return Tokenizer(models.WordLevel({str(n): n for n in range(TOY_VOCAB)}, unk_token="0"))
