"""Linear layers in int8 on CPU: weights with a scale for each output, and tokens that are quantised in every step.

Owns the arithmetic of one layer, and the check that oneDNN's product is right on this processor. Does not know which layer it is.

Tokens are moved to be positive, which is what processors multiply. One without VNNI adds two products in 16 bits: they do not fit
if tokens have 8 bits, so they have 7 there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.kernels.port import Kernels
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


@dataclass(slots=True)
class Int8Linear:
    """weight: [outputs, inputs] int8, until it is packed; then None. scale: [outputs] float32. zeros: [outputs] int64, for
    oneDNN. bias: [outputs], or None. largest: the largest number of a quantised token."""

    weight: Tensor | None
    scale: Tensor
    zeros: Tensor
    bias: Tensor | None
    largest: int
    kernels: Kernels
    packed: Tensor | None = None

    @classmethod
    def empty(cls, outputs: int, inputs: int, bias: Tensor | None, largest: int, kernels: Kernels) -> "Int8Linear":
        weight = torch.empty((outputs, inputs), dtype=torch.int8)
        return cls(weight, torch.empty(outputs), torch.zeros(outputs, dtype=torch.int64), bias, largest, kernels)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs], of x's dtype."""
        values, scales = self.kernels.quantise_int8(x, self.largest)
        out = _product(values, self.largest, self.packed, self.scale, self.zeros).mul_(scales)
        if self.bias is not None:
            out.add_(self.bias)
        return out.to(x.dtype)

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
        self.packed, self.weight = _packed(self.weight), None


def largest_token_number(device: torch.device) -> int:
    """Of tokens in int8 on this processor. Raises ConfigError where int8 products cannot be computed or are wrong."""
    if device.type != "cpu":
        raise ConfigError(f"--quantization int8 computes on CPU, and the device is {device}: use fp8 or none")
    try:
        exact = [largest for largest in _LARGEST_TOKENS if all(_is_exact(largest, *sizes) for sizes in _TRIED)]
    except (RuntimeError, AttributeError, NotImplementedError) as error:  # AttributeError: torch does not have the op
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--quantization int8: torch has no int8 products here ({reason}): use --quantization none") from error
    if not exact:
        raise ConfigError("--quantization int8: oneDNN's int8 products are wrong on this processor: use --quantization none")
    return exact[0]


def _is_exact(largest: int, rows: int, inputs: int, outputs: int) -> bool:
    """Whether a product of the largest numbers is right to the last bit."""
    generator = torch.Generator().manual_seed(rows)
    signs, weight_signs = (
        2 * torch.randint(0, 2, shape, generator=generator) - 1 for shape in ((rows, inputs), (outputs, inputs))
    )
    values = (largest * signs + largest + 1).to(torch.uint8)
    packed = _packed((_LARGEST_WEIGHT * weight_signs).to(torch.int8))
    out = _product(values, largest, packed, torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64))
    return torch.equal(out.long(), largest * _LARGEST_WEIGHT * (signs @ weight_signs.T))


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def _product(values: Tensor, largest: int, packed: Tensor | None, scale: Tensor, zeros: Tensor) -> Tensor:
    """values: [rows, inputs] uint8, around largest + 1. Returns [rows, outputs] float32."""
    out: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        values, 1.0, largest + 1, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out
