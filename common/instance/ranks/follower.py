"""A rank that is not the leader: how it joins its instance, and its loop, which obeys the leader and reports what became of it.

Owns what this rank says at the start, and then the steps in flight and the grammars on this rank. Has no scheduler and decides
nothing but its own end: it ends when the leader says so, is gone or silent, or when a message was lost. Opens no socket and reads
no clock except through its ports.

    hello, again and again ─► welcome ─► offers, each answered with what is agreed ─► ready ─► plans and commands

Another thread may load the model meanwhile, and say what this rank offers.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from common.absence import Absence
from common.deadlines import earliest
from common.errors import PeerRefused, TandemError
from common.executor import Executor, StepHandle, Work, take_done
from common.ids import InstanceId
from common.instance.ports import Mail, Transfers
from common.instance.ranks.line import SILENCE_S, START_SILENCE_S, RankLine, RankLost, digest_tokens, unpack_plan
from common.messages import EngineChoices, Failed, ModelIdentity, PoolDescriptor
from common.messages.ranks import (
    Agreed,
    AskDrain,
    DoOnRank,
    DropGrammars,
    DropOnRank,
    End,
    Events,
    FreeAdapter,
    FromLeader,
    GrammarPrepared,
    Launch,
    LayersReached,
    Offer,
    Ping,
    Pong,
    PrepareGrammar,
    RankDone,
    RankFailed,
    RankHello,
    RankReady,
    RankRefused,
    RankWelcome,
    StepReturned,
    SwitchOnRank,
    ToFollower,
    TransferOrder,
)
from common.messages.transfers import PackedPush
from common.messages.variants import Task, WeightsSource
from common.sampling_params import Grammar

HELLO_S = 1.0
SOMEBODY = InstanceId("rank-0")
"""The leader, whose name is not known before it answers."""


@dataclass(slots=True, eq=False)
class _FollowerStep:
    """A step in flight."""

    number: int
    handle: StepHandle
    layers_reported: int = 0
    """The leader knows that so many layers are written."""


class FollowerLoop:
    """The loop of one rank that is not the leader. leader: the address of rank 0. `turn` is called until it is complete, then
    `serve`, and `turn` again until the `ending`."""

    def __init__(self, mail: Mail[ToFollower], leader: str, hello: RankHello) -> None:
        self._mail = mail
        self._leader = leader
        self._hello = hello
        self._hello_s = 0.0
        self.welcome: RankWelcome | None = None
        self._line: RankLine
        """To the leader, from the welcome on."""
        self.agreed: int | None = None
        """How many pages all ranks use; None: that is not known yet for the latest offer."""
        self._unsent: list[Offer | RankReady] = []
        self.complete = False
        """The leader was sent that this rank is ready."""
        self._serves = False
        self._executor: Executor
        self._transfers: Transfers
        self._silence_s = START_SILENCE_S
        """Others may still load, and the leader too."""
        self._steps: deque[_FollowerStep] = deque()
        self._grammars: dict[int, Grammar] = {}
        """Those of open requests, by the leader's number: rows begin with these objects, and keep what is compiled."""
        self._preparing: dict[int, Work] = {}
        self._working: dict[int, Work] = {}
        """Weights that are being made ready, with the leader's number."""
        self._absence = Absence()
        self.ending: End | None = None
        """The leader's message that this rank is to exit."""
        self.stale = 0
        """Messages from others than this life of the leader."""
        mail.route(SOMEBODY, leader, watch=True)

    # --- start: for the thread that loads ---------------------------------------------------------------------------------------

    def offer(self, pages: int) -> None:
        """This rank can hold so many pages. Offer again only when it is known what is agreed."""
        self.agreed = None
        self._unsent.append(Offer(pages=pages))

    def ready(self, model: ModelIdentity, pool: PoolDescriptor, engine: EngineChoices = EngineChoices()) -> None:  # noqa: B008
        """This rank can take plans and writes. They may come as soon as it is complete: `serve` before the next turn."""
        self._unsent.append(RankReady(model=model, pool=pool, engine=engine))

    def serve(self, executor: Executor, transfers: Transfers) -> None:
        """Take plans and writes from now on."""
        self._serves, self._executor, self._transfers = True, executor, transfers

    @property
    def waits_for(self) -> str:
        """Why it is not welcome yet, for people; empty when it is. For any thread."""
        if self.welcome is not None:
            return ""
        if self._mail.reaches(SOMEBODY):
            return f"rank 0 at {self._leader} waits for other ranks, which it names"
        return f"nobody answered at {self._leader}: does rank 0 listen there, with the same --cluster-key?"

    # --- turns ------------------------------------------------------------------------------------------------------------------

    def turn(self, clock: Callable[[], float]) -> None:
        """Obey, and report what happened. Raises RankLost when the leader is lost, PeerRefused when this cannot be a rank of the
        instance, and what executor or transfers raise."""
        now = clock()
        if self._absence.begins(now) and self.welcome is not None:
            self._line.forgive(now)
        self._take_turn(now)
        self._absence.ends(now, clock(), self.next_deadline())

    def _take_turn(self, now: float) -> None:
        gone = self._mail.refused()  # read in each turn, and before the mail: a leader that was gone before is not this one
        is_lost = self.welcome is not None and self._line.to in gone
        for sender, message in self._mail.receive():
            if isinstance(message, RankWelcome | RankRefused):
                self._be_answered(sender, message, now)
            elif self.welcome is None or sender != self._line.to:
                self.stale += 1
            else:
                self._line.take(message, now)
                self._obey(message, now)
        if self.ending is not None:
            return
        if self.welcome is None:
            if now >= self._hello_s:
                self._hello_s = now + HELLO_S
                self._mail.send(SOMEBODY, self._hello)
            return
        if is_lost:
            raise RankLost(f"{self._line.who} is gone")
        self._line.check(now, self._silence_s)
        for unsent in self._unsent:
            self._line.send(unsent)
            self.complete = isinstance(unsent, RankReady)
        self._unsent.clear()
        if self._serves:
            self._report_steps()
            for grammar_id, _, refused in take_done(self._preparing):
                self._line.send(GrammarPrepared(grammar_id=grammar_id, refused=refused))
            for work, result, refused in take_done(self._working):
                self._line.send(RankDone(work=work, result=result, refused=refused))
            if events := self._transfers.poll():
                self._line.send(Events(news=tuple(events)))

    def next_deadline(self) -> float:
        """When the next turn is due even if nothing happens before."""
        if self.welcome is None:
            return self._hello_s
        step_ends = self._steps[0].handle.ends_s if self._steps else None
        prepared = [each.ends_s for each in self._preparing.values()]
        prepared += [work.ends_s for work in self._working.values()]
        silent_s = self._line.heard_s + self._silence_s
        return earliest(silent_s, step_ends, *prepared) or silent_s

    def ask_drain(self) -> None:
        """This process is to stop: ask the leader to drain the instance."""
        self._line.send(AskDrain())

    def end(self, reason: str, step: int | None = None) -> None:
        """Tell the leader that this rank cannot go on. step: the one that has failed; None: it was no step."""
        if self.welcome is not None:
            self._line.send(RankFailed(reason=reason, step=step))

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _be_answered(self, sender: InstanceId, answer: RankWelcome | RankRefused, now: float) -> None:
        """The hello has an answer; what comes after the welcome is of no account. Raises PeerRefused."""
        if self.welcome is not None:
            self.stale += 1
        elif isinstance(answer, RankRefused):
            raise PeerRefused(f"rank 0 at {self._leader} refuses rank {self._hello.rank}: {answer.reason}")
        else:
            self.join(sender, answer, now)

    def join(self, leader: InstanceId, welcome: RankWelcome, now: float) -> None:
        """This is a rank of the instance from now on."""
        self.welcome = welcome
        self._line = RankLine(self._mail, leader, f"rank 0 at {self._leader}", now)
        self._mail.route(leader, self._leader, watch=True)

    def _obey(self, message: FromLeader, now: float) -> None:
        """Raises RankLost."""
        if not isinstance(message, Ping | End) and isinstance(message, Agreed) == self._serves:
            raise self._line.unexpected(message, self._serves)
        match message:
            case Launch():
                plan = unpack_plan(message, self._grammars)
                self._steps.append(_FollowerStep(plan.step, self._executor.launch(plan)))
            case TransferOrder(order=order):
                self._transfers.submit(order.unpack() if isinstance(order, PackedPush) else order)
            case Ping(sent_s=sent_s, serving=serving):
                if serving:
                    self._silence_s = SILENCE_S
                age_s = max(0.0, now - self._transfers.progress_s) if self._serves else 0.0
                self._line.send(Pong(sent_s=sent_s, heard_s=now, transfer_age_s=age_s))
            case PrepareGrammar(grammar_id=grammar_id, grammar=grammar, owner=owner):
                self._grammars[grammar_id] = grammar
                self._preparing[grammar_id] = self._executor.prepare(grammar, owner)
            case DropGrammars(grammar_ids=grammar_ids):
                for grammar_id in grammar_ids:
                    del self._grammars[grammar_id]
                    self._preparing.pop(grammar_id, None)
            case DoOnRank(work=work, task=task):
                self._perform(work, task)
            case FreeAdapter(adapter=adapter):
                self._executor.free_adapter(adapter)
            case SwitchOnRank():
                self._executor.switch()
            case DropOnRank():
                self._executor.drop_staged()
            case Agreed(pages=pages):
                self.agreed = pages
            case End(reason=reason):
                if not self._serves:
                    raise RankLost(f"{self._line.who} has ended the start: {reason}")
                self.ending = message
            case _:
                assert_never(message)

    def _perform(self, work: int, task: WeightsSource | Task) -> None:
        try:
            if isinstance(task, WeightsSource):
                self._working[work] = self._executor.stage(task)
            else:
                self._working[work] = self._executor.perform(task)
        except TandemError as error:
            self._line.send(RankDone(work=work, refused=Failed.of(error)))

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
            digest = digest_tokens(result)
            self._line.send(StepReturned(step=step.number, digest=digest))
