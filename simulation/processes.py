"""The routers of a simulated fleet and their detokenizers: the real cores, joined to their mail as their processes join them.

Owns their loops, and who is whose child. Opens no socket and decides nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tokenizers import Tokenizer, models

from common.config import RouterConfig
from common.deadlines import earliest
from common.ids import ROUTER, InstanceId, RequestId, text_name
from common.instance.ports import Send
from common.messages import DetokenizerHeartbeat, DetokenizerInbox, RouterInbox, TextDelta, Trace
from common.text.detokenizer import Detokenizer, cut
from common.tracing import Tracer
from engine.toy import TOY_VOCAB
from router.core import RouterCore
from router.requests import RequestSpec
from simulation.client import Client, ClientObserver
from simulation.clock import NEVER, Clock, Loop
from simulation.network import Network, Post

HEARTBEAT_S = 1.0
"""Of a detokenizer."""
FIRST_TEXT_PORT = 2
HOST = "tcp://127.0.0.{host}:{port}"
"""Each router has a host for itself and its detokenizers."""


def router_address(seat: int) -> str:
    return HOST.format(host=seat + 1, port=1)


def router_name(seat: int, seats: int, life: int) -> InstanceId:
    """The only router of a fleet has the simplest name: what is written about it then reads well."""
    name = ROUTER if seats == 1 else InstanceId(f"router-{seat + 1}")
    return InstanceId(f"{name}-life-{life}") if life else name


@dataclass(frozen=True, slots=True)
class RouterSeat:
    """Who a router is. seat: the number of its address, which its successor has too. name: of this life. text_port: the first
    port of its host that no detokenizer has had."""

    seat: int
    name: InstanceId
    life: int = 0
    text_port: int = FIRST_TEXT_PORT


class RouterProcess:
    """A life of a router: its core and its mail, as `router.core` joins them, and its detokenizers, which die with it.

    next_port: that of its next detokenizer, or of its successor's first.
    """

    def __init__(self, place: RouterSeat, clock: Clock, network: Network, config: RouterConfig, observer: ClientObserver) -> None:
        self.name, self.seat, self.life, self.next_port = place.name, place.seat, place.life, place.text_port
        self.address = router_address(self.seat)
        self.alive = True
        self.stopped_until_s = 0.0
        self._slow_until_s = self._slow_turn_s = 0.0
        self.detokenizers: list[DetokenizerProcess] = []
        self._clock = clock
        self._network = network
        self._loop = Loop(clock, self)
        for shard in range(config.detokenizers):
            self.detokenizers.append(self._start_detokenizer(shard))
        addresses = [each.address for each in self.detokenizers]
        self.core = RouterCore(self.name, addresses, config, observer)
        mailbox = network.open(self.address, self.name, self._loop.wake, "router")
        self._meter = network.meter("router")
        routes = {each.name: each.address for each in self.detokenizers}
        self._mail: Post[RouterInbox] = Post(self.name, RouterInbox, network, mailbox, routes)
        self._loop.wake(mailbox.next_deadline())  # what was sent to its predecessor

    def act(self) -> None:
        now = self._clock.now
        self._meter.begin()
        for _, message in self._mail.receive():
            self._deliver(self.core.receive(message, now))
            self._meter.lap(type(message).__name__)
        self._deliver(self.core.tick(now) + self.core.flush(now))
        self._meter.lap("deadlines")
        if now < self._slow_until_s:
            self._loop.stop_until(now + self._slow_turn_s)

    def next_deadline(self) -> float:
        deadline = self.core.next_deadline()
        return min(NEVER if deadline is None else deadline, self._mail.next_deadline())

    # --- what clients do ---------------------------------------------------------------------------------------------------

    def submit(self, specs: Sequence[RequestSpec], client: Client) -> None:
        """Raises what the core raises."""
        now = self._clock.now
        self._meter.begin()
        client.request.received_s = now
        self._deliver(self.core.requests.submit(client.request, specs, now))
        self._meter.lap("requests")
        self._loop.wake(self.next_deadline())

    def cancel(self, names: Sequence[RequestId]) -> None:
        self._deliver(self.core.requests.cancel(names, self._clock.now))

    def drain(self, instance: InstanceId) -> None:
        """As POST /cluster/{instance}/drain does."""
        self._deliver(self.core.fleet.drain(instance))

    def flush_caches(self) -> None:
        """As POST /flush_cache does."""
        self._deliver(self.core.fleet.flush_caches())

    def trace(self, seconds: float) -> None:
        """As POST /cluster/trace does. Raises what the core raises."""
        self._deliver(self.core.traces.start(seconds, self._clock.now))
        self._loop.wake(self.next_deadline())

    def end_trace(self) -> None:
        """As DELETE /cluster/trace does. Raises what the core raises."""
        self._deliver(self.core.traces.end(self._clock.now))

    # --- what befalls it ---------------------------------------------------------------------------------------------------

    def stop_until(self, until_s: float) -> None:
        """Do nothing before then."""
        self.stopped_until_s = max(self.stopped_until_s, until_s)
        self._loop.stop_until(until_s)

    def slow_until(self, until_s: float, turn_s: float) -> None:
        """Take so long for each turn that begins before then."""
        self._slow_until_s, self._slow_turn_s = until_s, turn_s

    def connection_broken(self, instance: InstanceId) -> None:
        """As the mailbox says when the other side has closed."""
        self.core.fleet.connection_broken(instance, self._clock.now)
        self._loop.wake(self.next_deadline())

    def kill(self) -> None:
        """As SIGKILL does: it never acts again, nor do its detokenizers, and its host refuses connections."""
        self.alive = False
        self._loop.end()
        for detokenizer in self.detokenizers:
            detokenizer.kill()
        self._network.close(self.address)

    def restart_detokenizer(self, shard: int) -> None:
        """Another process has taken the place of this detokenizer, which is gone."""
        self.detokenizers[shard].kill()
        successor = self.detokenizers[shard] = self._start_detokenizer(shard)
        self._mail.route(successor.name, successor.address)
        self._deliver(self.core.detokenizer_moved(shard, successor.address, self._clock.now))
        self._loop.wake(self.next_deadline())

    def _start_detokenizer(self, shard: int) -> "DetokenizerProcess":
        address = HOST.format(host=self.seat + 1, port=self.next_port)
        self.next_port += 1
        return DetokenizerProcess(self, shard, address, self._clock, self._network)

    # --- out ---------------------------------------------------------------------------------------------------------------

    def _deliver(self, sends: Sequence[Send]) -> None:
        for name, address in self.core.take_moves():
            self._mail.route(name, address)
        for send in sends:
            self._mail.send(send.to, send.message)


class DetokenizerProcess:
    """A detokenizer: its core and its mail, as `common.text.detokenizer_manager` joins them."""

    def __init__(self, router: RouterProcess, shard: int, address: str, clock: Clock, network: Network) -> None:
        self.name, self.address = text_name(router.name, shard), address
        self._router, self._shard = router.name, shard
        self.alive = True
        self._clock = clock
        self._loop = Loop(clock, self)
        self.core = Detokenizer(words_tokenizer())
        self._tracer = Tracer(self.name)
        mailbox = network.open(address, self.name, self._loop.wake, "detokenizer")
        self._meter = network.meter("detokenizer")
        routes = {router.name: router.address}
        self._mail: Post[DetokenizerInbox] = Post(self.name, DetokenizerInbox, network, mailbox, routes)
        self._beats_s = clock.now
        self._loop.wake(clock.now)

    def act(self) -> None:
        now = self._clock.now
        self._meter.begin()
        texts: list[TextDelta] = []
        for sender, message in self._mail.receive():
            if isinstance(message, Trace):
                self._tracer.ask(sender, message, now)
            else:
                texts += self.core.receive(message, now)
            self._meter.lap(type(message).__name__)
        texts += self.core.tick(now)
        for batch in cut(texts):
            self._mail.send(self._router, batch)
        self._meter.lap("TextBatch")
        for probed in self.core.take_probed():
            self._mail.send(self._router, probed)
        if texts and self._tracer.recorder.on:
            self._tracer.recorder.add("turns", "turn", now, now, deltas=len(texts))
        if self._tracer.runs:
            for router, spans in self._tracer.due(now):
                self._mail.send(router, spans)
        if now >= self._beats_s:
            self._beats_s = now + HEARTBEAT_S
            dropped = sum(self.core.dropped.values())
            beat = DetokenizerHeartbeat(
                open_answers=self.core.open_answers,
                early_answers=self.core.early_answers,
                dropped=dropped,
                shard=self._shard,
            )
            self._mail.send(self._router, beat)

    def next_deadline(self) -> float:
        deadline = earliest(self.core.next_deadline(), self._tracer.next_deadline())
        return min(self._beats_s, NEVER if deadline is None else deadline, self._mail.next_deadline())

    def kill(self) -> None:
        """As SIGKILL does."""
        self.alive = False
        self._loop.end()


@cache
def words_tokenizer() -> Tokenizer:
    """Token n is the word "n"."""
    return Tokenizer(models.WordLevel({str(n): n for n in range(TOY_VOCAB)}, unk_token="0"))
