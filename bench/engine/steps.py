"""Start-up, decode steps and prefill of a model, as a model runner computes them.

Owns what is timed: the wall clock while two steps are in flight, as an instance has them, the device's own time, and the host's.
Rows begin with a context that nobody computed, over a pool of random numbers, because speed does not depend on what they say.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from bench.engine.batch import GREEDY, Batch
from bench.engine.device import current, device_ms, fill_randomly, free_bytes
from bench.engine.figures import Built, DecodeStep, Figure, Prefill, Started
from bench.engine.models import prefill_flop, shape_folder, step_weight_bytes
from bench.engine.plan import Build, MeasureSteps
from bench.report import Spread
from common.config import DEMO_MODEL, ModelConfig
from common.executor import Chunk, EngineDescription, Plan, RowStart
from common.model_path import resolve_model_path
from common.pages.layout import ITEM_BYTES, KVDtype
from engine.kv_memory import torch_dtype
from engine.model_runner import ModelRunner
from engine.models.shape import ServedShape, read_served_shape
from engine.step_runner import PendingStep

WARM_STEPS, ALONE_STEPS = 4, 7
PREFILL_REPEATS = 3
Say = Callable[[str], None]


def build(task: Build, say: Say) -> Iterator[Built]:
    """Start the model with one layer and few graphs: that takes every kernel that it needs."""
    began = time.monotonic()
    engine = replace(task.engine, kv_memory="1GiB", graph_sizes="1,8", max_running=8, context_tokens=512)
    if task.model == DEMO_MODEL:
        ModelRunner(ModelConfig(), engine, say)
    else:
        with shape_folder(task.model, num_hidden_layers=1) as model:
            ModelRunner(model, replace(engine, load_format="dummy"), say)
    yield Built(what=task.label, seconds=time.monotonic() - began)


def measure(task: MeasureSteps, say: Say) -> Iterator[Figure]:
    with shape_folder(task.model) as model:
        shape = read_served_shape(resolve_model_path(model.model, weights=False))
        runner, started = start(task, model, shape, say)
        yield started
        layout, region = runner.description.layout, runner.description.memory
        with runner.on_device():
            fill_randomly(region, torch_dtype(layout.dtype))
            for tokens in task.chunks:
                say(f"prefill in chunks of {tokens}")
                yield _prefill(runner, task, shape, tokens)
            for context in sorted(task.contexts):
                for batch in sorted(task.batches):
                    say(f"decode, batch {batch}, context {context}")
                    yield _decode(runner, task, batch, context, started.weight_bytes)


def start(task: MeasureSteps, model: ModelConfig, shape: ServedShape, say: Say) -> tuple[ModelRunner, Started]:
    said: list[tuple[float, str]] = []

    def hear(text: str) -> None:
        said.append((time.monotonic(), text))
        say(text)

    began = time.monotonic()
    runner = ModelRunner(model, replace(task.engine, load_format="dummy"), hear)
    ended = time.monotonic()
    described = runner.description
    dtype: KVDtype = described.model.dtype  # type: ignore[assignment]
    started = Started(
        model=task.model,
        dtype=described.model.dtype,
        seconds=ended - began,
        phases=phases(said, began, ended),
        said=[text for _, text in said],
        weight_bytes=step_weight_bytes(shape, ITEM_BYTES[dtype], task.engine),
        pool_bytes=described.memory.region_bytes,
        context_tokens=described.model.context_tokens,
        free_bytes=free_bytes(current(task.engine.device)),
    )
    return runner, started


def phases(said: Sequence[tuple[float, str]], began: float, ended: float) -> dict[str, float]:
    """How long each phase took: from its first line to the first of the next. Lines that begin with the same two words are of one
    phase, and these are its name; what is before the first line is called "before"."""
    times: dict[str, float] = {}
    name, since = "before", began
    for at, text in said:
        new = " ".join(re.findall("[A-Za-z]+", text)[:2])
        if new != name:
            times[name] = times.get(name, 0.0) + at - since
            name, since = new, at
    times[name] = times.get(name, 0.0) + ended - since
    return times


# --- decode ------------------------------------------------------------------------------------------------------------------


def _decode(runner: ModelRunner, task: MeasureSteps, batch: int, context: int, weight_bytes: int) -> DecodeStep:
    """The rows' last step is about at `context`. They get pages one by one, as served: each row in another step."""
    engine = runner.description
    layout = engine.layout
    on_cuda = engine.device.startswith("cuda")
    steps = WARM_STEPS + task.rounds + (ALONE_STEPS if on_cuda else 0)
    reason = why_not_decoded(engine, batch, context, steps)
    if reason:
        return DecodeStep(model=task.model, batch=batch, context=context, skipped=reason)
    plans = decode_plans(runner, batch, context, steps)
    for plan in plans[:WARM_STEPS]:
        runner.steps.launch(plan).wait()
    step_s, launch_s = in_flight(runner, plans[WARM_STEPS : WARM_STEPS + task.rounds])
    alone = [_alone_ms(runner, plan, max(launch_s)) for plan in plans[WARM_STEPS + task.rounds :]]
    kv_bytes = batch * (context - steps // 2) * layout.page_bytes // layout.page_size
    return DecodeStep(
        model=task.model,
        batch=batch,
        context=context,
        step_ms=Spread.of(1e3 * seconds for seconds in step_s),
        device_ms=Spread.of(alone) if alone else None,
        launch_ms=Spread.of(1e3 * seconds for seconds in launch_s),
        read_bytes=weight_bytes + kv_bytes,
    )


def why_not_decoded(engine: EngineDescription, batch: int, context: int, steps: int) -> str:
    """Why so many steps of so many rows cannot be measured; empty: they can."""
    layout = engine.layout
    needed = batch * layout.pages_for(context)
    if needed > engine.total_pages:
        return f"needs {needed * layout.page_bytes / 1e9:.1f} GB of KV, there are {engine.memory.region_bytes / 1e9:.1f}"
    if context <= steps + layout.page_size:
        return f"a context of more than {steps + layout.page_size} tokens is needed for {steps} steps"
    return ""


def decode_plans(runner: ModelRunner, batch: int, context: int, steps: int) -> list[Plan]:
    rows = Batch(runner.description)
    starts: list[RowStart] = []
    for row in range(batch):
        length = context - steps - row % runner.description.layout.page_size
        starts.append(rows.start(row, length, length, last_token=row))
        rows.left[row] = steps + 1
    return [rows.plan(starts if number == 0 else ()) for number in range(steps)]


def in_flight(runner: ModelRunner, plans: Sequence[Plan]) -> tuple[list[float], list[float]]:
    """Seconds from one step's end to the next's, while another is always in flight, and of each launch."""
    ends, launches = list[float](), list[float]()
    before: PendingStep | None = None
    for plan in plans:
        began = time.perf_counter()
        pending = runner.steps.launch(plan)
        launches.append(time.perf_counter() - began)
        if before is not None:
            before.wait()
            ends.append(time.perf_counter())
        before = pending
    assert before is not None
    before.wait()
    ends.append(time.perf_counter())
    on_host = before.is_complete  # a step is over when it was launched: its time is that of its launch
    return (launches if on_host else np.diff(ends).tolist()), launches


def _alone_ms(runner: ModelRunner, plan: Plan, launch_s: float) -> float:
    pending: list[PendingStep] = []
    spent = device_ms(lambda: pending.append(runner.steps.launch(plan)), launch_s)
    pending[0].wait()
    return spent


# --- prefill -----------------------------------------------------------------------------------------------------------------


def _prefill(runner: ModelRunner, task: MeasureSteps, shape: ServedShape, chunk_tokens: int) -> Prefill:
    """All chunks are launched as they would be while nobody else is served: the next before the last one has returned."""
    layout, tokens = runner.description.layout, task.prompt_tokens
    prompt = np.random.default_rng(3).integers(0, shape.vocab_size, tokens).astype(np.int32)
    pages = np.random.default_rng(4).permutation(runner.description.total_pages)[: layout.pages_for(tokens)].astype(np.int32)
    plans = [
        Plan(
            begin,
            starts=(RowStart(0, pages, GREEDY),) if begin == 0 else (),
            chunks=(Chunk(0, begin, prompt[begin : begin + chunk_tokens], last=begin + chunk_tokens >= tokens),),
        )
        for begin in range(0, tokens, chunk_tokens)
    ]
    return Prefill(
        model=task.model,
        tokens=tokens,
        chunk_tokens=chunk_tokens,
        seconds=Spread.of([_run(runner, plans) for _ in range(PREFILL_REPEATS + 1)][1:]),
        flop=prefill_flop(shape, tokens),
    )


def _run(runner: ModelRunner, plans: Sequence[Plan]) -> float:
    """Seconds for all of them, two in flight."""
    began = time.perf_counter()
    in_flight: list[PendingStep] = []
    for plan in plans:
        in_flight.append(runner.steps.launch(plan))
        if len(in_flight) == 2:
            in_flight.pop(0).wait()
    for pending in in_flight:
        pending.wait()
    return time.perf_counter() - began
