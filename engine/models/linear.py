"""Linear layers: a weight, perhaps a bias, and their product with the step's tokens; in the model's dtype, packed or not, in FP8,
or (on CPU) in int8: weights with a scale for each output, and tokens that are quantised in every step.

Owns the arithmetic of one layer. Does not know where weights come from, which layer it is, or which product is the fastest
(`engine/cpu/packing.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from engine.cpu.products import LARGEST_WEIGHT, MOST_INPUTS, SIGN, Packed, PackedProduct
from engine.kernels.port import Kernels

Gate = Callable[[Tensor], Tensor]
"""What a gated layer makes of its product, [tokens, 2 * outputs] → [tokens, outputs]: SwiGLU (Shazeer 2020), the gates first."""
_FP8_MULTIPLE = 16


@dataclass(slots=True)
class Linear:
    """weight: [outputs, inputs]. bias: [outputs], or None."""

    weight: Tensor
    bias: Tensor | None
    gate: Gate | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs]; with a gate half as many."""
        out = F.linear(x, self.weight, self.bias)
        return out if self.gate is None else self.gate(out)

    def put(self, rows: slice, weight: Tensor) -> Tensor:
        """Set some outputs. weight: [rows, inputs], any float dtype, on any device. Returns them."""
        return self.weight[rows].copy_(weight)


@dataclass(slots=True)
class PackedLinear:
    """A layer on CPU with the plain weight, a packed one, or both.

    weight: [outputs, inputs]; None: only the packed one is there. bias: [outputs], or None. shared: the weight is used elsewhere
    too, so it stays in memory. packed_rows: for how many rows the packed weight is used; for all others torch's product is, over
    the plain one. product: the one over the packed weight.
    """

    weight: Tensor | None
    bias: Tensor | None
    gate: Gate | None = None
    shared: bool = False
    packed_rows: range = range(0)
    product: PackedProduct | None = None
    packed: Packed | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs]; with a gate half as many."""
        if x.shape[0] in self.packed_rows:  # len() of a tensor takes longer
            assert self.product is not None and self.packed is not None
            return self.product(x, self.packed)
        assert self.weight is not None
        out = F.linear(x, self.weight, self.bias)
        return out if self.gate is None else self.gate(out)

    def put(self, rows: slice, weight: Tensor) -> Tensor:
        """Set some outputs, before anything is packed. weight: [rows, inputs], any float dtype. Returns them."""
        assert self.weight is not None
        return self.weight[rows].copy_(weight)

    def pack(self, product: PackedProduct, packed_rows: range, *, keeps_weight: bool) -> None:
        """Use a packed weight for so many rows. keeps_weight: the plain one stays, for all others."""
        assert self.weight is not None
        self.packed_rows, self.product = packed_rows, product
        self.packed = product.pack(self.weight, self.bias, gated=self.gate is not None)
        if not keeps_weight:
            self.weight = None


@dataclass(slots=True)
class Fp8Linear:
    """FP8 weights with a scale for each output, and tokens that are quantised in every step, with a scale for each. bfloat16 in
    and out. Source: Micikevicius et al. 2022, FP8 formats for deep learning.

    weight: [outputs, inputs] float8_e4m3fn. scale: [1, outputs] float32. bias: [outputs] bfloat16, or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    kernels: Kernels
    gate: Gate | None = None

    @classmethod
    def empty(
        cls, outputs: int, inputs: int, bias: Tensor | None, device: torch.device, kernels: Kernels, gate: Gate | None = None
    ) -> "Fp8Linear":
        """Raises ConfigError for a size that FP8 products do not have."""
        if outputs % _FP8_MULTIPLE or inputs % _FP8_MULTIPLE:
            raise ConfigError(
                f"--quantization fp8 needs layers whose sizes are multiples of {_FP8_MULTIPLE}, but one of this model has "
                f"{inputs} inputs and {outputs} outputs: use --quantization none"
            )
        weight = torch.empty((outputs, inputs), dtype=torch.float8_e4m3fn, device=device)
        return cls(weight, torch.empty((1, outputs), dtype=torch.float32, device=device), bias, kernels, gate)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs]; with a gate half as many."""
        values, scales = self.kernels.quantise(x)
        out = _product(values, scales, self.weight, self.scale, self.bias)
        return out if self.gate is None else self.gate(out)

    def put(self, rows: slice, weight: Tensor) -> Tensor:
        """Set some outputs. weight: [rows, inputs], any float dtype, on any device. Returns it on the layer's device, because FP8
        values do not show what was not finite."""
        given = weight.to(self.weight.device).contiguous()
        values, scales = self.kernels.quantise(given)
        self.weight[rows].copy_(values)
        self.scale[0, rows].copy_(scales[:, 0])
        return given


_BLOCK_ROWS = 4096
"""So many outputs are quantised at a time: it takes memory besides the weight's."""


