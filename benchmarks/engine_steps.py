"""What `launch bench engine` measures of steps, each task in a process: prefill, decode steps, host work, sampling.

Owns what is timed: the wall clock while two steps are in flight, as an instance has them, the device's own time, and the host's.
Weights and contexts are random numbers, because speed does not depend on what they say.
"""

import contextlib
import itertools
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace as replaced
from torch import Tensor

from bench.report import Spread
from benchmarks.engine import SHAPES, EngineTask
from benchmarks.engine_figures import (
    DecodeStep,
    Figure,
    HostWork,
    Prefill,
    SampledStep,
    Started,
    copy_share,
    group_of,
    product_share,
)
from common.config import DEMO_MODEL, EngineConfig, ModelConfig
from common.executor import Chunk, RowStart, StepPlan
from common.ids import Digest, Int32Array
from common.model_path import resolve_model_path
from common.options import require
from common.pages.layout import ITEM_BYTES, KVDtype, KVLayout
from common.sampling_params import Grammar, SamplingParams
from engine.backends import device_of, make_attention, make_kernels
from engine.gpu.flashinfer import AttentionNeeds
from engine.kv_memory import KVMemory
from engine.lora.adapter_files import Adapter, Factors
from engine.model_runner import ModelRunner
from engine.models.served_shape import read_served_shape
from engine.models.shape import ModelShape, ServedShape
from engine.ports import LayerAttention, StepAttention
from engine.replay import CudaGraphs
from engine.step_runner import PendingStep, StepRunner

GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
WARM_STEPS, ALONE_STEPS, PROFILED_STEPS = 4, 7, 2
PREFILL_ROUNDS = 3
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


# --- models and plans --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checkpoint(name: str, engine: EngineConfig, **changes: object) -> Iterator[tuple[ModelConfig, EngineConfig]]:
    """The demo model, or a shape with random weights: a folder that has a config and nothing else."""
    if name == DEMO_MODEL:
        yield ModelConfig(), engine
        return
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        path = Path(folder) / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(SHAPES[name] | changes))
        yield ModelConfig(model=str(path), served_name=name), replace(engine, load_format="dummy")


def layer_weights(shape: ServedShape) -> int:
    """Numbers in the matrices of one layer."""
    attention = shape.hidden * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return attention + 3 * shape.hidden * shape.intermediate


def step_weight_bytes(shape: ServedShape, item_bytes: int, engine: EngineConfig, rows: int = 1) -> int:
    """Bytes of weights that a decode step reads: every matrix of every layer, but only the experts that rows with random choices
    need, and the output head."""
    in_layers = item_bytes if engine.quantization == "none" else 1
    in_head = 1 if engine.quantization == "int8" else item_bytes
    numbers = shape.layers * layer_weights(shape)
    mixture = shape.experts if isinstance(shape, ModelShape) else None
    if mixture is not None:
        needed = mixture.experts * (1 - (1 - mixture.chosen / mixture.experts) ** rows)
        more = 3 * (needed * mixture.intermediate - shape.intermediate) + mixture.experts  # and the router's matrix
        numbers += round(len(mixture.layers) * shape.hidden * more)
    return numbers * in_layers + shape.vocab_size * shape.hidden * in_head


def prefill_flop(shape: ServedShape, tokens: int) -> float:
    """Operations of a prompt: two for each weight of a product and token, but only for the last token behind the last layer's
    attention, and of attention four for each head, its size, and pair of tokens of which one sees the other."""
    late = shape.hidden * shape.heads * shape.head_dim + 3 * shape.hidden * shape.intermediate
    products = 2.0 * (shape.layers * layer_weights(shape) * tokens - late * (tokens - 1) + shape.vocab_size * shape.hidden)
    pairs = tokens * (tokens + 1) / 2
    return products + 4.0 * shape.heads * shape.head_dim * pairs * shape.layers


