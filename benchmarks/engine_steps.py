"""Steps of `python -m benchmarks.engine`: start-up, decode steps and prefill of a model, alone and beside their floor on CPU.

Owns what is timed: the wall clock while two steps are in flight, as an instance has them, the device's own time, and the host's.
Weights and contexts are random numbers, because speed does not depend on what they say.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from bench.report import Spread
from benchmarks.engine import (
    Built,
    Ceilings,
    DecodeStep,
    EngineTask,
    Figure,
    Floor,
    Prefill,
    Started,
    shape_folder,
)
from common.config import DEMO_MODEL, EngineConfig, ModelConfig
from common.executor import Chunk, EngineDescription, RowStart, StepPlan
from common.ids import Int32Array
from common.model_path import resolve_model_path
from common.pages.layout import ITEM_BYTES, KVDtype
from common.sampling_params import SamplingParams
from engine.backends import device_of
from engine.kv_memory import torch_dtype
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.served_shape import read_served_shape
from engine.models.shape import ServedShape
from engine.replay import CannotRecord, load_recorder
from engine.step_runner import PendingStep

GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
WARM_STEPS, ALONE_STEPS = 4, 7
PREFILL_ROUNDS = 3
COPY_BYTES = {"cuda": 2**32, "cpu": 2**26}
"""Many times what a cache holds."""
MATMUL_SIDE = {"cuda": 8192, "cpu": 512}
CEILING_REPEATS = 20
READ_BYTES = 2**29
"""Far more than the caches of a core hold."""
_FILL_ELEMENTS = 2**27
_CYCLES_PER_S = 2e9
"""More than a card's clock makes, so that a pause is never shorter than asked for."""
Say = Callable[[str], None]


# --- the device --------------------------------------------------------------------------------------------------------------


