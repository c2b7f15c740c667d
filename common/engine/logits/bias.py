"""What is added to the logits of named tokens: OpenAI's logit_bias.

Owns the biases of the rows.
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


class LogitBias:
    """Implements `LogitsProcessor`. rows: how many there are."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._is_biased = np.zeros(rows, dtype=bool)
        self._entries = SparseRows(rows, 2, device)
        """Of each the token, and the bits of its bias as float64."""

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            biases = start.sampling.logit_bias
            self._is_biased[start.row] = bool(biases)
            if biases:
                tokens, values = zip(*biases, strict=True)
                bits = np.array(values, dtype=np.float64).view(np.int64)
                self._entries.put(start.row, np.stack([np.array(tokens, dtype=np.int64), bits]))
            else:
                self._entries.drop(start.row)

    def concerns(self, rows: Int64Array) -> NDArray[np.bool_]:
        return self._is_biased[rows]

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        self._entries.add(logits, rows, self._entries.table()[2].view(torch.float64).float())

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        """A bias does not depend on tokens."""
