"""The host's work for a decode step: what `StepRunner.launch` costs when the model computes nothing.

Owns a model without arithmetic. Everything else is the engine's own: rows, the copy to the device, the plan of attention, the
sampler, and on CUDA the replay of a graph. One row in as many as a page has tokens gets a page in each step; no row starts.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.engine.batch import Batch
from bench.engine.device import current
from bench.engine.figures import HostWork
from bench.engine.plan import MeasureHost
from bench.report import Spread
from common.executor import EngineDescription
from common.messages import ModelIdentity
from common.pages.layout import KVLayout
from engine.attention.choice import AttentionNeeds, make_attention
from engine.attention.port import Attention, LayerAttention
from engine.graphs import CudaGraphs
from engine.kernels.choice import make_kernels
from engine.kv_memory import KVMemory
from engine.models.port import StepAttention
from engine.sampler import Sampler
from engine.step_runner import StepRunner

ROWS, CONTEXT, VOCAB = 256, 1024, 8
WARM_STEPS = 20


class EmptyModel:
    """Implements `Model`: its results are there before it is asked."""

    capturable = True
    spared_bytes = 0

    def __init__(self, rows: int, head_dim: int, device: torch.device) -> None:
        self.attention: Sequence[LayerAttention] = [LayerAttention(head_dim**-0.5)]
        self._hidden = torch.zeros(rows, 1, device=device)
        self._logits = torch.zeros(rows, VOCAB, device=device)

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, wanted: Tensor | None = None) -> Tensor:
        return self._hidden[: len(token_ids if wanted is None else wanted)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]


def measure(task: MeasureHost) -> Iterator[HostWork]:
    device = current(task.engine.device)
    on_cuda = device.type == "cuda"
    head_dim, kv_heads = (128, 8) if on_cuda else (8, 1)
    layout = KVLayout(
        layers=1,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=16,
        dtype="bfloat16" if on_cuda else "float32",
    )
    stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        memory = KVMemory(layout, ROWS * layout.pages_for(CONTEXT), device)
        said: list[str] = []
        steps = _step_runner(memory, 4 * kv_heads, task, said)
        has_graphs = on_cuda and task.engine.graphs != "off" and steps.capture(CudaGraphs(), [ROWS], said.append) is None
        yield HostWork(
            device=str(device),
            rows=ROWS,
            graphs=has_graphs,
            attention=next((text for text in said if text.startswith("attention")), "torch"),
            launch_ms=Spread.of(1e3 * seconds for seconds in _launches(steps, memory, task.rounds)),
        )


def _step_runner(memory: KVMemory, query_heads: int, task: MeasureHost, said: list[str]) -> StepRunner:
    device, layout = memory.pool.device, memory.layout
    kernels = make_kernels(device)
    model = EmptyModel(ROWS, layout.head_dim, device)
    pages_per_row = layout.pages_for(CONTEXT)
    needs = AttentionNeeds(
        memory=memory,
        query_heads=query_heads,
        layers=model.attention,
        dtype=memory.pool.dtype,
        max_rows=ROWS,
        pages_per_row=pages_per_row,
    )
    attention: Attention = make_attention(needs, task.engine.attention, kernels, said.append).attention
    return StepRunner(
        model,
        kernels,
        memory,
        attention,
        Sampler(kernels),
        max_rows=ROWS,
        pages_per_row=pages_per_row,
        layer_groups=0,
        vocab_size=VOCAB,
    )


def _launches(steps: StepRunner, memory: KVMemory, rounds: int) -> list[float]:
    """Seconds of each launch. The device is idle at each, so nothing of it is waited for."""
    batch = Batch(_description(memory))
    length = CONTEXT - rounds - WARM_STEPS - memory.layout.page_size
    starts = [
        batch.start(row, length + row % memory.layout.page_size, length + row % memory.layout.page_size, 0) for row in range(ROWS)
    ]
    batch.left[:] = rounds + WARM_STEPS + 1
    taken = []
    for number in range(WARM_STEPS + rounds):
        plan = batch.plan(starts if number == 0 else ())
        began = time.perf_counter()
        pending = steps.launch(plan)
        ended = time.perf_counter()
        pending.wait()
        taken.append(ended - began)
    return taken[WARM_STEPS:]


def _description(memory: KVMemory) -> EngineDescription:
    return EngineDescription(
        model=ModelIdentity(
            name="empty", fingerprint="", architecture="", dtype=memory.layout.dtype, vocab_size=VOCAB, context_tokens=CONTEXT
        ),
        layout=memory.layout,
        total_pages=memory.total_pages,
        max_rows=ROWS,
        memory=memory.region,
        eos_token_ids=(),
        device=str(memory.pool.device),
    )
