"""A step on CPU beside its floor: the products of its matrices alone, and its attention at the speed of the memory.

Owns what the floor is, and that step and floor take turns, so that other work on the host slows both. Times no parts of a step.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.engine.batch import GREEDY
from bench.engine.device import fill_randomly, memory_of
from bench.engine.figures import Figure, Floor
from bench.engine.models import products_flop, shape_folder
from bench.engine.plan import MeasureFloor
from bench.engine.steps import WARM_STEPS, Say, decode_plans, start, why_not_decoded
from bench.report import Spread
from common.executor import Chunk, Plan, RowStart
from common.model_path import resolve_model_path
from engine.cpu.recording import CannotRecord, load_recorder
from engine.kv_memory import torch_dtype
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.shape import ServedShape, read_served_shape

READ_BYTES = 2**29
"""Far more than the caches of a core hold."""
PREFILL_ROUNDS = 3


def measure(task: MeasureFloor, say: Say) -> Iterator[Figure]:
    with shape_folder(task.model) as model:
        shape = read_served_shape(resolve_model_path(model.model, weights=False))
        runner, _ = start(task, model, shape, say)
        layout, region = runner.description.layout, runner.description.memory
        fill_randomly(region, torch_dtype(layout.dtype))
        assert isinstance(runner.model, Decoder), "the shapes of this bench are decoders"
        dtype = torch_dtype(runner.description.model.dtype)  # type: ignore[arg-type]
        bench = _Bench(task, runner, shape, _Products(runner.model, dtype))
        for tokens in task.chunks:
            say(f"floor of prefill, {tokens} tokens")
            yield bench.prefill(tokens)
        for context in sorted(task.contexts):
            for batch in sorted(task.batches):
                say(f"floor of decode, batch {batch}, context {context}")
                yield bench.decode(batch, context)


class _Products:
    """Every product of a forward, on random numbers. SwiGLU is a part of one of them (`products/port.py`)."""

    def __init__(self, model: Decoder, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype

    def of(self, tokens: int, sampled: int, replays: bool = False) -> Callable[[], object]:
        """Computes them once, what follows the last layer's attention for the sampled tokens alone. replays: by one call of C,
        where that is possible: as decode steps are."""
        sizes = [(product, (sampled if wanted else tokens, inputs)) for product, inputs, wanted in self._model.products()]
        given = {size: torch.randn(size, dtype=self._dtype) for _, size in sizes}

        @torch.inference_mode()
        def run(_: object = None) -> tuple[Tensor]:
            return ([product(given[size]) for product, size in sizes][-1],)

        recorder = load_recorder() if replays else None
        with contextlib.suppress(CannotRecord):
            if recorder is not None:
                return recorder.record(run).run
        return run


@dataclass(frozen=True, slots=True)
class _Bench:
    task: MeasureFloor
    runner: ModelRunner
    shape: ServedShape
    products: _Products

    def decode(self, batch: int, context: int) -> Floor:
        steps = WARM_STEPS + self.task.rounds
        skipped = why_not_decoded(self.runner.description, batch, context, steps)
        if skipped:
            return Floor(model=self.task.model, step="decode", rows=batch, context=context, skipped=skipped)
        plans = decode_plans(self.runner, batch, context, steps)
        return self._beside(plans, self.products.of(batch, batch, replays=True), "decode", batch, context, pairs=batch * context)

    def prefill(self, tokens: int) -> Floor:
        layout, total = self.runner.description.layout, self.runner.description.total_pages
        random = np.random.default_rng(3)
        prompt = random.integers(0, self.shape.vocab_size, tokens).astype(np.int32)
        pages = random.permutation(total)[: layout.pages_for(tokens)].astype(np.int32)
        plan = Plan(0, starts=(RowStart(0, pages, GREEDY),), chunks=(Chunk(0, 0, prompt, last=True),))
        plans = [plan] * (1 + PREFILL_ROUNDS)
        pairs = tokens * (tokens + 1) // 2
        return self._beside(plans, self.products.of(tokens, 1), "prefill", 1, tokens, pairs)

    def _beside(
        self, plans: Sequence[Plan], products: Callable[[], object], step: str, rows: int, context: int, pairs: int
    ) -> Floor:
        """The first plans only warm up. Attention reads the KV of each row once, and computes no faster than the products do."""
        shape, layout = self.shape, self.runner.description.layout
        warm = min(WARM_STEPS, len(plans) - PREFILL_ROUNDS)
        for plan in plans[:warm]:
            self.runner.run(plan)
        products()
        read_bytes, read = _reading(self.runner)
        taken = [(_seconds(partial(self.runner.run, plan)), _seconds(products), _seconds(read)) for plan in plans[warm:]]
        kv_bytes = rows * context * layout.page_bytes / layout.page_size
        heads = 4.0 * shape.heads * shape.head_dim * pairs * shape.layers
        tokens = context if step == "prefill" else rows
        flop = products_flop(shape, tokens, rows)
        computes = heads / flop if step == "prefill" else 0.0
        rounds = [
            (step_s, products_s, max(kv_bytes / read_bytes * read_s, computes * products_s))
            for step_s, products_s, read_s in taken
        ]
        step_ms, products_ms, attention_ms = (Spread.of(1e3 * seconds for seconds in part) for part in zip(*rounds, strict=True))
        return Floor(
            model=self.task.model,
            step=step,
            rows=rows,
            context=context,
            step_ms=step_ms,
            products_ms=products_ms,
            attention_ms=attention_ms,
            ratio=Spread.of(step_s / (products_s + attention_s) for step_s, products_s, attention_s in rounds),
        )


def _reading(runner: ModelRunner) -> tuple[int, Callable[[], object]]:
    """Bytes, and a call in which torch's threads read so many: the sum of a part of the pages."""
    pool: Tensor = memory_of(runner.description.memory)
    part = pool[: min(READ_BYTES, len(pool)) // 8 * 8].view(torch.int64)
    return part.nbytes, part.sum


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
