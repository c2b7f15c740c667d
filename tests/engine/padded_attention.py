"""Decode attention that can be captured, from its definition: each row over all pages that it could have, masked by its length.

For tests of the decode step as a graph. Reads only the tensors that it was planned with, and its own buffer of lengths. Also
makes runners on the CPU choose it, and capture, as on a card.
"""

import pytest
import torch
from torch import Tensor

from engine import model_runner
from engine.backends import ChosenAttention
from engine.gpu.flashinfer import AttentionNeeds
from engine.kv_memory import KVMemory
from engine.model_runner import ModelRunner
from engine.ports import StepTokens
from engine.replay import GraphMaker
from engine.torch_attention import PagedAttention
from engine.torch_kernels import Kernels


class CapturablePaged(PagedAttention):
    """As `PagedAttention` in eager steps."""

    def for_graph(self, rows: int) -> "PaddedAttention":  # type: ignore[override]
        return PaddedAttention(self._memory, rows)


class PaddedAttention:
    """Implements `Attention` for decode steps of so many rows."""

    def __init__(self, memory: KVMemory, rows: int) -> None:
        self._memory = memory
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=memory.pool.device)

    def plan(self, step: StepTokens) -> None:
        assert len(step.decode_rows) == len(step.host_lengths) == len(self._lengths) and not step.chunks
        self._step = step
        self._lengths.copy_(torch.from_numpy(step.host_lengths))

    def run(self, layer: int, query: Tensor) -> Tensor:
        rows, heads, dim = query.shape
        pages = self._step.table[self._step.decode_rows].long()
        keys, values = (view[pages].transpose(1, 2).flatten(2, 3).to(query.dtype) for view in self._memory.layers[layer])
        beyond = torch.arange(keys.shape[2], device=query.device)[None, :] >= self._lengths[:, None]
        keys, values = (x.masked_fill(beyond[:, None, :, None], 0.0) for x in (keys, values))
        grouped = query.view(rows, keys.shape[1], -1, dim)
        scores = (grouped @ keys.transpose(2, 3) * dim**-0.5).masked_fill(beyond[:, None, None, :], -torch.inf)
        out: Tensor = scores.softmax(dim=-1) @ values
        return out.reshape(rows, heads, dim)

    def for_graph(self, rows: int) -> None:
        raise AssertionError("it is for a graph already")


def as_on_a_card(monkeypatch: pytest.MonkeyPatch, maker: GraphMaker) -> None:
    """For runners that are made from now on. Recorded graphs see torch's operations alone, so kernels are torch's."""

    def chosen(needs: AttentionNeeds, *others: object) -> ChosenAttention:
        return ChosenAttention(CapturablePaged(needs.memory, needs.query_heads, needs.layers, needs.dtype), "padded")

    monkeypatch.setattr(model_runner, "make_attention", chosen)
    monkeypatch.setattr(model_runner, "make_kernels", lambda device: Kernels())
    monkeypatch.setattr(ModelRunner, "_graph_maker", lambda self: maker)
