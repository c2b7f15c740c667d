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
from router.requests import ClientRequest, RequestSpec
from router.timelines import Observer
from simulation.clock import NEVER, Clock, Loop
from simulation.network import Meter, Network, Post
from simulation.plan import FrontCosts

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
        front: FrontCosts = FrontCosts(),  # noqa: B008  it is frozen
    ) -> None:
        self.name = name
        self.front = front
        self._busy_s = 0.0
        """Until when it reads requests and sends events."""
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
        self.loop.stop_until(self._busy_s)

    def next_deadline(self) -> float:
        deadline = self.core.next_deadline()
        return min(NEVER if deadline is None else deadline, self.mail.next_deadline())

    def reads_s(self, prompt_tokens: int) -> float:
        """A request of so many tokens is here: when it can be submitted."""
        self._busy_s = max(self.clock.now, self._busy_s) + self.front.request_s
        self.loop.stop_until(self._busy_s)
        return self._busy_s + prompt_tokens * self.front.prompt_token_s

    def sends_s(self) -> float:
        """There is an event for a client: when it has read it."""
        self._busy_s = max(self.clock.now, self._busy_s) + self.front.event_s
        return self._busy_s

    def submit(self, client: ClientRequest, specs: Sequence[RequestSpec], received_s: float | None = None) -> None:
        """received_s: when it was here; None: now. Raises what the core raises."""
        self._meter.begin()
        now = self.clock.now
        client.received_s = now if received_s is None else received_s
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
        self.deltas = 0
        """How many texts this turn has made."""

    def receive(self, message: AnswerMessage, now: float) -> list[TextDelta]:
        texts = super().receive(message, now)
        self.deltas += len(texts)
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
        self._clock, self._token_s = clock, router.front.token_s
        self.mail.work_s = self.work_s
        self.mail.route(router.name, router.address)
        self._turns = DetokenizerLoop(self.core, self.mail, router.name, shard, clock)
        self._loop.wake(clock.now)

    def act(self) -> None:
        self._meter.begin()
        self.core.deltas = 0
        self._turns.turn()
        self._meter.lap("TextBatch")
        self._loop.stop_until(self._clock.now + self.work_s())

    def next_deadline(self) -> float:
        return min(self._turns.next_deadline(), self.mail.next_deadline())

    def work_s(self) -> float:
        """What this turn's tokens take."""
        return self.core.deltas * self._token_s

    def kill(self) -> None:
        """As SIGKILL does."""
        self.alive = False
        self._loop.end()


@cache
def words_tokenizer() -> Tokenizer:
    """Token n is the word "n"."""
    return Tokenizer(models.WordLevel({str(n): n for n in range(WORDS)}, unk_token="0"))