def decode_plans(layout: KVLayout, total_pages: int, batch: int, context: int, steps: int, say: Say) -> list[StepPlan]:
    """Decode steps of rows whose last step is about at `context`, over a context that nobody computed, in scattered pages. They
    get pages one by one, as served: each row in another step. Says why there are none where they cannot be measured."""
    needed = batch * layout.pages_for(context)
    if needed > total_pages:
        have_gb = total_pages * layout.page_bytes / 1e9
        say(f"not measured: it needs {needed * layout.page_bytes / 1e9:.1f} GB of KV, there are {have_gb:.1f}")
        return []
    if context <= steps + layout.page_size:
        say(f"not measured: a context of more than {steps + layout.page_size} tokens is needed for {steps} steps")
        return []
    free = iter(np.random.default_rng(7).permutation(total_pages).tolist())

    def pages(count: int) -> Int32Array:
        return np.array(list(islice(free, count)), dtype=np.int32)

    lengths = context - steps - np.arange(batch) % layout.page_size
    starts = tuple(
        RowStart(row, pages(layout.pages_for(length)), GREEDY, length=length, last_token=1)
        for row, length in enumerate(lengths.tolist())
    )
    rows, plans = np.arange(batch, dtype=np.int32), list[StepPlan]()
    for number in range(steps):
        full = rows[(lengths + number) % layout.page_size == 0]
        plans.append(StepPlan(number, starts if number == 0 else (), (), rows, full, pages(len(full))))
    return plans


def prefill_plans(layout: KVLayout, total_pages: int, vocab_size: int, tokens: int, chunk_tokens: int) -> list[StepPlan]:
    """A random prompt in chunks."""
    random = np.random.default_rng(3)
    prompt = random.integers(0, vocab_size, tokens).astype(np.int32)
    pages = random.permutation(total_pages)[: layout.pages_for(tokens)].astype(np.int32)
    return [
        StepPlan(
            begin,
            starts=(RowStart(0, pages, GREEDY),) if begin == 0 else (),
            chunks=(Chunk(0, begin, prompt[begin : begin + chunk_tokens], last=begin + chunk_tokens >= tokens),),
        )
        for begin in range(0, tokens, chunk_tokens)
    ]


# --- steps -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartedModel:
    """A model runner whose pool is full of random numbers."""

    runner: ModelRunner
    shape: ServedShape
    figure: Started


def start_model(task: EngineTask, say: Say) -> StartedModel:
    told: list[tuple[str, float]] = []

    def progress(line: str) -> None:
        told.append((re.split(r"[:;(\d]", line)[0].strip(), time.monotonic()))
        say(line)

    with checkpoint(task.model, task.engine) as (model, engine):
        shape = read_served_shape(resolve_model_path(model.model, weights=False))
        began = time.monotonic()
        runner = ModelRunner(model, engine, progress)
        ended = time.monotonic()
    stages = Counter[str]()
    for (stage, at), (_, next_at) in itertools.pairwise([("reading", began), *told, ("", ended)]):
        stages[stage] += next_at - at  # type: ignore[assignment]
    described = runner.description
    dtype: KVDtype = described.model.dtype  # type: ignore[assignment]
    current(engine.device)
    figure = Started(
        model=task.model,
        dtype=dtype,
        seconds=ended - began,
        stages=", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.most_common(4)),
        weight_bytes=step_weight_bytes(shape, ITEM_BYTES[dtype], engine),
        pool_bytes=described.memory.region_bytes,
        context_tokens=described.model.context_tokens,
    )
    with runner.on_device():
        fill_randomly(runner.memory.pool)
    return StartedModel(runner, shape, figure)


