"""One engine without HTTP: the scheduler of a colocated instance and its executor, in this process.

Owns the loop of `common/instance/worker.py` without mail and transfers, and what a router does for a request that gives up its
memory: it goes on as the next attempt, with the answer so far behind its prompt. Measures nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.offline.workload import Asked
from common.errors import Preempted, TandemError
from common.executor import EngineDescription, Executor, StepHandle
from common.ids import ROUTER, Incarnation, InstanceId, Key, RequestId, pack_ids
from common.instance.limits import InstanceLimits
from common.instance.ports import Action, RouterJoined, Send
from common.instance.worker import STEPS_IN_FLIGHT
from common.messages import Failed, Generate, InstanceInfo, PoolDescriptor, TokenBatch, TokenDelta
from common.sampling_params import SamplingParams
from decode.scheduler import DecodeScheduler

STEP_S = 60.0
"""A step that takes longer has failed."""
FOREVER_S = 1e9


class OfflineFailed(TandemError):
    """A sequence did not get its answer."""


@dataclass(slots=True)
class Served:
    """answers: the token ids of each sequence. decode_rows: of all steps together. preempted: how often a sequence gave up its
    memory, and had its prompt and its answer so far computed again."""

    answers: list[list[int]]
    steps: int = 0
    decode_rows: int = 0
    preempted: int = 0


def serve(
    executor: Executor, chunk_tokens: int, ready: threading.Event, sequences: Sequence[Asked], temperature: float
) -> Served:
    """Answer all sequences, which are there from the start. ready: the executor's `wake` sets it. Raises OfflineFailed."""
    scheduler = _scheduler(executor.description, chunk_tokens, len(sequences))
    book = _Book(scheduler, sequences, temperature)
    served = Served([request.answer for request in book.requests])
    handles: deque[StepHandle] = deque()
    book.begin()
    while book.open:
        told = scheduler.tick(time.monotonic())
        while len(handles) < STEPS_IN_FLIGHT:
            decision = scheduler.decide(time.monotonic())
            told += decision.actions
            if decision.plan is None:
                break
            handles.append(executor.launch(decision.plan))
            served.steps += 1
            served.decode_rows += len(decision.plan.decode_rows)
        while handles and (result := handles[0].poll()) is not None:
            handles.popleft()
            told += scheduler.step_done(result, time.monotonic())
        book.heed(told)
        if not told and not handles:
            raise OfflineFailed(f"{book.open} sequences wait, and none can begin: --kv-memory is too small")
        if not told and not ready.wait(STEP_S):
            raise OfflineFailed(f"a step took more than {STEP_S:g} s")
        ready.clear()
    served.preempted = book.preempted
    return served


@dataclass(slots=True)
class _Request:
    asked: Asked
    attempt: int = 0
    answer: list[int] = field(default_factory=list)


class _Book:
    """The requests, and their attempts. open: how many have no whole answer yet."""

    def __init__(self, scheduler: DecodeScheduler, sequences: Sequence[Asked], temperature: float) -> None:
        self.requests = [_Request(asked) for asked in sequences]
        self.open = len(self.requests)
        self.preempted = 0
        self._scheduler, self._temperature = scheduler, temperature

    def begin(self) -> None:
        for number in range(len(self.requests)):
            self._send(number)

    def heed(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, TokenBatch):
                for delta in action.message.deltas:
                    self._take(delta)

    def _take(self, delta: TokenDelta) -> None:
        number = int(delta.key.request_id)
        request, ending = self.requests[number], delta.ending
        assert (delta.key.attempt, delta.first) == (request.attempt, len(request.answer)), "every token comes once, in order"
        request.answer += delta.token_ids
        if ending is None:
            return
        if isinstance(ending, Failed) and ending.kind == Preempted.kind:
            self.preempted += 1
            request.attempt += 1
            self._send(number)
            return
        if isinstance(ending, Failed):
            raise OfflineFailed(ending.message)
        assert len(request.answer) == request.asked.answer_tokens, "an answer has another length than was asked for"
        self.open -= 1

    def _send(self, number: int) -> None:
        """The whole request, or what is left of it."""
        request = self.requests[number]
        so_far = len(request.answer)
        generate = Generate(
            key=Key(RequestId(f"{number}"), request.attempt, ROUTER),
            prompt=pack_ids(np.concatenate([request.asked.prompt, np.array(request.answer, dtype=np.int32)])),
            sampling=SamplingParams(
                max_new_tokens=request.asked.answer_tokens - so_far, temperature=self._temperature, ignore_eos=True, seed=number
            ),
            first=so_far,
        )
        self.heed(self._scheduler.receive(ROUTER, generate, time.monotonic()))


def _scheduler(engine: EngineDescription, chunk_tokens: int, sequences: int) -> DecodeScheduler:
    """Of an instance that nobody writes to."""
    no_pool = PoolDescriptor(
        backend="", agent="", address=0, total_pages=engine.total_pages, device=engine.device, layout=engine.layout, wire=b""
    )
    me = InstanceInfo(
        id=InstanceId("offline"),
        incarnation=Incarnation("1"),
        role="decode",
        inbox="",
        ranks=(),
        model=engine.model,
        pools=(no_pool,),
        max_running=engine.max_rows,
    )
    limits = InstanceLimits(
        chunk_tokens=chunk_tokens, max_waiting=sequences, request_timeout_s=FOREVER_S, drain_timeout_s=FOREVER_S
    )
    scheduler = DecodeScheduler(me, engine, limits)
    scheduler.handle(RouterJoined(ROUTER, 1), time.monotonic())
    return scheduler
