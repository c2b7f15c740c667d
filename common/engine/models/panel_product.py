"""The product of float32 layers in C, over weights that are packed in panels: for decode steps and chunks on CPU.

Owns how a weight is packed for it, and how a call becomes pointers and counts. Does not know what the C computes
(`panel_product.c`), or whether it is the fastest product (`packing.py`). Implements `PackedProduct`.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.native.build import load

SOURCE = Path(__file__).with_name("panel_product.c")


class PanelProduct:
    """library: of the C source."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._panel = int(library.panel_outputs())
        self._function = library["panel_product"]
        self._function.argtypes = [*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 4, ctypes.c_int]
        self._function.restype = None

    def packed(self, weight: Tensor) -> Tensor:
        """weight: [outputs, inputs] float32. Returns [panels, inputs, outputs of a panel]."""
        outputs, inputs = weight.shape
        panels = -(-outputs // self._panel)
        packed = (
            weight.new_zeros(panels, inputs, self._panel)
            if outputs % self._panel
            else weight.new_empty(panels, inputs, self._panel)
        )
        whole = outputs // self._panel
        packed[:whole].copy_(weight[: whole * self._panel].view(whole, self._panel, inputs).transpose(1, 2))
        if whole < panels:
            packed[whole, :, : outputs - whole * self._panel].copy_(weight[whole * self._panel :].T)
        return packed

    def of_outputs(self, bias: Tensor) -> Tensor:
        return F.pad(bias, (0, -len(bias) % self._panel))

    def __call__(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, inputs = x.shape
        assert x.dtype == torch.float32 and inputs == packed.shape[1], "not the inputs of this weight"
        out, memory = x.new_empty(rows, outputs), x.new_empty(rows * inputs)
        self._function(
            x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), memory.data_ptr(),
            rows, inputs, outputs, x.stride(0), torch.get_num_threads(),
        )  # fmt: skip
        return out


@cache
def load_panel_product() -> PanelProduct | None:
    """None, and the log says why, where C cannot be compiled."""
    library = load(SOURCE)
    return None if library is None else PanelProduct(library)