def measure_steps(task: EngineTask, say: Say) -> Iterator[Figure]:
    """Start-up, then prefill, then decode steps; without graphs decode steps alone."""
    started = start_model(task, say)
    yield started.figure
    runner, bench, described = started.runner, task.bench, started.runner.description
    sizes = described.layout, described.total_pages, described.model.vocab_size
    with runner.on_device():
        for chunk_tokens in bench.chunk_lengths if task.section == "steps" else ():
            say(f"prefill in chunks of {chunk_tokens}")
            plans = prefill_plans(*sizes, bench.prompt_tokens, chunk_tokens)
            taken = Spread.of([seconds_of(partial(in_flight, runner, plans)) for _ in range(1 + PREFILL_ROUNDS)][1:])
            flop = prefill_flop(started.shape, bench.prompt_tokens)
            yield Prefill(
                model=task.model,
                tokens=bench.prompt_tokens,
                chunk_tokens=chunk_tokens,
                seconds=taken,
                tokens_per_s=bench.prompt_tokens / taken.median,
                flop=flop,
                share=product_share(task.ceilings, flop, taken.median),
            )
        for context in bench.context_lengths:
            for batch in bench.batch_sizes:
                say(f"decode, batch {batch}, context {context}")
                yield from decode_step(task, started, batch, context, say)


