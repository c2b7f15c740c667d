"""Attention of a step without the kernel, against the definition: chunks and decode rows on scattered pages."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.attention import paged
from common.engine.attention.paged import PagedAttention
from common.engine.attention.port import LayerAttention, Segment, StepTokens
from common.engine.kernels.port import PagePlaces
from common.engine.kernels.torch_kernels import write
from common.engine.kv_memory import KVMemory
from common.pages.layout import KVLayout
from tests.common.engine.reference import gathered, softmax_attention

LAYERS, HEADS, KV_HEADS, DIM, PAGE_SIZE = 3, 6, 2, 16, 5
WIDTH = 8
CHUNKS = [(0, 1), (0, 7), (3, 1), (9, 6), (20, 20)]
"""(start, tokens) of each chunk."""
LENGTHS = [1, 4, 5, 6, 23, 40, 11, 12, 12]
"""Of the decode rows, the step's token included."""
SLOT_BYTES = 2 * KV_HEADS * DIM * 4
"""Of a token's keys and values in a layer."""


def gather_at_most(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(paged, "GATHER_BYTES", {"cpu": tokens * SLOT_BYTES})


class Step:
    """A step over chunks and decode rows, each with pages of its own; every slot that is not theirs holds NaN."""

    def __init__(self, chunks: list[tuple[int, int]], lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(3)
        layout = KVLayout(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE_SIZE, dtype="float32")
        rows = len(chunks) + len(lengths)
        self.memory = KVMemory(layout, rows * WIDTH + 1, torch.device("cpu"))
        self.memory.pool.fill_(torch.nan)
        self.table = 1 + torch.randperm(rows * WIDTH, generator=generator).view(rows, WIDTH)
        self.places = [(row, start + at) for row, (start, tokens) in enumerate(chunks) for at in range(tokens)]
        segments: list[Segment] = []
        for row, (start, tokens) in enumerate(chunks):
            begin = segments[-1].end if segments else 0
            segments.append(Segment(begin, begin + tokens, start, start + tokens, row))
            self._fill(row, start, generator)
        for row, length in enumerate(lengths, len(chunks)):
            self.places.append((row, length - 1))
            self._fill(row, length - 1, generator)
        table = self.table.to(torch.int32)
        for row, length in enumerate([*(start + tokens for start, tokens in chunks), *lengths]):
            table[row, layout.pages_for(length) :] = 0  # page 0 is all NaN
        at = torch.tensor(self.places)
        self.pages, self.slots = self.table[at[:, 0], at[:, 1] // PAGE_SIZE], at[:, 1] % PAGE_SIZE
        self.tokens = StepTokens(
            chunks=segments,
            table=table,
            decode_rows=torch.arange(len(chunks), rows),
            decode_lengths=torch.tensor(lengths),
            host_lengths=np.array(lengths, dtype=np.int64),
        )
        self.attention = PagedAttention(self.memory, HEADS, [LayerAttention(DIM**-0.5)] * LAYERS, torch.float32, kernel=None)
        self.attention.plan(self.tokens)
        self.query = torch.randn(len(at), HEADS, DIM, generator=generator)
        self.key, self.value = torch.randn(2, len(at), KV_HEADS, DIM, generator=generator).unbind()

    def _fill(self, row: int, tokens: int, generator: torch.Generator) -> None:
        for views in self.memory.layers:
            for view in views:
                for at in range(tokens):
                    view[self.table[row, at // PAGE_SIZE], :, at % PAGE_SIZE] = torch.randn(KV_HEADS, DIM, generator=generator)

    def run(self, layer: int) -> Tensor:
        write(PagePlaces(*self.memory.layers[layer], self.pages, self.slots), self.key, self.value)
        return self.attention.run(layer, self.query)

    def expected(self, layer: int) -> np.ndarray:
        """After `run`."""
        out = []
        for number, (row, position) in enumerate(self.places):
            keys, values = (gathered(view, self.table[row], position + 1) for view in self.memory.layers[layer])
            out.append(softmax_attention(self.query[number].double().numpy(), keys, values, DIM**-0.5))
        return np.array(out)


@pytest.mark.parametrize(
    ("chunks", "lengths"), [(CHUNKS, LENGTHS), (CHUNKS, []), ([], LENGTHS)], ids=["both", "chunks", "decode"]
)
@pytest.mark.parametrize("tokens_at_once", [0, 24, 80, 10**6])
def test_each_token_attends_to_its_own_past(
    monkeypatch: pytest.MonkeyPatch, chunks: list[tuple[int, int]], lengths: list[int], tokens_at_once: int
) -> None:
    gather_at_most(monkeypatch, tokens_at_once)
    step = Step(chunks, lengths)
    for layer in range(LAYERS):
        got = step.run(layer).double().numpy()
        assert np.abs(got - step.expected(layer)).max() < 2e-6


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[str]:
    calls: list[str] = []
    true: Callable[..., Tensor] = getattr(owner, name)

    def counting(*args: object, **kwargs: object) -> Tensor:
        calls.append(name)
        return true(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)
    return calls


@pytest.mark.parametrize(("tokens_at_once", "calls"), [(10**6, 1), (80, 3), (0, len(LENGTHS))])
def test_decode_rows_attend_together_as_far_as_the_gathered_pages_stay_bounded(
    monkeypatch: pytest.MonkeyPatch, tokens_at_once: int, calls: int
) -> None:
    """80 tokens: four rows of up to 6, two of up to 40, three of up to 12."""
    gather_at_most(monkeypatch, tokens_at_once)
    step = Step([], LENGTHS)
    attends = counted(monkeypatch, torch.nn.functional, "scaled_dot_product_attention")
    reads = counted(monkeypatch, Tensor, "tolist") + counted(monkeypatch, Tensor, "item")
    step.run(0)
    assert len(attends) == calls
    assert reads == [], "a layer waits for the device"


def test_masks_and_positions_are_made_once_and_not_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    gather_at_most(monkeypatch, 80)
    step = Step(CHUNKS, LENGTHS)
    made = [counted(monkeypatch, torch, name) for name in ("arange", "zeros")]
    for layer in range(LAYERS):
        step.run(layer)
    assert made == [[], []]
