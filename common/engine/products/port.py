"""The port of products with packed weights, which linear layers on CPU compute with.

Owns what a packed weight is, and the order of outputs that the products in C share. Does not know layers (`models/linear.py`,
`models/int8.py`) or which product is the fastest (`models/packing.py`).
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

LARGEST_WEIGHT = 127
"""The largest number of an int8 weight."""
SIGN = 0x80
"""The bit that moves a byte by 128: between numbers with a sign and numbers without one."""


class Packed(NamedTuple):
    """The weight of a layer and what belongs to its outputs, as one product reads them. outputs: of a row, which are half as many
    as the weight has if the layer is gated. scale: of each output; None: there is none."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    outputs: int
    gated: bool


class PackedProduct(Protocol):
    """A product over a weight that is reordered once."""

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        """weight: [outputs, inputs]. bias, scale: [outputs], or None. gated: SwiGLU (Shazeer 2020), the gates first."""

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        """x: [rows, inputs]. Returns [rows, outputs]; of a gated layer silu(gate) * the other half."""


def pieces(weight: Tensor, block: int, gated: bool) -> Iterator[tuple[slice, slice, Tensor]]:
    """The rows of a weight that lie alike in its blocks: in which blocks, at which places of each, and the rows, [blocks, places,
    inputs]. block: outputs of a block; of a gated weight, the first half of each are gates. The last block may have places that
    no row takes."""
    halves = weight.chunk(2) if gated else (weight,)
    unit = block // len(halves)
    for begin, rows in zip(range(0, block, unit), halves, strict=True):
        whole, rest = divmod(len(rows), unit)
        yield slice(0, whole), slice(begin, begin + unit), rows[: whole * unit].view(whole, unit, weight.shape[1])
        if rest:
            yield slice(whole, whole + 1), slice(begin, begin + rest), rows[None, whole * unit :]


def in_blocks(numbers: Tensor | None, block: int, gated: bool) -> Tensor | None:
    """A bias or scale, [outputs], in the order of `pieces`: float32, of whole blocks."""
    if numbers is None:
        return None
    halves = numbers.float().view(1 + gated, -1)
    unit = block // len(halves)
    return F.pad(halves, (0, -halves.shape[1] % unit)).view(len(halves), -1, unit).transpose(0, 1).flatten()
