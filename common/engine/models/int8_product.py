"""The product of int8 layers in C, for processors that multiply bytes: it quantises the rows, multiplies and scales in one call.

Owns how a weight is packed for it, and how a call becomes pointers and counts. Does not know what the C computes
(`int8_product.c`), or where oneDNN's product is used (`int8.py`).
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.native.build import load

SOURCE = Path(__file__).with_name("int8_product.c")
MOST_INPUTS = 2**16
"""A sum of as many products of bytes fits in 32 bits."""
_TOGETHER = 4
_ROW_BYTES = 8
"""As in the C source: inputs that are multiplied together, and the memory for a row beside its numbers."""
_SIGN = 0x80
"""The bit that moves a byte by 128."""


class Int8Product:
    """library: of the C source. block: outputs of a block."""

    def __init__(self, library: ctypes.CDLL, block: int) -> None:
        self._block = block
        self._function = library["int8_product"]
        self._function.argtypes = [*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 4, ctypes.c_int]
        self._function.restype = None

    def packed(self, weight: Tensor) -> Tensor:
        """weight: [outputs, inputs] int8, at most MOST_INPUTS inputs. Returns [blocks, inputs / 4, block, 4] uint8. Written in
        place: what a copy between would take stays with the process, and KV pages would get less."""
        outputs, inputs = weight.shape
        blocks, fours = -(-outputs // self._block), -(-inputs // _TOGETHER)
        packed = weight.new_zeros(blocks, fours, self._block, _TOGETHER)
        for first, last in ((0, outputs // self._block), (outputs // self._block, blocks)):
            rows = weight[first * self._block : last * self._block]
            count = self._block if len(rows) % self._block == 0 else len(rows)
            even = inputs // _TOGETHER * _TOGETHER
            into, parts = packed[first:last, :, :count], last - first
            into[:, : even // _TOGETHER] = rows[:, :even].view(parts, count, even // _TOGETHER, _TOGETHER).transpose(1, 2)
            if even < inputs:
                into[:, -1, :, : inputs - even] = rows[:, even:].view(parts, count, inputs - even)
        return packed.view(torch.uint8).bitwise_xor_(_SIGN)

    def of_outputs(self, numbers: Tensor) -> Tensor:
        """A scale or a bias, [outputs], as the product reads it: float32, of whole blocks."""
        return F.pad(numbers.float(), (0, -len(numbers) % self._block))

    def __call__(self, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """x: [rows, inputs] float32. packed: of `packed`. scale, bias: of `of_outputs`. Returns [rows, outputs] float32."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, inputs = x.shape
        assert x.dtype == torch.float32 and -(-inputs // _TOGETHER) == packed.shape[1], "not the inputs of this weight"
        out = x.new_empty(rows, outputs)
        memory = x.new_empty(rows * (packed.shape[1] * _TOGETHER + _ROW_BYTES), dtype=torch.uint8)
        self._function(
            x.data_ptr(), packed.data_ptr(), scale.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            memory.data_ptr(), rows, inputs, outputs, x.stride(0), torch.get_num_threads(),
        )  # fmt: skip
        return out


@cache
def load_int8_product() -> Int8Product | None:
    """None where this processor does not multiply bytes, or where C cannot be compiled, which the log tells."""
    library = load(SOURCE)
    block = 0 if library is None else int(library.int8_block())
    return Int8Product(library, block) if library is not None and block else None
