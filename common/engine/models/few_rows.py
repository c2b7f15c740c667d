"""The product of a plain float32 weight with a few rows, in C: for decode steps on CPU.

Owns how a call becomes pointers and counts. Does not know what the C computes (`few_rows.c`) or whether it is the fastest product
(`packing.py`).
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from common.engine.native.build import load

SOURCE = Path(__file__).with_name("few_rows.c")
MOST_ROWS = 64
"""As in the C source."""
_MULTIPLES = 4, 16
"""Of outputs and inputs: what every processor's code needs, or more."""


class FewRows:
    """library: of the C source."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library["few_rows"]
        self._function.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 4, ctypes.c_int]
        self._function.restype = ctypes.c_int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x: [rows, inputs] float32, at most MOST_ROWS rows. weight: [outputs, inputs], that `fits`. bias: [outputs], or None.
        Returns [rows, outputs]."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, inputs = x.shape
        outputs = weight.shape[0]
        out = x.new_empty(rows, outputs)
        status = self._function(
            x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            rows, inputs, outputs, x.stride(0), torch.get_num_threads(),
        )  # fmt: skip
        assert status == 0, "the C refuses these shapes"
        return out


def fits(weight: Tensor) -> bool:
    """Whether there is code for this weight, [outputs, inputs]."""
    of_outputs, of_inputs = _MULTIPLES
    is_even = weight.shape[0] % of_outputs == 0 and weight.shape[1] % of_inputs == 0
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous() and is_even


@cache
def load_few_rows() -> FewRows | None:
    """None, and the log says why, where C cannot be compiled."""
    library = load(SOURCE)
    return None if library is None else FewRows(library)
