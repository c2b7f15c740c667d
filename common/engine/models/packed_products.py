"""The products over packed weights that this processor has: oneDNN's, and the one in C.

Owns the port of such products, and which of them work for a dtype. Does not know which is the fastest (`packing.py`).
"""

from typing import Protocol

import torch
from torch import Tensor

from common.engine.models.panel_product import load_panel_product


class PackedProduct(Protocol):
    """A product over a weight that is reordered once."""

    def packed(self, weight: Tensor) -> Tensor:
        """A copy of a weight, [outputs, inputs], as the product reads it."""

    def of_outputs(self, bias: Tensor) -> Tensor:
        """A bias, [outputs], as the product reads it."""

    def __call__(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """x: [rows, inputs]. Returns [rows, outputs]."""


class OneDnnProduct:
    """Implements `PackedProduct`. Each method raises RuntimeError where oneDNN does not compute the dtype."""

    def packed(self, weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return packed

    def of_outputs(self, bias: Tensor) -> Tensor:
        return bias

    def __call__(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
        return out


def packed_products(dtype: torch.dtype, device: torch.device) -> list[PackedProduct]:
    """Those that work here. oneDNN's is tried, because that depends on torch and on the processor."""
    if device.type != "cpu":
        return []
    found: list[PackedProduct] = []
    in_c = load_panel_product() if dtype == torch.float32 else None
    if in_c is not None:
        found.append(in_c)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        product = OneDnnProduct()
        try:
            product(torch.zeros((2, 16), dtype=dtype), product.packed(torch.zeros((16, 16), dtype=dtype)), None, 16)
        except (RuntimeError, AttributeError, NotImplementedError):  # AttributeError: torch does not have the op
            return found
        found.append(product)
    return found
