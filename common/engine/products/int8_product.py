"""The product of int8 layers in C, for processors that multiply bytes: it quantises the rows, multiplies and scales in one call.

Owns how a weight is packed for it. Does not know what the C computes (`int8_product.c`), or
where oneDNN's product is used (`choice.py`).
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from common.engine.native.build import load
from common.engine.native.function import NativeFunction
from common.engine.products.call import multiply
from common.engine.products.port import SIGN, Packed, in_blocks, pieces

SOURCE = Path(__file__).with_name("int8_product.c")
MOST_INPUTS = 2**16
"""A sum of as many products of bytes fits in 32 bits."""
_TOGETHER = 4
_ROW_BYTES = 8
"""As in the C source: inputs that are multiplied together, and the memory for a row beside its numbers."""


class Int8Product:
    """Implements `PackedProduct`. library: of the C source. block: outputs of a block."""

    def __init__(self, library: ctypes.CDLL, block: int) -> None:
        self._block = block
        self._function = NativeFunction(library, "int8_product")

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        """weight: int8, of at most MOST_INPUTS inputs. The packed one: [blocks, inputs / 4, block, 4] uint8. Written in place:
        what a copy between would take stays with the process, and KV pages would get less."""
        outputs, inputs = weight.shape
        blocks, fours, even = -(-outputs // self._block), -(-inputs // _TOGETHER), inputs // _TOGETHER
        packed = weight.new_zeros(blocks, fours, self._block, _TOGETHER)
        for within, places, rows in pieces(weight, self._block, gated):
            into = packed[within, :, places]
            into[:, :even] = rows[..., : even * _TOGETHER].view(*rows.shape[:2], even, _TOGETHER).transpose(1, 2)
            if even < fours:
                into[:, -1, :, : inputs % _TOGETHER] = rows[..., even * _TOGETHER :]
        moved = packed.view(torch.uint8).bitwise_xor_(SIGN)
        bias, scale = (in_blocks(numbers, self._block, gated) for numbers in (bias, scale))
        return Packed(moved, bias, scale, outputs // (1 + gated), gated)

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        """x: float32. Returns float32."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, inputs = x.shape
        fours = packed.weight.shape[1]
        assert x.dtype == torch.float32 and -(-inputs // _TOGETHER) == fours, "not the inputs of this weight"
        assert packed.scale is not None
        memory = x.new_empty(rows * (fours * _TOGETHER + _ROW_BYTES), dtype=torch.uint8)
        return multiply(self._function, x, packed, memory)


@cache
def load_int8_product() -> Int8Product | None:
    """None where this processor does not multiply bytes, or where C cannot be compiled, which the log tells."""
    library = load(SOURCE)
    block = 0 if library is None else int(library.int8_block())
    return Int8Product(library, block) if library is not None and block else None
