"""oneDNN's products with packed weights, through torch: in the model's dtype, and in int8.

Owns torch's names for them. Does not know which of them works here (`choice.py`).
"""

import torch
from torch import Tensor

from common.engine.kernels.port import Kernels
from common.engine.products.port import Packed

MISSING = (RuntimeError, AttributeError, NotImplementedError)
"""What a product raises that does not work here. AttributeError: torch does not have the op."""


class OneDnnProduct:
    """Implements `PackedProduct` in the dtype of its weights."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        assert scale is None, "these weights have none"
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return Packed(packed, bias, None, len(weight) // (1 + gated), gated)

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed.weight, packed.bias, "none", [], "")
        return self._kernels.silu_and_mul(out) if packed.gated else out


class OneDnnInt8Product:
    """Implements `PackedProduct` with int8 weights and float32 rows, which it quantises. largest: the largest number of a
    quantised row."""

    def __init__(self, largest: int, kernels: Kernels) -> None:
        self.largest = largest
        self._kernels = kernels
        self._zeros: dict[int, Tensor] = {}

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        assert scale is not None
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        return Packed(packed, None if bias is None else bias.float(), scale, len(weight) // (1 + gated), gated)

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        assert packed.scale is not None
        outputs = len(packed.scale)
        if outputs not in self._zeros:
            self._zeros[outputs] = torch.zeros(outputs, dtype=torch.int64)
        values, scales = self._kernels.quantise_int8(x, self.largest)
        out: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            values, 1.0, self.largest + 1, packed.weight, packed.scale, self._zeros[outputs], None, 1.0, 0, torch.float32,
            "none", [], "",
        )  # fmt: skip
        out.mul_(scales)
        if packed.bias is not None:
            out.add_(packed.bias)
        return self._kernels.silu_and_mul(out) if packed.gated else out
