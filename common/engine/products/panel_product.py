"""The product of float32 layers in C, over weights that are packed in panels: for decode steps and chunks on CPU.

Owns how a weight is packed for it. Does not know what the C computes (`panel_product.c`), or
whether it is the fastest product (`models/packing.py`).
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from common.engine.native.build import load
from common.engine.native.function import NativeFunction
from common.engine.products.call import multiply
from common.engine.products.port import Packed, in_blocks, pieces

SOURCE = Path(__file__).with_name("panel_product.c")


class PanelProduct:
    """Implements `PackedProduct`. library: of the C source."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._block = int(library.panel_outputs())
        self._function = NativeFunction(library, "panel_product")

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        """The packed weight: [blocks, inputs, outputs of a block] float32."""
        assert scale is None, "these weights have none"
        outputs, inputs = weight.shape
        blocks = -(-outputs // self._block)
        make = weight.new_empty if blocks * self._block == outputs else weight.new_zeros
        packed = make(blocks, inputs, self._block)
        for within, places, rows in pieces(weight, self._block, gated):
            packed[within, :, places].copy_(rows.transpose(1, 2))
        return Packed(packed, in_blocks(bias, self._block, gated), None, outputs // (1 + gated), gated)

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, inputs = x.shape
        assert x.dtype == torch.float32 and inputs == packed.weight.shape[1], "not the inputs of this weight"
        return multiply(self._function, x, packed, x.new_empty(rows * inputs))


@cache
def load_panel_product() -> PanelProduct | None:
    """None, and the log says why, where C cannot be compiled."""
    library = load(SOURCE)
    return None if library is None else PanelProduct(library)
