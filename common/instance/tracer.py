"""What an instance records of its work, while somebody traces the fleet.

Owns what has begun and not ended: pushes, and handoffs on either side. Knows plans, pushes and handoffs. Decides nothing, and
nothing depends on it. The worker calls it only while `recorder.on`.

    prefill   steps   chunks   pushes: from posted to done or failed   handoffs: from the first token until Handoff is sent
    decode    steps   chunks                                           handoffs: from its arrival until its first step begins
                      starts: the first decode step of a request    answers: from its return until the ending

Times are those of the turns that saw it happen.
"""

from collections.abc import Callable, Sequence

from common.executor import StepPlan
from common.ids import AttemptId, InstanceId, Ticket
from common.instance.ports import Action, Send
from common.messages import Cancel, Handoff, InstanceInfo, TokenBatch, Trace, Withdraw
from common.messages.transfers import Push, PushDone, PushFailed, TransferEvent
from common.tracing import Tracer


class InstanceTracer(Tracer):
    """key_in: see `Scheduler.key_in`. now: the time of the present turn; the worker sets it."""

    def __init__(self, me: InstanceInfo, key_in: Callable[[int], AttemptId], unix_s: float = 0.0) -> None:
        super().__init__(me.id, me.incarnation, unix_s)
        self.now = 0.0
        self._key_in = key_in
        self._returned_s = 0.0
        """When the last step came back: the next one began then at the earliest."""
        self._pushes: dict[Ticket, tuple[Push, float]] = {}
        self._sampled: dict[AttemptId, float] = {}
        """Since when handoffs hold up their second token."""
        self._landed: dict[AttemptId, float] = {}
        """Handoffs that have arrived, and whose requests wait for their first step."""
        self._answering: dict[AttemptId, float] = {}
        """Since when requests have been decoding."""
        self._decodes = me.role == "decode"

    def ask(self, router: InstanceId, message: Trace, now: float) -> None:
        if not self.recorder.on:
            self._pushes.clear()
            self._sampled.clear()
            self._landed.clear()
            self._answering.clear()
        super().ask(router, message, now)

    def receive(self, message: object) -> None:
        """A message for the scheduler has arrived."""
        if isinstance(message, Handoff):
            self._landed[message.key] = self.now
        elif isinstance(message, Cancel):
            self._answered(message.key)

    def act(self, actions: Sequence[Action]) -> None:
        """The scheduler has decided this."""
        for action in actions:
            if isinstance(action, Push):
                self._pushes[action.ticket] = action, self.now
            elif isinstance(action, Send):
                self._send(action)

    def _send(self, action: Send) -> None:
        message = action.message
        if isinstance(message, Handoff | Withdraw):
            since_s = self._sampled.pop(message.key, None)
            if since_s is not None and isinstance(message, Handoff):
                sizes = {"pages": message.pushed_pages, "bytes": message.pushed_bytes}
                name = message.key.request_id
                self.recorder.add("handoffs", "handoff", since_s, self.now, name, peer=action.to, **sizes)
        elif isinstance(message, TokenBatch):
            for delta in message.deltas:
                if delta.ending is not None:
                    self._answered(delta.key)
                    self._sampled.pop(delta.key, None)

    def _answered(self, key: AttemptId) -> None:
        since_s = self._answering.pop(key, None)
        if since_s is not None:
            self.recorder.add("answers", "answer", since_s, self.now, key.request_id)

    def transfer_ended(self, event: TransferEvent) -> None:
        if not isinstance(event, PushDone | PushFailed):
            return
        push, posted_s = self._pushes.pop(event.ticket, (None, 0.0))
        if push is None:
            return  # it was posted before the trace began
        name, pushed_bytes = ("push", event.pushed_bytes) if isinstance(event, PushDone) else ("failed push", 0)
        self.recorder.add(
            "pushes",
            name,
            posted_s,
            self.now,
            push.key.request_id,
            peer=push.peer,
            pages=len(push.source_pages),
            bytes=pushed_bytes,
            layers=0 if push.layers is None else len(push.layers),
        )

    def step_done(self, plan: StepPlan, launched_s: float) -> None:
        """A step has come back, and its rows still belong to their requests."""
        began_s, self._returned_s = max(launched_s, self._returned_s), self.now
        rows, tokens = len(plan.decode_rows), plan.chunk_tokens
        name = "prefill step" if not rows else "mixed step" if tokens else "decode step"
        self.recorder.add("steps", name, began_s, self.now, number=plan.step, chunk_tokens=tokens, decode_rows=rows)
        for chunk in plan.chunks:
            key = self._key_in(chunk.row)
            sizes = {"attempt": key.attempt, "start": chunk.start, "tokens": len(chunk.token_ids), "step": plan.step}
            self.recorder.add("chunks", "chunk", began_s, self.now, key.request_id, **sizes)
            if chunk.last:
                (self._answering if self._decodes else self._sampled)[key] = self.now
        for start in plan.starts:
            if start.last_token is not None:
                key = self._key_in(start.row)
                self.recorder.add("handoffs", "landing", self._landed.pop(key, began_s), began_s, key.request_id)
                self.recorder.add("starts", "first decode step", began_s, self.now, key.request_id, step=plan.step)
                self._answering[key] = self.now
