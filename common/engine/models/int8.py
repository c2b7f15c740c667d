"""Linear layers in int8 on CPU: weights with a scale for each output, and tokens that are quantised in every step.

Owns a layer, the choice of its product, oneDNN's or the one in C, and the check that it is right on this processor. Does not know
which layer it is.

The product in C is the faster one wherever it exists, for all numbers of rows, but perhaps where oneDNN has instructions that
multiply whole tiles (AMX). With oneDNN, tokens are moved to be positive, which is what processors multiply. One without VNNI adds
two products in 16 bits: they do not fit if tokens have 8 bits, so they have 7 there.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.kernels.port import Kernels
from common.engine.models.int8_product import MOST_INPUTS, load_int8_product
from common.engine.native.build import processor_flags
from common.errors import ConfigError

_LARGEST_WEIGHT = 127
_LARGEST_TOKENS = (127, 63)
"""The largest number of a quantised token: with 8 bits, and with 7."""
_SIGN = 0x80
"""The bit that moves a byte by 128: numbers that were moved to be positive become signed again."""
_BLOCK_ROWS = 4096
"""So many outputs are quantised at a time: it takes memory besides the weight's."""
_TRIED = ((1, 64, 48), (20, 256, 160), (200, 96, 512))
"""Rows, inputs and outputs of the products that are tried: kernels differ."""


class QuantisedProduct(Protocol):
    """A product of int8 weights with rows that it quantises."""

    def packed(self, weight: Tensor) -> Tensor:
        """A weight as the product reads it. weight: [outputs, inputs] int8."""

    def of_outputs(self, numbers: Tensor) -> Tensor:
        """A scale or a bias, [outputs], as the product reads it."""

    def __call__(self, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """x: [rows, inputs] float32. Returns [rows, outputs] float32."""


class OneDnnProduct:
    """largest: the largest number of a quantised token. Implements `QuantisedProduct`."""

    def __init__(self, largest: int, kernels: Kernels) -> None:
        self._largest, self._kernels = largest, kernels
        self._zeros: dict[int, Tensor] = {}

    def packed(self, weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
        return packed

    def of_outputs(self, numbers: Tensor) -> Tensor:
        return numbers.float()

    def __call__(self, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        if outputs not in self._zeros:
            self._zeros[outputs] = torch.zeros(outputs, dtype=torch.int64)
        values, scales = self._kernels.quantise_int8(x, self._largest)
        out: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            values, 1.0, self._largest + 1, packed, scale, self._zeros[outputs], None, 1.0, 0, torch.float32, "none", [], ""
        )
        out.mul_(scales)
        return out if bias is None else out.add_(bias)


@dataclass(slots=True)
class Int8Linear:
    """weight: [outputs, inputs] int8, until it is packed; then None. scale: [outputs] float32. bias: [outputs], or None. Once it
    is packed, both are as the product reads them."""

    weight: Tensor | None
    scale: Tensor
    bias: Tensor | None
    outputs: int
    product: QuantisedProduct
    kernels: Kernels
    packed: Tensor | None = None

    @classmethod
    def empty(cls, outputs: int, inputs: int, bias: Tensor | None, product: QuantisedProduct, kernels: Kernels) -> "Int8Linear":
        """Raises ConfigError for a layer whose sums would not fit in 32 bits."""
        if inputs > MOST_INPUTS:
            raise ConfigError(
                f"--quantization int8 needs layers of at most {MOST_INPUTS} inputs, but one of this model has {inputs}: use none"
            )
        weight = torch.empty((outputs, inputs), dtype=torch.int8)
        return cls(weight, torch.empty(outputs), bias, outputs, product, kernels)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs], of x's dtype."""
        assert self.packed is not None
        return self.product(x.float(), self.packed, self.scale, self.bias, self.outputs).to(x.dtype)

    def put(self, rows: slice, weight: Tensor) -> Tensor:
        """Set some outputs, before it is packed. weight: [rows, inputs], any float dtype. Returns it, because int8 does not show
        what was not finite."""
        assert self.weight is not None
        values, scales = self.weight[rows], self.scale[rows]
        for begin in range(0, len(weight), _BLOCK_ROWS):
            block = slice(begin, begin + _BLOCK_ROWS)
            moved, found = self.kernels.quantise_int8(weight[block], _LARGEST_WEIGHT)
            values[block] = moved.bitwise_xor_(_SIGN).view(torch.int8)
            scales[block] = found[:, 0]
        return weight

    def pack(self) -> None:
        """After this it computes, and takes no more weights."""
        assert self.weight is not None
        self.packed, self.weight = self.product.packed(self.weight), None
        self.scale = self.product.of_outputs(self.scale)
        self.bias = None if self.bias is None else self.product.of_outputs(self.bias)


def int8_product(device: torch.device, kernels: Kernels) -> QuantisedProduct:
    """The product of this processor. Raises ConfigError where int8 products cannot be computed or are wrong."""
    if device.type != "cpu":
        raise ConfigError(f"--quantization int8 computes on CPU, and the device is {device}: use fp8 or none")
    in_c = None if "amx_int8" in processor_flags() else load_int8_product()
    if in_c is not None and _is_right(in_c):
        return in_c
    try:
        right = [product for largest in _LARGEST_TOKENS if _is_right(product := OneDnnProduct(largest, kernels))]
    except (RuntimeError, AttributeError, NotImplementedError) as error:  # AttributeError: torch does not have the op
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--quantization int8: torch has no int8 products here ({reason}): use --quantization none") from error
    if not right:
        raise ConfigError("--quantization int8: oneDNN's int8 products are wrong on this processor: use --quantization none")
    return right[0]


def _is_right(product: QuantisedProduct) -> bool:
    return all(_is_exact(product, *sizes) for sizes in _TRIED)


def _is_exact(product: QuantisedProduct, rows: int, inputs: int, outputs: int) -> bool:
    """Whether a product of the largest numbers is right to the last of them."""
    generator = torch.Generator().manual_seed(rows)
    signs, weight_signs = (
        2 * torch.randint(0, 2, shape, generator=generator) - 1 for shape in ((rows, inputs), (outputs, inputs))
    )
    packed = product.packed((_LARGEST_WEIGHT * weight_signs).to(torch.int8))
    out = product(signs.float(), packed, product.of_outputs(torch.ones(outputs)), None, outputs)
    return torch.equal(out.round().long(), _LARGEST_WEIGHT * (signs @ weight_signs.T))
