"""Linear layers: a weight, perhaps a bias, and their product with the step's tokens.

Owns the arithmetic of one layer. Does not know where weights come from or which layer it is.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class Linear:
    """weight: [outputs, inputs]. bias: [outputs], or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs]."""
        return F.linear(x, self.weight, self.bias)
