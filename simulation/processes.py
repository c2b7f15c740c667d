"""The router of a simulated fleet and its detokenizers: the real cores, joined to their mail as their processes join them.

Owns their loops, and which detokenizers are a router's children. Opens no socket and decides nothing.
"""

from collections.abc import Iterable, Sequence
from functools import cache

from tokenizers import Tokenizer, models

from common.config import RouterConfig
from common.ids import InstanceId, text_name
from common.instance.ports import Send
from common.messages import AnswerMessage, DetokenizerInbox, RouterInbox, TextDelta
from common.text.detokenizer import Detokenizer
from common.text.detokenizer_manager import DetokenizerLoop
from router.core import Gateway, RouterCore
from router.outbox import ClientRequest
from router.requests import RequestSpec
from router.timelines import Observer
from simulation.clock import NEVER, Clock, Loop
from simulation.network import Meter, Network, Post

FIRST_TEXT_PORT = 2
HOST = "tcp://127.0.0.{host}:{port}"
"""Each router has a host for itself and its detokenizers."""
WORDS = 1000
"""The tokens that the detokenizers know."""


class RouterProcess(Gateway):
    """A life of a router: its core and its mail, and its detokenizers, which die with it. It acts in turns of its own."""

    clock: Clock
    mail: Post[RouterInbox]

    def __init__(
        self,
        name: InstanceId,
        clock: Clock,
        network: Network,
        config: RouterConfig,
        observer: Observer,
        host: int = 1,
        next_port: int = FIRST_TEXT_PORT,
    ) -> None:
        self.name = name
        self.host = host
        self.address = HOST.format(host=host, port=1)
        self.next_port = next_port
        """The port of its next detokenizer, or of its successor's first."""
        self.clock = clock
        self.network = network
        self.loop = Loop(clock, self)
        mailbox = network.open(self.address, name, self.loop.wake, "router")
        self.mail = Post(name, RouterInbox, network, mailbox)
        self._meter = network.meter("router")
        self.detokenizers = [self.start_detokenizer(shard) for shard in range(config.detokenizers)]
        core = RouterCore(name, [each.address for each in self.detokenizers], config, observer)
        super().__init__(core, self.mail, clock)
        self.loop.wake(mailbox.next_deadline())  # what was sent to its predecessor

    def act(self) -> None:
        now = self.clock.now
        self._meter.begin()
        for _, message in self.mail.receive():
            self._send(self.core.receive(message, now))
            self._meter.lap(type(message).__name__)
        self._send(self.core.tick(now) + self.core.flush(now))
        self._meter.lap("deadlines")

    def next_deadline(self) -> float:
        deadline = self.core.next_deadline()
        return min(NEVER if deadline is None else deadline, self.mail.next_deadline())

    def submit(self, client: ClientRequest, specs: Sequence[RequestSpec]) -> None:
        """Raises what the core raises."""
        self._meter.begin()
        now = client.received_s = self.clock.now
        self.deliver(self.core.requests.submit(client, specs, now))
        self._meter.lap("requests")

    def deliver(self, sends: Iterable[Send]) -> None:
        """Send what the core decided outside of a turn, and wake the loop for its earliest deadline."""
        self._send(sends)
        self.loop.wake(self.next_deadline())

    def start_detokenizer(self, shard: int) -> "DetokenizerProcess":
        detokenizer = DetokenizerProcess(self, shard, HOST.format(host=self.host, port=self.next_port))
        self.next_port += 1
        self.mail.route(detokenizer.name, detokenizer.address)
        return detokenizer


class MeteredDetokenizer(Detokenizer):
    """A detokenizer's core, whose work is metered by the kind of the message."""

    def __init__(self, tokenizer: Tokenizer, meter: Meter) -> None:
        super().__init__(tokenizer)
        self._meter = meter

    def receive(self, message: AnswerMessage, now: float) -> list[TextDelta]:
        texts = super().receive(message, now)
        self._meter.lap(type(message).__name__)
        return texts


class DetokenizerProcess:
    """A detokenizer: its core and its mail, joined by the turns of its real process."""

    def __init__(self, router: RouterProcess, shard: int, address: str) -> None:
        clock, network = router.clock, router.network
        self.name, self.address = text_name(router.name, shard), address
        self.alive = True
        self._loop = Loop(clock, self)
        self._meter = network.meter("detokenizer")
        self.core = MeteredDetokenizer(words_tokenizer(), self._meter)
        mailbox = network.open(address, self.name, self._loop.wake, "detokenizer")
        self.mail: Post[DetokenizerInbox] = Post(self.name, DetokenizerInbox, network, mailbox)
        self.mail.route(router.name, router.address)
        self._turns = DetokenizerLoop(self.core, self.mail, router.name, shard, clock)
        self._loop.wake(clock.now)

    def act(self) -> None:
        self._meter.begin()
        self._turns.turn()
        self._meter.lap("TextBatch")

    def next_deadline(self) -> float:
        return min(self._turns.next_deadline(), self.mail.next_deadline())

    def kill(self) -> None:
        """As SIGKILL does."""
        self.alive = False
        self._loop.end()


@cache
def words_tokenizer() -> Tokenizer:
    """Token n is the word "n"."""
    return Tokenizer(models.WordLevel({str(n): n for n in range(WORDS)}, unk_token="0"))
