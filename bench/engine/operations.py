"""Checks of single operations on the device: the kernels that are chosen there against plain torch, and FlashInfer's attention
against torch's, on the same numbers.

Owns what is compared and how far it may be apart. Knows no model.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from bench.engine.device import current
from bench.engine.figures import Check
from bench.engine.plan import CheckOperations
from common.config import AttentionName
from common.errors import ConfigError
from common.pages.layout import KVDtype, KVLayout
from engine.attention.choice import AttentionNeeds, make_attention
from engine.attention.port import LayerAttention, Segment, StepTokens
from engine.kernels.choice import make_kernels
from engine.kernels.port import HeadNorm, Kernels, PagePlaces, Rotation
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_memory import KVMemory

MOST_APART = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""||ours - reference|| / ||reference||, of one operation."""
MOST_APART_ATTENTION = 2e-2
"""The products and the weights between them are rounded in both, at other points."""
TOKENS, HIDDEN, WIDTH, VOCAB = 33, 1024, 3072, 50_000
HEADS = ((16, 8), (32, 8), (40, 8))
"""Query heads and KV heads of the models that are measured."""
DIM, PAGE_SIZE = 128, 16
Operation = Callable[[Kernels], Tensor]


def check(task: CheckOperations) -> Iterator[Check]:
    device = current(task.engine.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = make_kernels(device)
    for name, operation in _operations(device, dtype).items():
        apart = distance(operation(chosen), operation(TorchKernels()))
        limit = MOST_APART[dtype]
        yield Check(
            rule=f"kernels: {name} by {type(chosen).__name__} within {limit:g} of plain torch",
            met=apart <= limit,
            figure=f"{apart:.1e}",
        )
    yield _sampling(chosen, device)
    for heads, kv_heads in HEADS[: 1 if task.is_quick else None]:
        yield from _attention(device, heads, kv_heads)


def distance(ours: Tensor, reference: Tensor) -> float:
    """||ours - reference|| / ||reference||. Infinite when there is a NaN."""
    wide = reference.double()
    apart = float((ours.double() - wide).norm() / wide.norm())
    return apart if apart == apart else float("inf")


def _operations(device: torch.device, dtype: torch.dtype) -> dict[str, Operation]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, residual, weight, gate_up = draw(TOKENS, HIDDEN), draw(TOKENS, HIDDEN), draw(HIDDEN), draw(TOKENS, 2 * WIDTH)
    heads, norm = draw(TOKENS, 24, DIM), HeadNorm(draw(DIM), draw(DIM), 1e-6)
    angles = torch.rand(TOKENS, DIM // 2, device=device) * 6
    rotation = Rotation(angles.cos(), angles.sin())
    at = torch.randperm(4 * TOKENS, device=device)[:TOKENS]

    def rotated(kernels: Kernels) -> Tensor:
        pool = torch.zeros(4 * TOKENS // PAGE_SIZE + 1, 2, 4, PAGE_SIZE, DIM, dtype=dtype, device=device)
        places = PagePlaces(pool[:, 0], pool[:, 1], at // PAGE_SIZE, at % PAGE_SIZE)
        queries = kernels.rotate_and_write(heads, rotation, norm, places)
        return torch.cat([queries.flatten(), pool.flatten()])

    return {
        "rms_norm": lambda kernels: kernels.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda kernels: torch.cat(kernels.add_rms_norm(x, residual, weight, 1e-6)),
        "silu_and_mul": lambda kernels: kernels.silu_and_mul(gate_up),
        "rotate_and_write": rotated,
    }


def _sampling(kernels: Kernels, device: torch.device) -> Check:
    rows = 64
    logits = 3 * torch.randn(rows, VOCAB, device=device)
    temperature = torch.linspace(0, 2, rows, device=device)
    seed, position = torch.arange(rows, device=device), torch.arange(rows, device=device) * 7
    ours, reference = (made.sample(logits, temperature, seed, position) for made in (kernels, TorchKernels()))
    equal = int((ours == reference).sum())
    return Check(rule="kernels: sampled tokens are those of plain torch", met=equal == rows, figure=f"{equal} of {rows}")


# --- attention ---------------------------------------------------------------------------------------------------------------


def _attention(device: torch.device, heads: int, kv_heads: int) -> Iterator[Check]:
    """Chunks that begin and go on beside decode rows, and decode rows alone, over pages of each dtype."""
    pages: tuple[KVDtype, ...] = ("bfloat16", "float8_e4m3fn") if device.type == "cuda" else ("float32",)
    limit = MOST_APART_ATTENTION
    for dtype in pages:
        for name, chunks in (("chunks and decode rows", ((0, 100), (300, 50))), ("decode rows", ())):
            rule = f"attention: {heads} heads on {kv_heads}, {name}, {dtype} pages: FlashInfer within {limit:g} of torch"
            step = _Step(device, heads, kv_heads, dtype, chunks)
            try:
                apart = distance(step.attend("flashinfer"), step.attend("torch"))
            except ConfigError as error:
                yield Check(rule=rule, met=None, figure=f"not checked: {error}")
                continue
            yield Check(rule=rule, met=apart <= limit, figure=f"{apart:.1e}")


class _Step:
    """A step over random pages. chunks: start and tokens of each."""

    def __init__(
        self, device: torch.device, heads: int, kv_heads: int, dtype: KVDtype, chunks: tuple[tuple[int, int], ...]
    ) -> None:
        lengths = np.array([1, 15, 16, 17, 500, 1023], dtype=np.int64)
        rows, width = len(chunks) + len(lengths), 64
        layout = KVLayout(layers=1, kv_heads=kv_heads, head_dim=DIM, page_size=PAGE_SIZE, dtype=dtype)
        self._memory = KVMemory(layout, rows * width, device)
        self._heads = heads
        self._dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        self._memory.pool.copy_(torch.randn(self._memory.pool.shape, dtype=self._dtype, device=device))
        segments: list[Segment] = []
        for row, (start, tokens) in enumerate(chunks):
            begin = segments[-1].end if segments else 0
            segments.append(Segment(begin, begin + tokens, start, start + tokens, row))
        self._tokens = (segments[-1].end if segments else 0) + len(lengths)
        self._step = StepTokens(
            chunks=segments,
            table=torch.randperm(rows * width, device=device).int().view(rows, width),
            decode_rows=torch.arange(len(chunks), rows, device=device),
            decode_lengths=torch.from_numpy(lengths).to(device),
            host_lengths=lengths,
        )
        self._query = torch.randn(self._tokens, heads, DIM, device=device).to(self._dtype)

    def attend(self, name: AttentionName) -> Tensor:
        """Raises ConfigError when that backend cannot be used."""
        kernels = make_kernels(self._query.device)
        needs = AttentionNeeds(
            memory=self._memory,
            query_heads=self._heads,
            layers=[LayerAttention(DIM**-0.5)],
            dtype=self._dtype,
            max_rows=8,
            pages_per_row=64,
        )
        attention = make_attention(needs, name, kernels, lambda text: None).attention
        attention.plan(self._step)
        return attention.run(0, self._query)