def decode_step(task: EngineTask, started: StartedModel, batch: int, context: int, say: Say) -> Iterator[DecodeStep]:
    runner, engine, rounds = started.runner, started.runner.description, task.bench.rounds
    steps = WARM_STEPS + rounds + PROFILED_STEPS + (ALONE_STEPS if engine.device.startswith("cuda") else 0)
    layout = engine.layout
    plans = decode_plans(layout, engine.total_pages, batch, context, steps, say)
    if not plans:
        return
    for plan in plans[:WARM_STEPS]:
        runner.steps.launch(plan).wait()
    step_s, launch_s = in_flight(runner, plans[WARM_STEPS : WARM_STEPS + rounds])
    alone, profiled = plans[WARM_STEPS + rounds : -PROFILED_STEPS], plans[-PROFILED_STEPS:]
    is_profiled = task.section == "steps" and context == task.bench.context_lengths[len(task.bench.context_lengths) // 2]
    device = Spread.of(device_ms(runner, plan, max(launch_s)) for plan in alone) if alone else None
    groups_ms = kernels_ms(runner, profiled, engine.device) if is_profiled else {}
    if device is not None and groups_ms:
        groups_ms["gaps"] = max(0.0, device.median - sum(groups_ms.values()))
    step_ms = Spread.of(1e3 * seconds for seconds in step_s)
    item_bytes = ITEM_BYTES[started.figure.dtype]  # type: ignore[index]
    weight_bytes = step_weight_bytes(started.shape, item_bytes, task.engine, batch)
    read_bytes = weight_bytes + batch * (context - steps // 2) * layout.page_bytes // layout.page_size
    yield DecodeStep(
        model=task.model,
        batch=batch,
        context=context,
        graphs="off" if task.section == "eager" else "on",
        step_ms=step_ms,
        device_ms=device,
        launch_ms=Spread.of(1e3 * seconds for seconds in launch_s),
        idle=None if device is None else max(0.0, 1 - device.median / step_ms.median),
        read_bytes=read_bytes,
        share=copy_share(task.ceilings, read_bytes, step_ms.median / 1e3),
        groups_ms=groups_ms,
    )


def kernels_ms(runner: ModelRunner, plans: Sequence[StepPlan], device: str) -> dict[str, float]:
    """The time of a step's kernels, by what they are for, as torch's profiler tells it."""
    on_card = device.startswith("cuda")
    how: Any = torch.autograd.profiler.profile  # torch.profiler would import torch's compiler, which takes seconds
    with how(use_cpu=not on_card, use_device="cuda" if on_card else None, use_kineto=True) as profile:
        for plan in plans:
            runner.steps.launch(plan).wait()
    groups = Counter[str]()
    for event in profile.key_averages():
        taken_us = event.self_device_time_total if on_card else event.self_cpu_time_total
        groups[group_of(event.key)] += taken_us / 1e3 / len(plans)
    return dict(groups)


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


# --- the host's work ---------------------------------------------------------------------------------------------------------

HOST_ROWS, HOST_CONTEXT, HOST_VOCAB = 256, 1024, 8
HOST_WARM_STEPS = 20


class EmptyModel:
    """Implements `Model`: its results are there before it is called."""

    capturable = True
    spared_bytes = 0
    logits_dtype = torch.float32

    def __init__(self, rows: int, head_dim: int, device: torch.device) -> None:
        self.attention: Sequence[LayerAttention] = [LayerAttention(head_dim**-0.5)]
        self._hidden = torch.zeros(rows, 1, device=device)
        self._logits = torch.zeros(rows, HOST_VOCAB, device=device)

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, wanted: Tensor | None = None) -> Tensor:
        return self._hidden[: len(token_ids if wanted is None else wanted)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]


def measure_host(task: EngineTask, say: Say) -> Iterator[Figure]:
    """What `StepRunner.launch` costs when the model computes nothing. The device is idle at each launch, so nothing of it is
    waited for. One row in as many as a page has tokens gets a page in each step; no row starts."""
    device = current(task.engine.device)
    on_cuda = device.type == "cuda"
    head_dim, kv_heads, dtype = (128, 8, "bfloat16") if on_cuda else (8, 1, "float32")
    layout = KVLayout(layers=1, kv_heads=kv_heads, head_dim=head_dim, page_size=16, dtype=dtype)  # type: ignore[arg-type]
    lines: list[str] = []
    with torch.cuda.stream(torch.cuda.Stream(device) if on_cuda else None):  # type: ignore[no-untyped-call]
        pages_per_row = layout.pages_for(HOST_CONTEXT)
        memory = KVMemory(layout, HOST_ROWS * pages_per_row, device)
        kernels, model = make_kernels(device), EmptyModel(HOST_ROWS, head_dim, device)
        needs = AttentionNeeds(memory, 4 * kv_heads, model.attention, memory.pool.dtype, HOST_ROWS, pages_per_row)
        steps = StepRunner(
            model,
            kernels,
            memory,
            make_attention(needs, task.engine.attention, kernels, lines.append).attention,
            max_rows=HOST_ROWS,
            pages_per_row=pages_per_row,
            layer_groups=0,
            vocab_size=HOST_VOCAB,
        )
        has_graphs = on_cuda and task.engine.graphs != "off" and steps.capture(CudaGraphs(), [HOST_ROWS], lines.append) is None
        taken: list[float] = []
        rounds = min(10 * task.bench.rounds, 500)
        for plan in decode_plans(layout, memory.total_pages, HOST_ROWS, HOST_CONTEXT, HOST_WARM_STEPS + rounds, say):
            began = time.perf_counter()
            pending = steps.launch(plan)
            taken.append(time.perf_counter() - began)
            pending.wait()
    yield HostWork(
        device=str(device),
        rows=HOST_ROWS,
        graphs=has_graphs,
        attention=next((text for text in lines if text.startswith("attention")), "torch"),
        launch_ms=Spread.of(1e3 * seconds for seconds in taken[HOST_WARM_STEPS:]),
    )


# --- sampling ----------------------------------------------------------------------------------------------------------------

PROMPT_TOKENS, STEPS_AT_ONCE, SAMPLING_ROWS = 128, 8, 64
ADAPTERS, ADAPTERS_KV_MEMORY = (1, 8, 64), "2GiB"
"""How many different ones the rows of a step have, and room for those rows of Qwen3-0.6B, however much memory adapters take."""
NOTHING = SamplingParams(max_new_tokens=99, temperature=0.0)
KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.8},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias of 300 tokens": {"logit_bias": tuple((token, 1.0) for token in range(300))},
    "min_tokens": {"min_tokens": 99},
    "8 bad words": {"bad_words": tuple(tuple(range(20 * word, 20 * word + 1 + word % 4)) for word in range(8))},
    "logprobs 5": {"logprobs": 5},
}
WITH_VOCABULARY: dict[str, dict[str, Any]] = {
    "a JSON schema": {"grammar": Grammar("json_schema", '{"type":"array","items":{"type":"string"}}')},
    "a regular expression": {"grammar": Grammar("regex", r"(\d{3}-){99}")},
}
"""Only of a model that has a tokenizer."""


