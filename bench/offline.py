"""`launch bench offline`: the throughput of one engine, with its scheduler and without HTTP, in this process.

Owns the sequences, the clock, the figures, the loop of an instance's worker without mail and transfers, and what a router does
for a request that gives up its memory: it goes on as the next attempt, with the answer so far behind its prompt.

The sequences are those that nano-vllm publishes figures of (https://github.com/GeeeekExplorer/nano-vllm, `bench.py`). With seed 0
and the lengths of the defaults the answers have 133,966 tokens together, which is what its README reports. mini-sglang
(`benchmark/offline/bench.py`) draws alike with larger token ids, which gives other lengths: --largest-id 151642."""

import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from bench.options import OfflineOptions
from bench.report import BenchOutcome, Column, ReportStyle, Spread, say, table_of, this_hardware, write_figures
from common.config import EngineConfig, ModelConfig
from common.errors import ConfigError, Preempted, TandemError
from common.executor import EngineDescription, Executor, StepHandle
from common.ids import ROUTER, AttemptId, Incarnation, InstanceId, Int32Array, RequestId, pack_ids
from common.instance.ports import Action, RouterJoined, Send
from common.instance.request import InstanceLimits
from common.instance.worker import STEPS_IN_FLIGHT
from common.messages import Failed, Generate, InstanceInfo, PoolDescriptor, TokenBatch, TokenDelta
from common.sampling_params import SamplingParams
from decode.scheduler import DecodeScheduler
from engine.backends import with_device_defaults
from engine.torch_executor import TorchExecutor

STEP_S = 60.0
"""A step that takes longer has failed."""
FOREVER_S = 1e9
STEADY = "The number of steps is not affected."


class OfflineFailed(TandemError):
    """A sequence did not get its answer."""


@dataclass(frozen=True, slots=True, eq=False)
class OfflineSequence:
    """A prompt, and the length of its answer."""

    prompt: Int32Array
    """The token ids, [tokens] int32."""
    answer_tokens: int
    """How long the answer is; nothing ends it before."""


WARM_UP = OfflineSequence(np.arange(8, dtype=np.int32), 4)


class OfflineRun(msgspec.Struct, frozen=True, kw_only=True):
    """All sequences, once."""

    seconds: float
    steps: int
    decode_rows: int
    """The rows of all steps together."""
    preempted: int
    """How often a sequence gave up its memory, and had its prompt and its answer so far computed again."""


class OfflineOutcome(BenchOutcome, frozen=True, kw_only=True):
    """All that is known at the end of `launch bench offline`."""

    model: str
    device: str
    dtype: str
    threads: int
    chunk_tokens: int
    rows: int
    kv_pages: int
    sequences: Annotated[int, Column("sequences", ",")]
    prompt_tokens: Annotated[int, Column("prompt tokens", ",")]
    answer_tokens: Annotated[int, Column("answer tokens", ",")]
    seconds: Annotated[Spread, Column("seconds", ".1f")]
    output_tokens_per_s: Annotated[Spread, Column("output tokens/s", ",.0f")]
    total_tokens_per_s: Annotated[Spread, Column("total tokens/s", ",.0f")]
    steps: Annotated[int, Column("steps", ",")]
    """Those of the last run, as are the two figures that follow."""
    step_rows: Annotated[float, Column("rows in a step", ".1f")]
    preempted: Annotated[int, Column("computed again")]
    runs: list[OfflineRun]


def run(bench: OfflineOptions, model: ModelConfig, engine: EngineConfig, command: str, markdown: bool) -> int:
    """Measure, print the report and write the file. Returns the exit status. Raises ConfigError, OfflineFailed."""
    hardware, ready = this_hardware(), threading.Event()
    engine = with_device_defaults(engine)
    runs: list[OfflineRun] = []
    with closing(TorchExecutor(model, engine, ready.set, say)) as executor:
        description = executor.description
        sequences = sequences_of(bench, description.model.vocab_size)
        longest = max(len(each.prompt) + each.answer_tokens for each in sequences)
        if longest > description.model.context_tokens:
            raise ConfigError(
                f"the longest sequence has {longest} tokens, and the context {description.model.context_tokens}: give more "
                f"--context-tokens or --kv-memory, or shorter --prompt-tokens and --answer-tokens"
            )
        serve(executor, engine.chunk_tokens, ready, [WARM_UP], bench.temperature)
        for number in range(bench.repeat):
            say(f"{len(sequences)} sequences, {number + 1} of {bench.repeat}")
            runs.append(serve(executor, engine.chunk_tokens, ready, sequences, bench.temperature)[1])
    prompts, answers = sum(len(each.prompt) for each in sequences), sum(each.answer_tokens for each in sequences)
    last = runs[-1]
    outcome = OfflineOutcome(
        command=command,
        hardware=hardware,
        goals=[],
        model=description.model.name,
        device=description.device,
        dtype=description.model.dtype,
        threads=engine.threads,
        chunk_tokens=engine.chunk_tokens,
        rows=description.max_rows,
        kv_pages=description.total_pages,
        sequences=len(sequences),
        prompt_tokens=prompts,
        answer_tokens=answers,
        seconds=Spread.of(each.seconds for each in runs),
        output_tokens_per_s=Spread.of(answers / each.seconds for each in runs),
        total_tokens_per_s=Spread.of((prompts + answers) / each.seconds for each in runs),
        steps=last.steps,
        step_rows=last.decode_rows / last.steps,
        preempted=last.preempted,
        runs=runs,
    )
    print(report(outcome, ReportStyle(markdown)))
    write_figures(outcome, bench.json)
    return 0