@dataclass(slots=True)
class Int8Linear:
    """weight: [outputs, inputs] int8, until it is packed; then None. scale: [outputs] float32. bias: [outputs], or None. gated:
    SwiGLU, the gates first."""

    weight: Tensor | None
    scale: Tensor
    bias: Tensor | None
    product: PackedProduct
    kernels: Kernels
    gated: bool = False
    packed: Packed | None = None

    @classmethod
    def empty(
        cls, outputs: int, inputs: int, bias: Tensor | None, product: PackedProduct, kernels: Kernels, *, gated: bool = False
    ) -> "Int8Linear":
        """Raises ConfigError for a layer whose sums would not fit in 32 bits."""
        if inputs > MOST_INPUTS:
            raise ConfigError(
                f"--quantization int8 needs layers of at most {MOST_INPUTS} inputs, but one of this model has {inputs}: use none"
            )
        weight = torch.empty((outputs, inputs), dtype=torch.int8)
        return cls(weight, torch.empty(outputs), bias, product, kernels, gated)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs], of x's dtype; gated: half as many."""
        assert self.packed is not None
        return self.product(x.float(), self.packed).to(x.dtype)

    def put(self, rows: slice, weight: Tensor) -> Tensor:
        """Set some outputs, before it is packed. weight: [rows, inputs], any float dtype. Returns it, because int8 does not show
        what was not finite."""
        assert self.weight is not None
        values, scales = self.weight[rows], self.scale[rows]
        for begin in range(0, len(weight), _BLOCK_ROWS):
            block = slice(begin, begin + _BLOCK_ROWS)
            moved, found = self.kernels.quantise_int8(weight[block], LARGEST_WEIGHT)
            values[block] = moved.bitwise_xor_(SIGN).view(torch.int8)
            scales[block] = found[:, 0]
        return weight

    def pack(self) -> None:
        """After this it computes, and takes no more weights."""
        assert self.weight is not None
        self.packed, self.weight = self.product.pack(self.weight, self.bias, self.scale, gated=self.gated), None


AnyLinear: TypeAlias = Linear | PackedLinear | Fp8Linear | Int8Linear


def check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError where FP8 products cannot be computed. It tries one, because that depends on torch and the card."""
    if dtype != torch.bfloat16:
        asked = str(dtype).removeprefix("torch.")
        raise ConfigError(f"--quantization fp8 computes in bfloat16, not in {asked}: give --dtype bfloat16")
    rows = torch.zeros((_FP8_MULTIPLE, _FP8_MULTIPLE), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones((_FP8_MULTIPLE, 1), dtype=torch.float32, device=device)
    try:
        _product(rows, scales, rows, scales.t(), None)
    except torch.OutOfMemoryError:  # a RuntimeError too
        raise
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--quantization fp8: {device} has no FP8 products here ({reason}): use --quantization none") from error


def _product(values: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return torch._scaled_mm(values, weight.t(), scale_a=scales, scale_b=scale, bias=bias, out_dtype=torch.bfloat16)