def current(name: str) -> torch.device:
    """The device of a name as in `--device`. Kernels that name no device start there from now on."""
    device = device_of(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def seconds_of(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def timed_s(act: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """How long the device works on it, several times. act: starts work and may return before that is done."""
    act()
    if device.type == "cpu":
        return [seconds_of(act) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    began, ended = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))  # type: ignore[no-untyped-call]
    for before, after in zip(began, ended, strict=True):
        before.record()
        act()
        after.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in zip(began, ended, strict=True)]


def device_ms(runner: ModelRunner, plan: StepPlan, launch_s: float) -> float:
    """How long the CUDA device works on a step, without a gap. The device is kept busy until the host has given it everything,
    which takes about launch_s, so it never waits for the host."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(int((3 * launch_s + 1e-3) * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
    before.record()
    pending = runner.steps.launch(plan)
    after.record()
    after.synchronize()
    pending.wait()
    return float(before.elapsed_time(after))


def fill_randomly(pool: Tensor) -> None:
    """Numbers as keys and values have them: zeros would be read faster than what is served."""
    for part in torch.split(pool.view(-1), _FILL_ELEMENTS):
        if pool.dtype.itemsize > 1:
            part.normal_()
        else:
            part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=part.device).to(pool.dtype))


def measure_ceilings(task: EngineTask, say: Say) -> Iterator[Figure]:
    """Copies and products of matrices, in the run whose figures are shares of them."""
    device = current(task.engine.device)
    side, dtype = MATMUL_SIDE[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    source.view(torch.int64).random_()
    target = torch.empty_like(source)
    copies = timed_s(lambda: target.copy_(source), device, CEILING_REPEATS)
    a, b = torch.randn(2, side, side, device=device).to(dtype).unbind()
    out = torch.empty_like(a)
    products = timed_s(lambda: torch.mm(a, b, out=out), device, CEILING_REPEATS)
    yield Ceilings(
        device=str(device),
        copy_gb_per_s=Spread.of(2 * len(source) / 1e9 / seconds for seconds in copies),
        matmul=f"{side}^3 {str(dtype).removeprefix('torch.')}",
        matmul_tflop_per_s=Spread.of(2 * side**3 / 1e12 / seconds for seconds in products),
    )


# --- models and plans --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checkpoint(task: EngineTask, **changes: object) -> Iterator[tuple[ModelConfig, EngineConfig]]:
    """The task's model: the demo model, or a shape with random weights."""
    if task.model == DEMO_MODEL:
        yield ModelConfig(), task.engine
    else:
        with shape_folder(task.model, **changes) as model:
            yield model, replace(task.engine, load_format="dummy")


def layer_weights(shape: ServedShape) -> int:
    """Numbers in the matrices of one layer."""
    attention = shape.hidden * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return attention + 3 * shape.hidden * shape.intermediate


def products_flop(shape: ServedShape, tokens: int, sampled: int) -> float:
    """Operations of the products of all layers in one forward: two for each weight and token. Behind the last layer's attention,
    only sampled tokens count."""
    late = shape.hidden * shape.heads * shape.head_dim + 3 * shape.hidden * shape.intermediate
    return 2.0 * shape.layers * layer_weights(shape) * tokens - 2.0 * late * (tokens - sampled)


def step_weight_bytes(shape: ServedShape, item_bytes: int, engine: EngineConfig) -> int:
    """Bytes of weights that a decode step reads: every matrix of every layer, and the output head."""
    in_layers = item_bytes if engine.quantization == "none" else 1
    in_head = 1 if engine.quantization == "int8" else item_bytes
    return shape.layers * layer_weights(shape) * in_layers + shape.vocab_size * shape.hidden * in_head


def prefill_flop(shape: ServedShape, tokens: int) -> float:
    """Operations of a prompt: those of all products, and of attention four for each head, its size, and pair of tokens of which
    one sees the other."""
    products = products_flop(shape, tokens, 1) + 2.0 * shape.vocab_size * shape.hidden
    pairs = tokens * (tokens + 1) / 2
    return products + 4.0 * shape.heads * shape.head_dim * pairs * shape.layers


def why_not_decoded(engine: EngineDescription, batch: int, context: int, steps: int) -> str:
    """Why so many steps of so many rows cannot be measured; empty: they can."""
    layout = engine.layout
    needed = batch * layout.pages_for(context)
    if needed > engine.total_pages:
        return f"needs {needed * layout.page_bytes / 1e9:.1f} GB of KV, there are {engine.memory.region_bytes / 1e9:.1f}"
    if context <= steps + layout.page_size:
        return f"a context of more than {steps + layout.page_size} tokens is needed for {steps} steps"
    return ""


def decode_plans(engine: EngineDescription, batch: int, context: int, steps: int) -> list[StepPlan]:
    """Decode steps of rows whose last step is about at `context`, over a context that nobody computed, in scattered pages. They
    get pages one by one, as served: each row in another step."""
    layout = engine.layout
    free = iter(np.random.default_rng(7).permutation(engine.total_pages).tolist())

    def pages(count: int) -> Int32Array:
        return np.array(list(islice(free, count)), dtype=np.int32)

    lengths = context - steps - np.arange(batch) % layout.page_size
    starts = tuple(
        RowStart(row, pages(layout.pages_for(length)), GREEDY, length=length, last_token=row % engine.model.vocab_size)
        for row, length in enumerate(lengths.tolist())
    )
    rows, plans = np.arange(batch, dtype=np.int32), list[StepPlan]()
    for number in range(steps):
        full = rows[(lengths + number) % layout.page_size == 0]
        plans.append(StepPlan(number, starts if number == 0 else (), (), rows, full, pages(len(full))))
    return plans


def prefill_plans(engine: EngineDescription, tokens: int, chunk_tokens: int) -> list[StepPlan]:
    """A random prompt in chunks."""
    random = np.random.default_rng(3)
    prompt = random.integers(0, engine.model.vocab_size, tokens).astype(np.int32)
    pages = random.permutation(engine.total_pages)[: engine.layout.pages_for(tokens)].astype(np.int32)
    return [
        StepPlan(
            begin,
            starts=(RowStart(0, pages, GREEDY),) if begin == 0 else (),
            chunks=(Chunk(0, begin, prompt[begin : begin + chunk_tokens], last=begin + chunk_tokens >= tokens),),
        )
        for begin in range(0, tokens, chunk_tokens)
    ]


# --- steps -------------------------------------------------------------------------------------------------------------------


def build(task: EngineTask, say: Say) -> Iterator[Figure]:
    """Start the model with one layer and few graphs: that takes every kernel that it needs."""
    began = time.monotonic()
    with checkpoint(task, num_hidden_layers=1) as (model, engine):
        ModelRunner(model, replace(engine, kv_memory="1GiB", graph_sizes="1,8", max_running=8, context_tokens=512), say)
    yield Built(what=task.label, seconds=time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class StartedModel:
    """A model runner whose pool is full of random numbers."""

    runner: ModelRunner
    shape: ServedShape
    figure: Started


def start_model(task: EngineTask, say: Say) -> StartedModel:
    lines: list[tuple[float, str]] = []

    def note(text: str) -> None:
        lines.append((time.monotonic(), text))
        say(text)

    with checkpoint(task) as (model, engine):
        shape = read_served_shape(resolve_model_path(model.model, weights=False))
        began = time.monotonic()
        runner = ModelRunner(model, engine, note)
        ended = time.monotonic()
    described, device = runner.description, current(engine.device)
    dtype: KVDtype = described.model.dtype  # type: ignore[assignment]
    figure = Started(
        model=task.model,
        dtype=dtype,
        seconds=ended - began,
        phases=phases(lines, began, ended),
        said=[text for _, text in lines],
        weight_bytes=step_weight_bytes(shape, ITEM_BYTES[dtype], engine),
        pool_bytes=described.memory.region_bytes,
        context_tokens=described.model.context_tokens,
        free_bytes=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
    )
    with runner.on_device():
        fill_randomly(runner.memory.pool)
    return StartedModel(runner, shape, figure)


def phases(lines: Sequence[tuple[float, str]], began: float, ended: float) -> dict[str, float]:
    """How long each phase took: from its first line to the first of the next. Lines that begin with the same two words are of one
    phase, and these are its name; what is before the first line is called "before"."""
    times: dict[str, float] = {}
    name, since = "before", began
    for at, text in (*lines, (ended, "")):
        new = " ".join(re.findall("[A-Za-z]+", text)[:2])
        if new != name:
            times[name] = times.get(name, 0.0) + at - since
            name, since = new, at
    return times


def measure_steps(task: EngineTask, say: Say) -> Iterator[Figure]:
    """Start-up, then prefill, then decode steps."""
    started = start_model(task, say)
    yield started.figure
    runner, bench = started.runner, task.bench
    with runner.on_device():
        for chunk_tokens in bench.chunk_lengths:
            say(f"prefill in chunks of {chunk_tokens}")
            plans = prefill_plans(runner.description, bench.prompt_tokens, chunk_tokens)
            yield Prefill(
                model=task.model,
                tokens=bench.prompt_tokens,
                chunk_tokens=chunk_tokens,
                seconds=Spread.of([seconds_of(partial(in_flight, runner, plans)) for _ in range(1 + PREFILL_ROUNDS)][1:]),
                flop=prefill_flop(started.shape, bench.prompt_tokens),
            )
        for context in bench.context_lengths:
            for batch in bench.batch_sizes:
                say(f"decode, batch {batch}, context {context}")
                yield decode_step(task, started, batch, context)


def decode_step(task: EngineTask, started: StartedModel, batch: int, context: int) -> DecodeStep:
    runner, engine, rounds = started.runner, started.runner.description, task.bench.rounds
    steps = WARM_STEPS + rounds + (ALONE_STEPS if engine.device.startswith("cuda") else 0)
    reason = why_not_decoded(engine, batch, context, steps)
    if reason:
        return DecodeStep(model=task.model, batch=batch, context=context, skipped=reason)
    plans = decode_plans(engine, batch, context, steps)
    for plan in plans[:WARM_STEPS]:
        runner.steps.launch(plan).wait()
    step_s, launch_s = in_flight(runner, plans[WARM_STEPS : WARM_STEPS + rounds])
    alone = [device_ms(runner, plan, max(launch_s)) for plan in plans[WARM_STEPS + rounds :]]
    layout = engine.layout
    return DecodeStep(
        model=task.model,
        batch=batch,
        context=context,
        step_ms=Spread.of(1e3 * seconds for seconds in step_s),
        device_ms=Spread.of(alone) if alone else None,
        launch_ms=Spread.of(1e3 * seconds for seconds in launch_s),
        read_bytes=started.figure.weight_bytes + batch * (context - steps // 2) * layout.page_bytes // layout.page_size,
    )


def in_flight(runner: ModelRunner, plans: Sequence[StepPlan]) -> tuple[list[float], list[float]]:
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


# --- steps on CPU beside their floor -----------------------------------------------------------------------------------------


def measure_floor(task: EngineTask, say: Say) -> Iterator[Figure]:
    """A prompt is one chunk."""
    started = start_model(task, say)
    engine, bench = started.runner.description, task.bench
    for tokens in bench.chunk_lengths:
        say(f"floor of prefill, {tokens} tokens")
        plans = prefill_plans(engine, tokens, tokens) * (1 + PREFILL_ROUNDS)
        products = products_of(started, tokens, 1)
        yield beside_floor(task, started, plans, products, ("prefill", 1, tokens))
    for context in bench.context_lengths:
        for batch in bench.batch_sizes:
            say(f"floor of decode, batch {batch}, context {context}")
            steps = WARM_STEPS + bench.rounds
            skipped = why_not_decoded(engine, batch, context, steps)
            if skipped:
                yield Floor(model=task.model, step="decode", rows=batch, context=context, skipped=skipped)
                continue
            products = products_of(started, batch, batch, replays=True)
            yield beside_floor(task, started, decode_plans(engine, batch, context, steps), products, ("decode", batch, context))


def products_of(started: StartedModel, tokens: int, sampled: int, replays: bool = False) -> Callable[[], object]:
    """Computes every product of a forward once, on random numbers: SwiGLU is a part of one of them, and what follows the last
    layer's attention is for the sampled tokens alone. replays: by one call of C, where that is possible: as decode steps are."""
    model, dtype = started.runner.model, torch_dtype(started.figure.dtype)  # type: ignore[arg-type]
    assert isinstance(model, Decoder), "the shapes of this instrument are decoders"
    sizes = [(product, (sampled if wanted else tokens, inputs)) for product, inputs, wanted in model.products()]
    given = {size: torch.randn(size, dtype=dtype) for _, size in sizes}

    @torch.inference_mode()
    def run(_: object = None) -> tuple[Tensor]:
        return ([product(given[size]) for product, size in sizes][-1],)

    recorder = load_recorder() if replays else None
    with contextlib.suppress(CannotRecord):
        if recorder is not None:
            return recorder.record(run).run
    return run


def beside_floor(
    task: EngineTask,
    started: StartedModel,
    plans: Sequence[StepPlan],
    products: Callable[[], object],
    which: tuple[str, int, int],
) -> Floor:
    """The first plans only warm up. Step and floor take turns, so that other work on the host slows both. Attention reads the KV
    of each row once, as fast as torch sums a part of the pages, and in prefill computes no faster than the products do."""
    (step, rows, context), runner, shape = which, started.runner, started.shape
    layout, pool = runner.description.layout, runner.memory.pool.view(torch.uint8).view(-1)
    part = pool[: min(READ_BYTES, len(pool)) // 8 * 8].view(torch.int64)
    read_share = rows * context * layout.page_bytes / layout.page_size / part.nbytes
    compute_share = 0.0
    if step == "prefill":
        pairs = context * (context + 1) // 2
        compute_share = 4.0 * shape.heads * shape.head_dim * pairs * shape.layers / products_flop(shape, context, rows)
    warm = min(WARM_STEPS, len(plans) - PREFILL_ROUNDS)
    for plan in plans[:warm]:
        runner.run(plan)
    products()
    rounds: list[tuple[float, float, float]] = []
    for plan in plans[warm:]:
        step_s, products_s, read_s = seconds_of(partial(runner.run, plan)), seconds_of(products), seconds_of(part.sum)
        rounds.append((step_s, products_s, max(read_share * read_s, compute_share * products_s)))
    step_ms, products_ms, attention_ms = (Spread.of(1e3 * seconds for seconds in each) for each in zip(*rounds, strict=True))
    return Floor(
        model=task.model,
        step=step,
        rows=rows,
        context=context,
        step_ms=step_ms,
        products_ms=products_ms,
        attention_ms=attention_ms,
        ratio=Spread.of(step_s / (products_s + attention_s) for step_s, products_s, attention_s in rounds),
    )
