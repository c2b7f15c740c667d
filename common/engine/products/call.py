"""The call of a product in C.

Owns the structure `product_call` of `groups.h`, which products over packed weights share. Does not know what they compute.
"""

import ctypes

from torch import Tensor

from common.engine.native.function import NativeFunction
from common.engine.products.port import Packed


class _ProductCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scale", "bias", "out", "memory")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "x_row")),
        ("gated", ctypes.c_int),
    )


def multiply(function: NativeFunction, x: Tensor, packed: Packed, memory: Tensor) -> Tensor:
    """x: [rows, inputs] float32, a row's inputs in one run. memory: for the packed rows. Returns [rows, outputs] float32."""
    rows, inputs = x.shape
    weight, bias, scale, outputs, gated = packed
    out = x.new_empty(rows, outputs)
    call = _ProductCall(
        x.data_ptr(), weight.data_ptr(), None if scale is None else scale.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), memory.data_ptr(), rows, inputs, outputs, x.stride(0), gated,
    )  # fmt: skip
    function(call)
    return out
