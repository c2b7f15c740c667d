"""The least tokens of an answer: while it has fewer, it cannot end.

Owns how many tokens each such answer has, which the host knows without waiting for them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.logits.port import SampledRows
from common.engine.logits.sparse import SparseRows
from common.engine.plan import RowStart
from common.ids import Int64Array


class MinTokens:
    """Implements `LogitsProcessor`. rows: how many there are. eos_token_ids: banned beside the request's own stop tokens, also
    where the request does not heed them, as vLLM does."""

    def __init__(self, rows: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._missing = np.zeros(rows, dtype=np.int64)
        self._banned = SparseRows(rows, 1, device)

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            self._missing[start.row] = max(0, start.sampling.min_tokens - start.answer_tokens)
            if self._missing[start.row] > 0:
                ends = sorted(self._eos_token_ids.union(start.sampling.stop_token_ids))
                self._banned.put(start.row, np.array([ends], dtype=np.int64))
            else:
                self._banned.drop(start.row)

    def concerns(self, rows: Int64Array) -> NDArray[np.bool_]:
        concerned: NDArray[np.bool_] = self._missing[rows] > 0
        return concerned

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        banned = self._banned.table().shape[1]
        self._banned.add(logits, rows, torch.full((banned,), -torch.inf, device=logits.device))

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        self._missing[rows.host] -= 1
        for row in rows.host[self._missing[rows.host] == 0].tolist():
            self._banned.drop(row)
