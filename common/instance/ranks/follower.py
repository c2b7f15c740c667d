"""The loop of a follower: it obeys the leader's plans and commands, and reports what became of them.

Owns the steps in flight and the grammars on this rank. Has no scheduler and decides nothing but its own end: it ends when the
leader says so, is gone or silent, or when a message was lost. Opens no socket and reads no clock except through its ports.
"""

from collections import deque
from dataclasses import dataclass
from typing import assert_never

from common.deadlines import earliest
from common.executor import Executor, Preparation, StepHandle, take_prepared
from common.instance.ports import Mail, Transfers
from common.instance.ranks.line import SILENCE_S, START_SILENCE_S, RankLine, RankLost, digest_tokens, unpack_plan
from common.messages.ranks import (
    Agreed,
    AskDrain,
    DropGrammars,
    End,
    Events,
    GrammarPrepared,
    Launch,
    LayersReached,
    Ping,
    Pong,
    PrepareGrammar,
    RankFailed,
    RankRefused,
    RankWelcome,
    StepReturned,
    ToFollower,
    TransferOrder,
)
from common.messages.transfers import PackedPush
from common.sampling_params import Grammar


@dataclass(slots=True, eq=False)
class _FollowerStep:
    """A step in flight."""

    number: int
    handle: StepHandle
    layers_reported: int = 0
    """The leader knows that so many layers are written."""


class FollowerLoop:
    """The loop of one rank that is not the leader. line: to the leader, whose name `mail` can reach."""

    def __init__(self, executor: Executor, transfers: Transfers, mail: Mail[ToFollower], line: RankLine) -> None:
        self._executor = executor
        self._transfers = transfers
        self._mail = mail
        self._line = line
        self._silence_s = START_SILENCE_S
        """Others may still load, and the leader too."""
        self._steps: deque[_FollowerStep] = deque()
        self._grammars: dict[int, Grammar] = {}
        """Those of open requests, by the leader's number: rows begin with these objects, and keep what is compiled."""
        self._preparing: dict[int, Preparation] = {}
        self.end: End | None = None
        """The leader's message that this rank is to exit."""
        self.stale = 0
        """Messages from others than this life of the leader."""

    def turn(self, now: float) -> None:
        """Obey, and report what happened. Raises RankLost when the leader is lost, and what executor or transfers raise."""
        for sender, message in self._mail.receive():
            if sender != self._line.to or isinstance(message, RankWelcome | RankRefused):
                self.stale += 1
                continue
            self._line.take(message, now)
            self._obey(message, now)
        if self.end is not None:
            return
        if self._line.to in self._mail.refused():
            raise RankLost(f"{self._line.who} is gone")
        self._line.check(now, self._silence_s)
        self._report_steps()
        self._report_grammars()
        events = self._transfers.poll()
        if events:
            self._line.send(Events(news=tuple(events)))

    def next_deadline(self) -> float:
        """When the next turn is due even if nothing happens before."""
        step_ends = self._steps[0].handle.ends_s if self._steps else None
        prepared = [each.ends_s for each in self._preparing.values()]
        silent_s = self._line.heard_s + self._silence_s
        return earliest(silent_s, step_ends, *prepared) or silent_s

    def ask_drain(self) -> None:
        """This process is to stop: ask the leader to drain the instance."""
        self._line.send(AskDrain())

    def fail(self, reason: str) -> None:
        """Tell the leader that this rank cannot go on."""
        self._line.send(RankFailed(reason=reason))

    def _obey(self, message: ToFollower, now: float) -> None:
        match message:
            case Launch():
                plan = unpack_plan(message, self._grammars)
                self._steps.append(_FollowerStep(plan.step, self._executor.launch(plan)))
            case TransferOrder(order=order):
                self._transfers.submit(order.unpack() if isinstance(order, PackedPush) else order)
            case Ping(sent_s=sent_s, serving=serving):
                if serving:
                    self._silence_s = SILENCE_S
                age_s = max(0.0, now - self._transfers.progress_s)
                self._line.send(Pong(sent_s=sent_s, heard_s=now, transfer_age_s=age_s))
            case PrepareGrammar(grammar_id=grammar_id, grammar=grammar, owner=owner):
                self._grammars[grammar_id] = grammar
                self._preparing[grammar_id] = self._executor.prepare(grammar, owner)
            case DropGrammars(grammar_ids=grammar_ids):
                for grammar_id in grammar_ids:
                    del self._grammars[grammar_id]
                    self._preparing.pop(grammar_id, None)
            case End():
                self.end = message
            case Agreed() | RankWelcome() | RankRefused():
                raise RankLost(f"{self._line.who} sent {type(message).__name__} while the instance serves")
            case _:
                assert_never(message)

    def _report_steps(self) -> None:
        while self._steps:
            step = self._steps[0]
            result = step.handle.poll()
            if result is None:
                layers = step.handle.layers_done
                if layers > step.layers_reported:
                    step.layers_reported = layers
                    self._line.send(LayersReached(step=step.number, layers=layers))
                return
            self._steps.popleft()
            digest = digest_tokens(result.tokens)
            self._line.send(StepReturned(step=step.number, digest=digest))

    def _report_grammars(self) -> None:
        for grammar_id, refused in take_prepared(self._preparing):
            self._line.send(GrammarPrepared(grammar_id=grammar_id, refused=refused))
