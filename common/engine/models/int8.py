"""Linear layers in int8 on CPU: weights with a scale for each output, and tokens that are quantised in every step.

Owns a layer, and how its weight is quantised. Does not know which layer it is, or its product (`products/choice.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.kernels.port import Kernels
from common.engine.products.int8_product import MOST_INPUTS
from common.engine.products.port import LARGEST_WEIGHT, SIGN, Packed, PackedProduct
from common.errors import ConfigError

_BLOCK_ROWS = 4096
"""So many outputs are quantised at a time: it takes memory besides the weight's."""


@dataclass(slots=True)
class Int8Linear:
    """weight: [outputs, inputs] int8, until it is packed; then None. scale: [outputs] float32. bias: [outputs], or None. gated:
    SwiGLU, the gates first."""

    weight: Tensor | None
    scale: Tensor
    bias: Tensor | None
    product: PackedProduct
    kernels: Kernels
    gated: bool = False
    packed: Packed | None = None

    @classmethod
    def empty(
        cls, outputs: int, inputs: int, bias: Tensor | None, product: PackedProduct, kernels: Kernels, *, gated: bool = False
    ) -> "Int8Linear":
        """Raises ConfigError for a layer whose sums would not fit in 32 bits."""
        if inputs > MOST_INPUTS:
            raise ConfigError(
                f"--quantization int8 needs layers of at most {MOST_INPUTS} inputs, but one of this model has {inputs}: use none"
            )
        weight = torch.empty((outputs, inputs), dtype=torch.int8)
        return cls(weight, torch.empty(outputs), bias, product, kernels, gated)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs], of x's dtype; gated: half as many."""
        assert self.packed is not None
        return self.product(x.float(), self.packed).to(x.dtype)

    def put(self, rows: slice, weight: Tensor) -> Tensor:
        """Set some outputs, before it is packed. weight: [rows, inputs], any float dtype. Returns it, because int8 does not show
        what was not finite."""
        assert self.weight is not None
        values, scales = self.weight[rows], self.scale[rows]
        for begin in range(0, len(weight), _BLOCK_ROWS):
            block = slice(begin, begin + _BLOCK_ROWS)
            moved, found = self.kernels.quantise_int8(weight[block], LARGEST_WEIGHT)
            values[block] = moved.bitwise_xor_(SIGN).view(torch.int8)
            scales[block] = found[:, 0]
        return weight

    def pack(self) -> None:
        """After this it computes, and takes no more weights."""
        assert self.weight is not None
        self.packed, self.weight = self.product.pack(self.weight, self.bias, self.scale, gated=self.gated), None
