"""Embeddings: what becomes of the hidden states of prompts whose rows ask for a pooling of them.

Owns the poolings, and of each row what its prompt's chunks so far have brought. Computes nothing for other rows. Does not know
models or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.plan import Plan, RowStart
from common.sampling_params import Pooling


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """The embeddings of the prompts that a step completes. rows: of each. values: [rows, hidden] float32 on the device."""

    rows: Sequence[int]
    values: Tensor

    def read(self, values: Tensor) -> dict[int, bytes]:
        """`StepResult.embeddings`. values: the same, on the host."""
        return {row: value.numpy().astype("<f4").tobytes() for row, value in zip(self.rows, values, strict=True)}


class Poolings:
    """The rows that ask for an embedding."""

    def __init__(self) -> None:
        self._asked: dict[int, Pooling] = {}
        self._kept: dict[int, Tensor] = {}
        """Of rows whose prompt is not complete: the sum of its hidden states so far, or its first one. [hidden] float32 each."""

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            self._asked.pop(start.row, None)
            self._kept.pop(start.row, None)
            if start.sampling.pooling is not None:
                self._asked[start.row] = start.sampling.pooling

    def asked_of(self, plan: Plan) -> bool:
        """Whether `pool` needs the hidden states of this step's chunks."""
        return any(chunk.row in self._asked for chunk in plan.chunks)

    def pool(self, plan: Plan, hidden: Tensor) -> Pooled | None:
        """Take in the chunks of a step. hidden: [tokens, hidden], normed, those of the chunks first; of a step that is not
        `asked_of`, anything."""
        rows: list[int] = []
        values: list[Tensor] = []
        end = 0
        for chunk in plan.chunks if self._asked else ():
            begin, end = end, end + len(chunk.token_ids)
            pooling = self._asked.get(chunk.row)
            if pooling is None:
                continue
            value = self._with_chunk(chunk.row, pooling, hidden[begin:end])
            if chunk.last:
                self._kept.pop(chunk.row, None)
                rows.append(chunk.row)
                values.append(value / (chunk.start + len(chunk.token_ids)) if pooling == "mean" else value)
        return Pooled(rows, torch.stack(values)) if rows else None

    def _with_chunk(self, row: int, pooling: Pooling, hidden: Tensor) -> Tensor:
        """What is known after this chunk."""
        if pooling == "last":
            return hidden[-1].float()
        kept = self._kept.get(row)
        if pooling == "cls":
            value = hidden[0].float() if kept is None else kept
        else:
            total = hidden.sum(dim=0, dtype=torch.float32)
            value = total if kept is None else kept + total
        self._kept[row] = value
        return value