def measure_sampling(task: EngineTask, say: Say) -> Iterator[Figure]:
    """Decode steps whose rows all ask for the same, beside steps whose rows ask for nothing; or steps whose rows have so many
    different adapters, beside steps of the model alone. Each round times a few steps of every kind, so that all kinds meet the
    same disturbances. The first kind is the plain one."""
    rows = task.engine.max_running or SAMPLING_ROWS
    engine = replace(task.engine, max_running=rows, context_tokens=256, kv_memory="256MiB")
    kinds: dict[str, Callable[[], list[StepPlan]]]
    if task.section == "adapters":
        counts = sorted({min(count, rows) for count in ADAPTERS})
        most = counts[-1]
        engine = replace(engine, kv_memory=ADAPTERS_KV_MEMORY, max_loaded_loras=most, max_loras_per_batch=most)
        with checkpoint(task.model, engine) as (model, chosen):
            runner = ModelRunner(model, chosen, say)
        held = [runner.adapters.hold(adapter) for adapter in random_adapters(runner, most, engine.max_lora_rank)]
        kinds = {f"adapters: {count}": partial(sampling_plans, runner, NOTHING, held[:count]) for count in (0, *counts)}
    else:
        with checkpoint(task.model, engine, vocab_size=task.vocab_size) as (model, chosen):
            runner = ModelRunner(model, chosen, say)
        asked = KINDS | WITH_VOCABULARY if task.model == DEMO_MODEL else KINDS
        kinds = {kind: partial(sampling_plans, runner, replaced(NOTHING, **fields)) for kind, fields in asked.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with runner.on_device():
        for number in range(task.bench.rounds + 1):
            say(f"round {number}")
            for kind, plans in kinds.items():
                first, *others = plans()
                runner.steps.launch(first).wait()
                taken, _ = in_flight(runner, others)
                if number:  # the first round compiles and warms up
                    seconds[kind].append(sum(taken) / len(taken))  # a card ends several steps at once, as the host looks
    plain = float(np.median(next(iter(seconds.values()))))
    for kind, taken in seconds.items():
        yield SampledStep(
            model=task.model,
            vocab_size=runner.description.model.vocab_size,
            rows=rows,
            asked=kind,
            step_ms=Spread.of(1e3 * each for each in taken),
            ratio=float(np.median(taken)) / plain,
        )


def random_adapters(runner: ModelRunner, count: int, rank: int) -> Iterator[Adapter]:
    """Those of all linear layers. They have the same numbers and memory of their own in slots, where steps read them."""
    factors = {
        name: Factors(
            torch.randn(rank, len(target.columns)).to(target.dtype), torch.randn(rank, len(target.rows)).to(target.dtype)
        )
        for name, target in runner.adapters.targets.items()
    }
    for number in range(count):
        yield Adapter(Digest(f"{number:032x}"), rank, factors)


def sampling_plans(runner: ModelRunner, sampling: SamplingParams, adapters: Sequence[Digest] = ()) -> list[StepPlan]:
    """A step in which all rows start, and those that are timed. Nobody has computed the rows' context. adapters: of the first
    rows, and again of those that follow."""
    adapters = adapters or (Digest(""),)
    if sampling.grammar is not None and runner.grammars is not None:
        runner.grammars.prepare(sampling.grammar, lambda: None).wait()
    described = runner.description
    pages = described.layout.pages_for(PROMPT_TOKENS + STEPS_AT_ONCE + 1)
    require(described.max_rows * pages <= described.total_pages, "kv_memory", "enough for all rows", described.total_pages)
    random = np.random.default_rng(5)
    starts = tuple(
        RowStart(
            row=row,
            pages=np.arange(row * pages, (row + 1) * pages, dtype=np.int32),
            sampling=sampling,
            length=PROMPT_TOKENS - 1,
            last_token=1,
            token_ids=random.integers(0, described.model.vocab_size, PROMPT_TOKENS).astype(np.int32),
            adapter=adapters[row % len(adapters)],
        )
        for row in range(described.max_rows)
    )
    rows = np.arange(described.max_rows, dtype=np.int32)
    return [StepPlan(number, starts if number == 0 else (), decode_rows=rows) for number in range(STEPS_AT_ONCE + 1)]
