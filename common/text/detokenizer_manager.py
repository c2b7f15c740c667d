"""The detokenizer's process: its mailbox, its loop, and the core between them.

Owns the mailbox, the turns and the heartbeat. Decides nothing: `common.text.detokenizer` does. Does not know signals or flags.
A simulated detokenizer has the same turns, over mail and a clock of its own.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from common.access import LOOPBACK_ONLY, Trust
from common.deadlines import earliest
from common.ids import ROUTER, InstanceId, text_name
from common.mail import Mailbox
from common.messages import AnyMessage, DetokenizerHeartbeat, DetokenizerInbox, TextDelta, Trace
from common.text.detokenizer import Detokenizer, cut
from common.text.stops import NewReader
from common.text.tokenizer_manager import TokenizerManager
from common.tracing import Tracer

HEARTBEAT_S = 1.0
"""Seconds between heartbeats to the router."""

TURN_S = 0.05
"""How long one turn takes in mail: an answer that is opened again takes milliseconds, and text and heartbeats must not wait."""

_log = logging.getLogger(__name__)


class DetokenizerMail(Protocol):
    """A detokenizer's inbox, and its way to its router."""

    def send(self, to: InstanceId, message: AnyMessage, /) -> object: ...

    def receive(self, most: int, /) -> list[tuple[InstanceId, DetokenizerInbox]]: ...


class DetokenizerLoop:
    """The turns of a detokenizer. clock: returns seconds. unix_s: what to add to them to have UNIX time."""

    def __init__(
        self,
        core: Detokenizer,
        mail: DetokenizerMail,
        router: InstanceId,
        shard: int,
        clock: Callable[[], float] = time.monotonic,
        unix_s: float = 0.0,
    ) -> None:
        self.core = core
        self._mail, self._router, self._shard, self._clock = mail, router, shard, clock
        self._tracer = Tracer(text_name(router, shard), unix_s=unix_s)
        self._next_beat_s = clock()

    def next_deadline(self) -> float:
        """When a turn is due although no mail comes: for a deadline, or the next heartbeat."""
        deadline = earliest(self.core.next_deadline(), self._tracer.next_deadline())
        return self._next_beat_s if deadline is None else min(deadline, self._next_beat_s)

    def turn(self) -> None:
        """Take in the mail that is there, act on deadlines, and send all text that this brings."""
        texts: list[TextDelta] = []
        began_s = self._clock()
        while (now := self._clock()) < began_s + TURN_S and (mail := self._mail.receive(1)):
            sender, message = mail[0]
            if not isinstance(message, Trace):
                texts += self.core.receive(message, now)
            elif sender == self._router:
                self._tracer.ask(sender, message, now)
        texts += self.core.tick(now)
        for batch in cut(texts):
            self._mail.send(self._router, batch)
        for probed in self.core.take_probed():
            self._mail.send(self._router, probed)
        if self._tracer.runs:
            ended_s, recorder = self._clock(), self._tracer.recorder
            if texts and recorder.on:
                tokens = sum(len(delta.token_ids) for delta in texts)
                recorder.add("turns", "turn", began_s, ended_s, deltas=len(texts), tokens=tokens)
            for router, spans in self._tracer.due(ended_s):
                self._mail.send(router, spans)
        if now >= self._next_beat_s:
            self._next_beat_s = now + HEARTBEAT_S
            core, dropped = self.core, sum(self.core.dropped.values())
            beat = DetokenizerHeartbeat(core.open_answers, core.early_answers, dropped, self._shard)
            self._mail.send(self._router, beat)


class DetokenizerManager:
    """Made and run by one thread. bind: tcp://host:port of its inbox. router: whose it is. shard: which of that router's
    detokenizers. readers: makes what makes readers of answers, from the chat template. Raises
    ConfigError when the model has no tokenizer or the address cannot be bound.

    `meet_router` may be called at any time, also while it runs, so the detokenizer can start before the router. Until then no
    mail is read: the text that it brings could not be sent, and instances that find a new detokenizer tell it tokens at once.
    """

    def __init__(
        self,
        bind: str,
        model: str,
        router: InstanceId = ROUTER,
        shard: int = 0,
        trust: Trust = LOOPBACK_ONLY,
        chat_template: str = "",
        readers: Callable[[str], NewReader] | None = None,
    ) -> None:
        tokenizer = TokenizerManager(model, chat_template)
        core = Detokenizer(tokenizer.backend, new_reader=None if readers is None else readers(tokenizer.chat_template))
        self._router = router
        self._mailbox: Mailbox[DetokenizerInbox] = Mailbox(text_name(router, shard), DetokenizerInbox, bind, trust=trust)
        self._loop = DetokenizerLoop(core, self._mailbox, router, shard, unix_s=time.time() - time.monotonic())
        self._stopping = threading.Event()
        self._router_address: str | None = None
        self._may_read = threading.Event()
        self.address = self._mailbox.address

    def meet_router(self, address: str) -> None:
        """Send text to this address from the next turn on. Any thread may call it."""
        self._router_address = address
        self._may_read.set()
        self._mailbox.wake()

    def stop(self) -> None:
        """End `run` after the present turn. Any thread may call it, also before `run` and after its end."""
        self._stopping.set()
        self._may_read.set()
        self._mailbox.wake()

    def run(self) -> None:
        """Turn until `stop`, then close the inbox."""
        self._may_read.wait()
        try:
            while not self._stopping.is_set():
                self._mailbox.wait(self._loop.next_deadline() - time.monotonic())
                self._mailbox.route(self._router, self._router_address)
                self._loop.turn()
        finally:
            self.close()
        if self._loop.core.dropped:
            _log.info("dropped while running: %s", dict(self._loop.core.dropped))

    def close(self) -> None:
        """Close the inbox; needed only if it never runs. Idempotent."""
        self._mailbox.close()
