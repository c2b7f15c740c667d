"""What `launch bench engine` measures, each task in a process: the machine and its ceilings, correctness, prefill and decode
steps, and sequences without HTTP.

Owns the list of all that tasks do, and what is timed: the wall clock while two steps are in flight, as an instance has them, the
device's own time, and the host's. Weights and contexts are random numbers, because speed does not depend on what they say.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.offline import WARM_UP, sequences_of, serve
from bench.options import QUICK_OFFLINE, OfflineOptions
from bench.report import Spread
from benchmarks import pushes
from benchmarks.engine import SHAPES, EngineTask, Section
from benchmarks.engine_figures import (
    WORKLOADS,
    Ceilings,
    Check,
    DecodeStep,
    Fact,
    Figure,
    Offline,
    Prefill,
    Started,
    copy_share,
    group_of,
    product_share,
)
from common.config import DEMO_MODEL, EngineConfig, ModelConfig
from common.executor import Chunk, RowStart, StepPlan
from common.host import mps_is_there
from common.ids import Int32Array
from common.model_path import resolve_model_path
from common.options import with_defaults
from common.pages.layout import ITEM_BYTES, KVDtype, KVLayout
from common.sampling_params import SamplingParams
from engine.backends import device_of, with_device_defaults
from engine.model_runner import ModelRunner
from engine.models.served_shape import read_served_shape
from engine.models.shape import ModelShape, ServedShape
from engine.step_runner import PendingStep
from engine.torch_executor import TorchExecutor

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
def checkpoint(name: str, engine: EngineConfig) -> Iterator[tuple[ModelConfig, EngineConfig]]:
    """The demo model, or a shape with random weights: a folder that has a config and nothing else."""
    if name == DEMO_MODEL:
        yield ModelConfig(), engine
        return
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        path = Path(folder) / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(SHAPES[name]))
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


# --- the machine, correctness, sequences without HTTP ------------------------------------------------------------------------

COPY_BYTES = {"cuda": 2**32, "cpu": 2**26}
"""Many times what a cache holds."""
MATMUL_SIDE = {"cuda": 8192, "cpu": 512}
CEILING_REPEATS = 20
FACTS = {
    "card": "nvidia-smi --query-gpu=name,driver_version,compute_mode,mig.mode.current,memory.total --format=csv,noheader",
    "clocks": "nvidia-smi --query-gpu=clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu --format=csv,noheader",
    "NVLink": "nvidia-smi nvlink --status",
    "cards": "nvidia-smi topo --matrix",
    "CUDA": "nvcc --version",
}
CHECKS = {
    "the kernels' contract": ("tests/gpu/test_kernels.py", "tests/engine/cpu/test_kernels.py -k norm"),
    "attention against its definition": ("tests/gpu/test_attention.py", "tests/engine/attention/test_paged.py -k window"),
    "tokens against transformers": (
        "tests/gpu/test_engine.py -k transformers",
        "tests/engine/models/test_dense_models.py -k full_batch",
    ),
}
"""On a card, and where there is none."""
PYTEST_FLAGS = ("-n0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Tasks are forked from a process that has imported what pytest would rewrite."""


def measure_environment(task: EngineTask, say: Say) -> Iterator[Figure]:
    for name, command in FACTS.items():
        try:
            told = subprocess.run(command.split(), capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")
        except (OSError, subprocess.SubprocessError) as error:
            told = [f"not known: {error}"]
        lines = (" ".join(re.sub(r"\x1b\[\d*m", "", line).split()) for line in told)  # nvidia-smi underlines heads of tables
        yield Fact(name=name, text="; ".join(line for line in lines if line))
    yield Fact(name="MPS", text="on" if mps_is_there(os.environ) else "off")


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


class _Results:
    """A plugin of pytest that keeps what became of each test."""

    def __init__(self) -> None:
        self.outcomes, self.failed = Counter[str](), list[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
            self.failed += [report.nodeid] if report.failed else []

    def pytest_collectreport(self, report: Any) -> None:
        self.failed += [report.nodeid] if report.failed else []


def measure_checks(task: EngineTask, say: Say) -> Iterator[Figure]:
    """Tests of the repository, in this process."""
    import pytest

    for name, (on_card, without) in CHECKS.items():
        say(name)
        results, chosen = _Results(), on_card if device_of(task.engine.device).type == "cuda" else without
        with contextlib.redirect_stdout(sys.stderr):
            status = pytest.main([*chosen.split(), *PYTEST_FLAGS], plugins=[results])
        failed = results.failed or ([f"pytest ends with {status}"] if status else [])
        yield Check(
            name=name,
            passed=results.outcomes["passed"],
            skipped=results.outcomes["skipped"],
            failed=len(failed),
            first=next(iter(failed), ""),
        )


def measure_offline(task: EngineTask, say: Say) -> Iterator[Figure]:
    ready = threading.Event()
    with checkpoint(task.model, task.engine) as (model, engine):
        engine = with_device_defaults(replace(engine, grammar="off"))
        with contextlib.closing(TorchExecutor(model, engine, ready.set, say)) as executor:
            for workload, largest_id in {"": 1, **WORKLOADS}.items():
                options = with_defaults(OfflineOptions(largest_id=largest_id), QUICK_OFFLINE if task.is_quick else {})
                sequences = sequences_of(options, executor.description.model.vocab_size) if workload else [WARM_UP]
                _, ran = serve(executor, engine.chunk_tokens, ready, sequences, options.temperature)
                answers = sum(each.answer_tokens for each in sequences)
                if workload:
                    yield Offline(
                        workload=workload,
                        model=task.model,
                        answer_tokens=answers,
                        seconds=ran.seconds,
                        tokens_per_s=answers / ran.seconds,
                    )


ACTS: Mapping[Section, Callable[[EngineTask, Say], Iterator[Figure]]] = {
    "environment": measure_environment,
    "ceilings": measure_ceilings,
    "checks": measure_checks,
    "steps": measure_steps,
    "eager": measure_steps,
    "offline": measure_offline,
    "pushes": pushes.measure_pushes,
}
