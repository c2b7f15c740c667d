"""The two ends of a model: token ids to hidden states, and hidden states to logits, over the rows of a vocabulary.

Owns what a rank does for the token ids that other ranks have. Knows no layers.
"""

from dataclasses import dataclass

from torch import Tensor

from common.engine.kernels.port import Kernels
from common.engine.models.linear import AnyLinear
from common.engine.parallel import Group


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight: [rows, hidden], of the token ids `ids` and then padding, so that all ranks have equally many rows."""

    weight: Tensor
    ids: range
    group: Group
    kernels: Kernels

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, hidden]. Each token is a row of one rank; the others add zeros."""
        if self.group.ranks == 1:
            return self.kernels.embed(token_ids, self.weight)
        rows = token_ids - self.ids.start
        elsewhere = (rows < 0) | (rows >= len(self.ids))
        found = self.kernels.embed(rows.masked_fill(elsewhere, 0), self.weight)
        return self.group.sum(found.masked_fill(elsewhere[:, None], 0.0))


@dataclass(frozen=True, slots=True)
class OutputHead:
    """product: has as many outputs as the embedding has rows. size: of the whole vocabulary."""

    product: AnyLinear
    size: int
    group: Group

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] float32. The padding is at the end of the last parts."""
        parts = self.group.gather(self.product(hidden))
        if parts.shape[1] > self.size:
            parts = parts[:, : self.size].contiguous()
        return parts.float()