def report(outcome: OfflineOutcome, style: ReportStyle) -> str:
    settings = (
        f"{outcome.model} in {outcome.dtype} on {outcome.device}, "
        f"--threads {outcome.threads}, chunks of {outcome.chunk_tokens} tokens, at most {outcome.rows} rows in a step"
    )
    return style.report(outcome, settings, STEADY, [style.table(table_of(OfflineOutcome, [outcome]))])


def sequences_of(bench: OfflineOptions, vocab_size: int) -> list[OfflineSequence]:
    """Lengths do not depend on vocab_size: a smaller vocabulary folds the same ids."""
    draw = random.Random(bench.seed)
    prompts = [
        [draw.randint(0, bench.largest_id) for _ in range(draw.randint(*bench.prompt_range))] for _ in range(bench.num_prompts)
    ]
    lengths = [draw.randint(*bench.answer_range) for _ in range(bench.num_prompts)]
    return [
        OfflineSequence(np.array(ids, dtype=np.int32) % vocab_size, length) for ids, length in zip(prompts, lengths, strict=True)
    ]


# ---- the engine ----


def serve(
    executor: Executor, chunk_tokens: int, ready: threading.Event, sequences: Sequence[OfflineSequence], temperature: float
) -> tuple[list[list[int]], OfflineRun]:
    """Answer all sequences, which are there from the start. ready: the executor's `wake` sets it.

    Returns the token ids of each answer, and the figures of the run. Raises OfflineFailed.
    """
    scheduler = _scheduler(executor.description, chunk_tokens, len(sequences))
    requests = _OfflineRequests(scheduler, sequences, temperature)
    handles: deque[StepHandle] = deque()
    steps = decode_rows = 0
    began_s = time.perf_counter()
    requests.begin()
    while requests.open:
        actions = scheduler.tick(time.monotonic())
        while len(handles) < STEPS_IN_FLIGHT:
            decision = scheduler.decide(time.monotonic())
            actions += decision.actions
            if decision.plan is None:
                break
            handles.append(executor.launch(decision.plan))
            steps += 1
            decode_rows += len(decision.plan.decode_rows)
        while handles and (result := handles[0].poll()) is not None:
            handles.popleft()
            actions += scheduler.step_done(result, time.monotonic())
        requests.receive(actions)
        if not actions and not handles:
            raise OfflineFailed(f"{requests.open} sequences wait, and none can begin: --kv-memory is too small")
        if not actions and not ready.wait(STEP_S):
            raise OfflineFailed(f"a step took more than {STEP_S:g} s")
        ready.clear()
    seconds = time.perf_counter() - began_s
    figures = OfflineRun(seconds=seconds, steps=steps, decode_rows=decode_rows, preempted=requests.preempted)
    return [request.answer for request in requests.all], figures


@dataclass(slots=True)
class _OfflineRequest:
    sequence: OfflineSequence
    attempt: int = 0
    answer: list[int] = field(default_factory=list)


class _OfflineRequests:
    """The requests, and their attempts. open: how many have no whole answer yet."""

    def __init__(self, scheduler: DecodeScheduler, sequences: Sequence[OfflineSequence], temperature: float) -> None:
        self.all = [_OfflineRequest(sequence) for sequence in sequences]
        self.open = len(self.all)
        self.preempted = 0
        self._scheduler, self._temperature = scheduler, temperature

    def begin(self) -> None:
        for number in range(len(self.all)):
            self._send(number)

    def receive(self, actions: Iterable[Action]) -> None:
        """Take the tokens that the scheduler sends."""
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, TokenBatch):
                for delta in action.message.deltas:
                    self._take(delta)

    def _take(self, delta: TokenDelta) -> None:
        number = int(delta.key.request_id)
        request, ending = self.all[number], delta.ending
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
        assert len(request.answer) == request.sequence.answer_tokens, "an answer has another length than was asked for"
        self.open -= 1

    def _send(self, number: int) -> None:
        """The whole request, or what is left of it."""
        request = self.all[number]
        so_far = len(request.answer)
        left = request.sequence.answer_tokens - so_far
        generate = Generate(
            key=AttemptId(RequestId(f"{number}"), request.attempt, ROUTER),
            prompt=pack_ids(np.concatenate([request.sequence.prompt, np.array(request.answer, dtype=np.int32)])),
            sampling=SamplingParams(max_new_tokens=left, temperature=self._temperature, ignore_eos=True, seed=number),
            first=so_far,
        )
        self.receive(self._scheduler.receive(ROUTER, generate, time.monotonic()))


def _scheduler(engine: EngineDescription, chunk_tokens: int, sequences: int) -> DecodeScheduler:
    """The scheduler of a colocated instance that nobody writes to."""
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
