"""The detokenizer's process: its mailbox, its loop, and the core between them.

Owns the mailbox, the turns and the heartbeat. Decides nothing: `common.text.detokenizer` does. Does not know signals or flags.
"""

import logging
import threading
import time
from collections.abc import Sequence

from common.deadlines import earliest
from common.ids import ROUTER, InstanceId, text_name
from common.mail import Mailbox
from common.messages import DetokenizerHeartbeat, DetokenizerInbox, TextDelta, Trace
from common.text.detokenizer import Detokenizer, cut
from common.text.tokenizer_manager import TokenizerManager
from common.tracing import Tracer
from common.trust import LOOPBACK_ONLY, Trust

HEARTBEAT_S = 1.0
"""Seconds between heartbeats to the router."""

TURN_S = 0.05
"""How long one turn takes in mail: an answer that is opened again takes milliseconds, and text and heartbeats must not wait."""

_log = logging.getLogger(__name__)


class DetokenizerManager:
    """Made and run by one thread. bind: tcp://host:port of its inbox. router: whose it is. shard: which of that router's
    detokenizers. Raises ConfigError when the model has no tokenizer or the address cannot be bound.

    `meet_router` may be called at any time, also while it runs, so the detokenizer can start before the router. Until then no
    mail is read: the text that it brings could not be sent, and instances that find a new detokenizer tell it tokens at once.
    """

    def __init__(self, bind: str, model: str, router: InstanceId = ROUTER, shard: int = 0, trust: Trust = LOOPBACK_ONLY) -> None:
        self._detokenizer = Detokenizer(TokenizerManager(model).backend)
        self._router, self._shard = router, shard
        self._mailbox: Mailbox[DetokenizerInbox] = Mailbox(text_name(router, shard), DetokenizerInbox, bind, trust=trust)
        self._tracer = Tracer(text_name(router, shard), unix_s=time.time() - time.monotonic())
        self._stopping = threading.Event()
        self._router_address: str | None = None
        self._may_read = threading.Event()
        self._next_beat_s = time.monotonic()
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
                self._turn()
        finally:
            self.close()
        if self._detokenizer.dropped:
            _log.info("dropped while running: %s", dict(self._detokenizer.dropped))

    def close(self) -> None:
        """Close the inbox; needed only if it never runs. Idempotent."""
        self._mailbox.close()

    def _turn(self) -> None:
        """Wait for mail, a deadline or the next heartbeat, and send all text that this brought."""
        deadline = earliest(self._detokenizer.next_deadline(), self._tracer.next_deadline())
        wake_s = self._next_beat_s if deadline is None else min(deadline, self._next_beat_s)
        self._mailbox.wait(wake_s - time.monotonic())
        self._mailbox.route(self._router, self._router_address)
        texts: list[TextDelta] = []
        began_s = time.monotonic()
        while (now := time.monotonic()) < began_s + TURN_S and (mail := self._mailbox.receive(1)):
            sender, message = mail[0]
            if not isinstance(message, Trace):
                texts += self._detokenizer.receive(message, now)
            elif sender == self._router:
                self._tracer.ask(sender, message, now)
        texts += self._detokenizer.tick(now)
        for batch in cut(texts):
            self._mailbox.send(self._router, batch)
        for probed in self._detokenizer.take_probed():
            self._mailbox.send(self._router, probed)
        if self._tracer.runs:
            self._trace(texts, began_s)
        if now >= self._next_beat_s:
            self._next_beat_s = now + HEARTBEAT_S
            self._mailbox.send(self._router, heartbeat_of(self._detokenizer, self._shard))

    def _trace(self, texts: Sequence[TextDelta], began_s: float) -> None:
        """Record the turn, if it brought text, and send what is due."""
        now = time.monotonic()
        if texts and self._tracer.recorder.on:
            tokens = sum(len(delta.token_ids) for delta in texts)
            self._tracer.recorder.add("turns", "turn", began_s, now, deltas=len(texts), tokens=tokens)
        for router, spans in self._tracer.due(now):
            self._mailbox.send(router, spans)


def heartbeat_of(core: Detokenizer, shard: int) -> DetokenizerHeartbeat:
    dropped = sum(core.dropped.values())
    return DetokenizerHeartbeat(open_answers=core.open_answers, early_answers=core.early_answers, dropped=dropped, shard=shard)
