"""The ports of a worker, made of lists, and a worker over them.

Owns what was sent, launched and submitted. Knows no test.
"""

from collections import deque
from typing import Any

import numpy as np

from common.executor import EngineDescription, StepPlan, StepResult, Work
from common.ids import ROUTER, AttemptId, Digest, InstanceId, Int32Array
from common.instance.membership import Memberships
from common.instance.ports import Action, Decision, Event, LayersDone, Prepared, Report, RouterJoined, Scheduler
from common.instance.worker import InstanceWorker
from common.messages import (
    Counters,
    Failed,
    Heartbeat,
    InstanceInbox,
    Load,
    Timeline,
    Welcome,
)
from common.messages.transfers import TransferCommand, TransferEvent
from common.messages.variants import Task, WeightsSource
from common.pages.pool import PagePool
from common.sampling_params import Grammar
from engine.grammar.grammars import anything_goes
from prefill.scheduler import PrefillMessage, PrefillScheduler
from tests.builders import engine, instance, limits
from tests.common.mailboxes import FakeMail
from tests.engine.toy import PreparedLater

ADDRESS = "tcp://127.0.0.1:7"
WELCOME = Welcome(router=ROUTER, address=ADDRESS, detokenizers=("tcp://127.0.0.1:9",), heartbeat_s=1.0, dead_after_s=3.0)


class InstanceMail(FakeMail[InstanceInbox]):
    """Has refused and lost some mail already."""

    def __init__(self) -> None:
        super().__init__()
        self.frames_refused, self.messages_lost = {"body": 2, "magic": 1}, {"full": 4}

    def names(self) -> list[str]:
        """Kinds of what was sent since the last call."""
        names = [type(message).__name__ for _, message in self.sent]
        self.sent.clear()
        return names


class FakeStep:
    ends_s: float | None = None

    def __init__(self) -> None:
        self.result: StepResult | None = None
        self.layers_done = self.progress = 0

    def poll(self) -> StepResult | None:
        return self.result


class StaticExecutor:
    """The part of an executor that nothing changes: it has one set of weights, no adapters and no tasks."""

    weights = Digest("")

    @property
    def description(self) -> EngineDescription:
        return engine()

    def stage(self, source: WeightsSource) -> Work:
        raise AssertionError("nothing is staged here")

    def perform(self, task: Task) -> Work:
        raise AssertionError("no task is here")

    def free_adapter(self, digest: Digest) -> None: ...

    def switch(self) -> None: ...

    def drop_staged(self) -> None: ...

    def digest_pages(self, pages: Int32Array) -> bytes:
        return b""


class FakeExecutor(StaticExecutor):
    def __init__(self) -> None:
        self.steps: deque[tuple[StepPlan, FakeStep]] = deque()
        self.now = self.prepared_s = 0.0
        self.prepared_for: list[str] = []

    def launch(self, plan: StepPlan) -> FakeStep:
        self.steps.append((plan, FakeStep()))
        return self.steps[-1][1]

    def finish_one(self) -> None:
        plan, step = self.steps.popleft()
        step.result = StepResult(plan, np.full(len(plan.sampled_rows), 42, dtype=np.int32))

    def prepare(self, grammar: Grammar, owner: str = "") -> Work:
        self.prepared_for.append(owner)
        return PreparedLater(anything_goes(grammar, "the fake"), self.prepared_s, lambda: self.now)

    def close(self) -> None:
        self.steps.clear()


class FakeTransfers:
    def __init__(self) -> None:
        self.events: list[TransferEvent] = []
        self.submitted: list[TransferCommand] = []
        self.progress_s = 0.0

    def submit(self, command: TransferCommand) -> None:
        self.submitted.append(command)

    def poll(self) -> list[TransferEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None: ...


class FakeScheduler:
    """Plans as many empty steps as it is told, and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.takes, self.last_step, self.pool = PrefillMessage, 0, PagePool(6, caches=False)
        self.answers: list[Action] = []
        self.prepared: dict[str, Failed | None] = {}
        self.drained = False
        self.pages_total = 5
        self.steps_to_plan = 0
        self.deadline_s: float | None = None

    def receive(self, sender: InstanceId, message: PrefillMessage, now: float) -> list[Action]:
        self.told.append(type(message).__name__)
        answers, self.answers = self.answers, []
        return answers

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, RouterJoined):
            return []
        if isinstance(event, Prepared):
            self.prepared[event.key.request_id] = event.refused
        self.told.append(f"{event.layers} layers" if isinstance(event, LayersDone) else type(event).__name__)
        return []

    def step_done(self, result: StepResult, now: float) -> list[Action]:
        self.told.append("step done")
        return []

    def tick(self, now: float) -> list[Action]:
        return []

    def decide(self, now: float) -> Decision:
        if self.steps_to_plan == 0:
            return Decision(None, [])
        self.steps_to_plan -= 1
        return Decision(StepPlan(1), [], follows_layers=True)

    def next_deadline(self) -> float | None:
        return self.deadline_s

    def key_in(self, row: int) -> AttemptId:
        raise AssertionError("its plans are empty")

    def report(self) -> Report:
        return Report(
            Load(pages_free=5, pages_total=self.pages_total), Counters(steps=6), self.drained, draining="Drain" in self.told
        )

    def take_timelines(self) -> list[Timeline]:
        return []


class Rig:
    """A worker over fake ports, with the prefill scheduler or another."""

    def __init__(self, scheduler: Scheduler[Any] | None = None) -> None:
        self.mail, self.executor, self.transfers = InstanceMail(), FakeExecutor(), FakeTransfers()
        me = instance("p", "prefill")
        self.memberships = Memberships(me, [ADDRESS], startup_timeout_s=5.0, now=0.0)
        made = scheduler or PrefillScheduler(me, engine(), limits(chunk_tokens=4))
        self.worker: InstanceWorker = InstanceWorker(
            self.memberships, lambda life, former: made, self.executor, self.transfers, self.mail
        )

    def turn(self, now: float, *messages: InstanceInbox) -> list[str]:
        """What is sent when these messages have arrived from the router."""
        self.mail.arriving += [(ROUTER, message) for message in messages]
        self.worker.turn(now)
        return self.mail.names()

    def heartbeat(self, now: float, *messages: InstanceInbox) -> Heartbeat:
        """The heartbeat of a turn."""
        self.mail.arriving += [(ROUTER, message) for message in messages]
        self.worker.turn(now)
        beats = [message for _, message in self.mail.sent if isinstance(message, Heartbeat)]
        self.mail.sent.clear()
        return beats[-1]


class FakedRig(Rig):
    """A worker whose scheduler does as it is told."""

    def __init__(self) -> None:
        self.scheduler = FakeScheduler()
        super().__init__(self.scheduler)
