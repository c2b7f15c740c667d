"""A process of `python -m benchmarks.engine`: does one task and reports each figure as soon as it has it.

Owns the host's work of a step and what sampling parameters cost; steps are timed by `benchmarks/engine_steps.py`. It ends when
the task fails, with the reason as the last line that it prints, or when its parent is gone.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from bench.report import Spread
from benchmarks.engine import (
    Done,
    EngineTask,
    Figure,
    HostWork,
    SampledStep,
    Section,
)
from benchmarks.engine_steps import (
    Say,
    build,
    checkpoint,
    current,
    decode_plans,
    in_flight,
    measure_ceilings,
    measure_floor,
    measure_steps,
)
from common.config import DEMO_MODEL, EngineConfig
from common.errors import TandemError
from common.executor import EngineDescription, RowStart, StepPlan
from common.messages import ModelIdentity
from common.pages.layout import KVLayout
from common.processes.child import Parent, Progress
from common.sampling_params import Grammar, SamplingParams
from engine.backends import AttentionNeeds, make_attention, make_kernels
from engine.kv_memory import KVMemory
from engine.model_runner import ModelRunner
from engine.ports import LayerAttention, StepAttention
from engine.replay import CudaGraphs
from engine.step_runner import StepRunner

# --- the host's work ---------------------------------------------------------------------------------------------------------

HOST_ROWS, HOST_CONTEXT, HOST_VOCAB = 256, 1024, 8
HOST_WARM_STEPS = 20


class EmptyModel:
    """Implements `Model`: its results are there before it is called."""

    capturable = True
    spared_bytes = 0

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
        memory = KVMemory(layout, HOST_ROWS * layout.pages_for(HOST_CONTEXT), device)
        steps = empty_step_runner(memory, 4 * kv_heads, task.engine, lines.append)
        has_graphs = on_cuda and task.engine.graphs != "off" and steps.capture(CudaGraphs(), [HOST_ROWS], lines.append) is None
        identity = ModelIdentity(
            name="", fingerprint="", architecture="", dtype=dtype, vocab_size=HOST_VOCAB, context_tokens=HOST_CONTEXT
        )
        description = EngineDescription(
            model=identity,
            layout=layout,
            total_pages=memory.total_pages,
            max_rows=HOST_ROWS,
            memory=memory.region,
            eos_token_ids=(),
            device=str(device),
        )
        taken: list[float] = []
        rounds = min(10 * task.bench.rounds, 500)
        for plan in decode_plans(description, HOST_ROWS, HOST_CONTEXT, HOST_WARM_STEPS + rounds):
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


def empty_step_runner(memory: KVMemory, query_heads: int, engine: EngineConfig, say: Say) -> StepRunner:
    device, layout = memory.pool.device, memory.layout
    kernels, model = make_kernels(device), EmptyModel(HOST_ROWS, layout.head_dim, device)
    pages_per_row = layout.pages_for(HOST_CONTEXT)
    needs = AttentionNeeds(memory, query_heads, model.attention, memory.pool.dtype, HOST_ROWS, pages_per_row)
    return StepRunner(
        model,
        kernels,
        memory,
        make_attention(needs, engine.attention, kernels, say).attention,
        max_rows=HOST_ROWS,
        pages_per_row=pages_per_row,
        layer_groups=0,
        vocab_size=HOST_VOCAB,
    )


# --- sampling ----------------------------------------------------------------------------------------------------------------

PROMPT_TOKENS, STEPS_AT_ONCE, SAMPLING_ROWS, QUICK_ROWS = 128, 3, 64, 4
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
    """Decode steps whose rows all ask for the same, beside steps whose rows ask for nothing. Each round times a few steps of
    every kind, so that all kinds meet the same disturbances."""
    rows = QUICK_ROWS if task.is_quick else SAMPLING_ROWS
    with checkpoint(task, vocab_size=task.vocab_size) as (model, engine):
        runner = ModelRunner(model, replace(engine, max_running=rows, context_tokens=256, kv_memory="256MiB"), say)
    kinds = KINDS | WITH_VOCABULARY if task.model == DEMO_MODEL else KINDS
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with runner.on_device():
        for number in range(task.bench.rounds + 1):
            say(f"round {number}")
            for kind, fields in kinds.items():
                first, *others = sampling_plans(runner, msgspec.structs.replace(NOTHING, **fields))
                runner.steps.launch(first).wait()
                taken, _ = in_flight(runner, others)
                if number:  # the first round compiles and warms up
                    seconds[kind] += taken
    plain = float(np.median(seconds["nothing"]))
    for kind, taken in seconds.items():
        yield SampledStep(
            model=task.model,
            vocab_size=runner.description.model.vocab_size,
            rows=rows,
            asked=kind,
            step_ms=Spread.of(1e3 * each for each in taken),
            ratio=float(np.median(taken)) / plain,
        )


def sampling_plans(runner: ModelRunner, sampling: SamplingParams) -> list[StepPlan]:
    """A step in which all rows start, and those that are timed. Nobody has computed the rows' context."""
    if sampling.grammar is not None and runner.grammars is not None:
        runner.grammars.prepare(sampling.grammar, lambda: None).wait()
    described = runner.description
    pages = described.layout.pages_for(PROMPT_TOKENS + STEPS_AT_ONCE + 1)
    random = np.random.default_rng(5)
    starts = tuple(
        RowStart(
            row=row,
            pages=np.arange(row * pages, (row + 1) * pages, dtype=np.int32),
            sampling=sampling,
            length=PROMPT_TOKENS - 1,
            last_token=1,
            token_ids=random.integers(0, described.model.vocab_size, PROMPT_TOKENS).astype(np.int32),
        )
        for row in range(described.max_rows)
    )
    rows = np.arange(described.max_rows, dtype=np.int32)
    return [StepPlan(number, starts if number == 0 else (), decode_rows=rows) for number in range(STEPS_AT_ONCE + 1)]


# --- the process -------------------------------------------------------------------------------------------------------------

ACTS: Mapping[Section, Callable[[EngineTask, Say], Iterator[Figure]]] = {
    "ceilings": measure_ceilings,
    "build": build,
    "host": measure_host,
    "sampling": measure_sampling,
    "steps": measure_steps,
    "floor": measure_floor,
}


def main() -> None:
    parent: Parent[EngineTask] = Parent(msgspec.json.Decoder(EngineTask))

    try:
        while (tasks := parent.read_orders()) is not None:
            for task in tasks:
                for figure in ACTS[task.section](task, lambda text: parent.report(Progress(text=text))):
                    parent.report(figure)
                parent.report(Done())
    except TandemError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
