"""A step over chunks and decode rows on scattered pages, and what attention must give for it, from the definition in float64.

Owns the step and its expectation. Does not know which backend computes it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.pages.layout import KVDtype, KVLayout, PageOrder
from engine.kv_memory import KVMemory
from engine.ports import LayerAttention, PagePlaces, Segment, StepTokens
from engine.torch_kernels import write
from tests.engine.reference import gathered, softmax_attention


@dataclass(frozen=True, slots=True)
class Shape:
    """layers: how each layer attends. dtype: of queries. width: pages of a row of the page table."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int
    layers: tuple[LayerAttention, ...]
    dtype: torch.dtype = torch.float32
    kv_dtype: KVDtype = "float32"
    order: PageOrder = "layer"
    width: int = 8

    def memory(self, pages: int, device: str = "cpu") -> KVMemory:
        layout = KVLayout(
            layers=len(self.layers),
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            page_size=self.page_size,
            dtype=self.kv_dtype,
            order=self.order,
        )
        return KVMemory(layout, pages, torch.device(device))


class Step:
    """chunks: (start, tokens) of each. lengths: of the decode rows, the step's token included. padding: null rows behind them.
    memory: where the step lies, and on which device; None: a pool of its own, on CPU.

    Each row has pages of its own. Every slot that is not theirs holds NaN, and so does page 0, which stands in the page table
    behind the pages of a row. The null row has one page, the last.
    """

    def __init__(
        self,
        shape: Shape,
        chunks: list[tuple[int, int]],
        lengths: list[int],
        *,
        memory: KVMemory | None = None,
        padding: int = 0,
        seed: int = 3,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.count = shape, len(chunks) + len(lengths)
        own = self.count * shape.width
        self.memory = memory or shape.memory(own + 2)
        self.memory.pool.view(torch.uint8).fill_(0xFF if shape.kv_dtype != "float8_e4m3fn" else 0x7F)  # NaN
        pages = 1 + torch.randperm(own, generator=generator).view(self.count, shape.width)
        device = self.memory.pool.device
        self.table = torch.cat([pages, torch.full((1, shape.width), self.memory.total_pages - 1)]).int().to(device)
        contexts = [*(start + tokens for start, tokens in chunks), *lengths]
        for row, context in enumerate(contexts):
            self.table[row, self.memory.layout.pages_for(context) :] = 0
        self.places = [(row, start + at) for row, (start, tokens) in enumerate(chunks) for at in range(tokens)]
        self.places += [(row, length - 1) for row, length in enumerate(lengths, len(chunks))]
        ends = np.cumsum([0, *(tokens for _, tokens in chunks)]).tolist()
        self.tokens = StepTokens(
            chunks=[Segment(ends[row], ends[row + 1], start, start + tokens, row) for row, (start, tokens) in enumerate(chunks)],
            table=self.table,
            decode_rows=torch.tensor([*range(len(chunks), self.count), *[self.count] * padding], dtype=torch.int64).to(device),
            decode_lengths=torch.tensor([*lengths, *[1] * padding], dtype=torch.int64).to(device),
            host_lengths=np.array([*lengths, *[1] * padding], dtype=np.int64),
        )
        every = [(row, at) for row, context in enumerate(contexts) for at in range(context)]
        for layer in range(len(shape.layers)):
            key, value = torch.randn(2, len(every), shape.kv_heads, shape.dim, generator=generator)
            write(self._at(layer, every), key.to(device), value.to(device))
        self.query = 3 * torch.randn(len(self.places) + padding, shape.heads, shape.dim, generator=generator)
        self.query = self.query.to(device, shape.dtype)

    def _at(self, layer: int, places: list[tuple[int, int]]) -> PagePlaces:
        rows, at = torch.tensor(places, device=self.table.device).unbind(1)
        pages = self.table[rows, at // self.shape.page_size].long()
        return PagePlaces(*self.memory.layers[layer], pages, at % self.shape.page_size)

    def error(self, layer: int, got: Tensor) -> float:
        """The largest difference from the definition. got: [tokens and padding, heads, dim]. Null rows do not count."""
        assert got.shape == self.query.shape and got.dtype == self.query.dtype
        return float(np.abs(got[: len(self.places)].double().cpu().numpy() - self._expected(layer)).max())

    def _expected(self, layer: int) -> NDArray[np.float64]:
        how = self.shape.layers[layer]
        out, table, queries = [], self.table.cpu(), self.query.double().cpu().numpy()
        views = [view.float().cpu() for view in self.memory.layers[layer]]
        for number, (row, position) in enumerate(self.places):
            first = 0 if how.window is None else max(0, position + 1 - how.window)
            keys, values = (gathered(view, table[row], position + 1)[:, first:] for view in views)
            out.append(softmax_attention(queries[number], keys, values, how.scale, how.softcap))
        return np.array(out)
