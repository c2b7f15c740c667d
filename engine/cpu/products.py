"""The products with packed weights that linear layers on CPU compute with.

Owns what a packed weight is, how it is packed for each product, and which products work on this processor: those in C
(`panel_product.c` for float32, `int8_product.c` for int8, which quantises the rows, multiplies and scales in one call), and
oneDNN's, by torch's names. Does not know layers, or which product is the fastest (`engine/models/linear.py`), or what the C
computes.

In int8 the product in C is the fastest one wherever it exists, for all numbers of rows, but perhaps where oneDNN has instructions
that multiply whole tiles (AMX). With oneDNN, rows are moved to be positive, which is what processors multiply. One without VNNI
adds two products in 16 bits: they do not fit if rows have 8 bits, so they have 7 there.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError, first_line
from engine.cpu.build import NativeFunction, load, processor_flags
from engine.torch_kernels import Kernels

LARGEST_WEIGHT = 127
"""The largest number of an int8 weight."""
_QUANTISED_ROW_BYTES = 8
"""The memory for a row that is quantised in C, beside its numbers."""
SIGN = 0x80
"""The bit that moves a byte by 128: between numbers with a sign and numbers without one."""


class Packed(NamedTuple):
    """The weight of a layer and what belongs to its outputs, as one product reads them."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    """For each output; None: there is none."""
    outputs: int
    """How many a row gets; half as many as the weight has if the layer is gated."""
    gated: bool


class PackedProduct(Protocol):
    """A product over a weight that is reordered once."""

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        """weight: [outputs, inputs]. bias, scale: [outputs], or None. gated: SwiGLU (Shazeer 2020), the gates first."""

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        """x: [rows, inputs]. Returns [rows, outputs]; of a gated layer silu(gate) * the other half."""

    def ungated(self, x: Tensor, packed: Packed) -> Tensor:
        """As a call, but of a gated layer both halves, the gates first, as they are: [rows, 2 * outputs]."""

    def unpack(self, packed: Packed, outputs: int, inputs: int) -> Tensor:
        """The weight that was packed, [outputs, inputs], in its own dtype and order."""


MISSING = (RuntimeError, AttributeError, NotImplementedError)
"""What a product raises that does not work here. AttributeError: torch does not have the op."""


class OneDnnProduct:
    """Implements `PackedProduct` in the dtype of its weights."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        assert scale is None, "these weights have none"
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return Packed(packed, bias, None, len(weight) // (1 + gated), gated)

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        out = self.ungated(x, packed)
        return self._kernels.silu_and_mul(out) if packed.gated else out

    def ungated(self, x: Tensor, packed: Packed) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed.weight, packed.bias, "none", [], "")
        return out

    def unpack(self, packed: Packed, outputs: int, inputs: int) -> Tensor:
        return packed.weight.to_dense()


class OneDnnInt8Product(OneDnnProduct):
    """Implements `PackedProduct` with int8 weights and float32 rows, which it quantises. largest: the largest number of a
    quantised row."""

    def __init__(self, largest: int, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.largest = largest
        self._zeros: dict[int, Tensor] = {}

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        assert scale is not None
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        return Packed(packed, None if bias is None else bias.float(), scale, len(weight) // (1 + gated), gated)

    def ungated(self, x: Tensor, packed: Packed) -> Tensor:
        assert packed.scale is not None
        outputs = len(packed.scale)
        if outputs not in self._zeros:
            self._zeros[outputs] = torch.zeros(outputs, dtype=torch.int64)
        values, scales = self._kernels.quantise_int8(x, self.largest)
        out: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            values, 1.0, self.largest + 1, packed.weight, packed.scale, self._zeros[outputs], None, 1.0, 0, torch.float32,
            "none", [], "",
        )  # fmt: skip
        out.mul_(scales)
        if packed.bias is not None:
            out.add_(packed.bias)
        return out

    def unpack(self, packed: Packed, outputs: int, inputs: int) -> Tensor:
        return packed.weight.to_dense().t()  # oneDNN keeps these turned


MOST_INPUTS = 2**16
"""A sum of as many products of bytes fits in 32 bits."""
PANEL_SOURCE, INT8_SOURCE = (Path(__file__).with_name(name) for name in ("panel_product.c", "int8_product.c"))
_FIELDS = "x weight scale bias out memory", "rows inputs outputs x_row", "", "gated"
"""The fields of the structure `product_call` in `groups.h`."""
_HALVES = 2
"""There: the layer gives gates and, behind them, what they gate."""


class NativeProduct:
    """Implements `PackedProduct` in C, with float32 rows. function: of the C source. block: outputs of a block. together: inputs
    that are multiplied together: 4 of an int8 weight, which has a scale, and 1 of a float32 weight, which has none."""

    def __init__(self, function: NativeFunction, block: int, together: int) -> None:
        self._function, self._block, self._together = function, block, together

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        """The packed weight: [blocks, inputs / together, block, together], int8 as uint8. Of a gated weight, the first half of
        each block are gates. It is written in place: what a copy between would take stays with the process, and KV pages would
        get less."""
        assert (scale is not None) == (weight.dtype == torch.int8) == (self._together > 1)
        (outputs, inputs), together = weight.shape, self._together
        blocks, groups, even = -(-outputs // self._block), -(-inputs // together), inputs // together
        is_whole = blocks * self._block == outputs and groups == even
        packed = (weight.new_empty if is_whole else weight.new_zeros)(blocks, groups, self._block, together)
        for within, places, rows in self._pieces(weight, gated):
            into = packed[within, :, places]
            into[:, :even] = rows[..., : even * together].view(*rows.shape[:2], even, together).transpose(1, 2)
            if even < groups:
                into[:, -1, :, : inputs % together] = rows[..., even * together :]
        if weight.dtype == torch.int8:
            packed = packed.view(torch.uint8).bitwise_xor_(SIGN)
        return Packed(packed, self._in_blocks(bias, gated), self._in_blocks(scale, gated), outputs // (1 + gated), gated)

    def unpack(self, packed: Packed, outputs: int, inputs: int) -> Tensor:
        together, even = self._together, inputs // self._together
        source = packed.weight if together == 1 else packed.weight.bitwise_xor(SIGN).view(torch.int8)
        weight = source.new_empty(outputs, inputs)
        for within, places, rows in self._pieces(weight, packed.gated):
            taken = source[within, :, places].transpose(1, 2)
            rows[..., : even * together] = taken[:, :, :even].reshape(*rows.shape[:2], even * together)
            if even < source.shape[1]:
                rows[..., even * together :] = taken[:, :, -1, : inputs % together]
        return weight

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        """x: float32. Returns float32."""
        return self._computed(x, packed, packed.outputs, int(packed.gated))

    def ungated(self, x: Tensor, packed: Packed) -> Tensor:
        return self._computed(x, packed, packed.outputs * (1 + packed.gated), _HALVES if packed.gated else 0)

    def _computed(self, x: Tensor, packed: Packed, width: int, layout: int) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, inputs = x.shape
        weight, bias, scale = packed.weight, packed.bias, packed.scale
        groups, together = weight.shape[1], self._together
        assert x.dtype == torch.float32 and -(-inputs // together) == groups, "not the inputs of this weight"
        if together == 1:
            memory = x.new_empty(rows * inputs)
        else:
            memory = x.new_empty(rows * (groups * together + _QUANTISED_ROW_BYTES), dtype=torch.uint8)
        out = x.new_empty(rows, width)
        self._function(x, weight, scale, bias, out, memory, rows, inputs, packed.outputs, x.stride(0), layout)
        return out

    def _pieces(self, weight: Tensor, gated: bool) -> Iterator[tuple[slice, slice, Tensor]]:
        """The rows of a weight that lie alike in its blocks: in which blocks, at which places of each, and the rows, [blocks,
        places, inputs]. The last block may have places that no row takes."""
        halves = weight.chunk(2) if gated else (weight,)
        unit = self._block // len(halves)
        for begin, rows in zip(range(0, self._block, unit), halves, strict=True):
            whole, rest = divmod(len(rows), unit)
            yield slice(0, whole), slice(begin, begin + unit), rows[: whole * unit].view(whole, unit, weight.shape[1])
            if rest:
                yield slice(whole, whole + 1), slice(begin, begin + rest), rows[None, whole * unit :]

    def _in_blocks(self, numbers: Tensor | None, gated: bool) -> Tensor | None:
        """A bias or scale, [outputs], in the order of the packed weight: float32, of whole blocks."""
        if numbers is None:
            return None
        halves = numbers.float().view(1 + gated, -1)
        unit = self._block // len(halves)
        return F.pad(halves, (0, -halves.shape[1] % unit)).view(len(halves), -1, unit).transpose(0, 1).flatten()


@cache
def load_int8_product() -> NativeProduct | None:
    """None where this processor does not multiply bytes, or where C cannot be compiled, which the log tells."""
    library = load(INT8_SOURCE)
    block = 0 if library is None else int(library.int8_block())
    return NativeProduct(NativeFunction(library, "int8_product", *_FIELDS), block, 4) if library is not None and block else None


@cache
def load_panel_product() -> NativeProduct | None:
    """None, and the log says why, where C cannot be compiled."""
    library = load(PANEL_SOURCE)
    if library is None:
        return None
    return NativeProduct(NativeFunction(library, "panel_product", *_FIELDS), int(library.panel_outputs()), 1)


_LARGEST_OF_ROWS = (127, 63)
"""The largest number of a quantised row: with 8 bits, and with 7."""
_TRIED = ((1, 64, 48), (20, 256, 160), (200, 96, 512))
"""Rows, inputs and outputs of the int8 products that are tried: kernels differ."""


def float_products(dtype: torch.dtype, device: torch.device, kernels: Kernels) -> list[PackedProduct]:
    """Those that compute a dtype here."""
    if device.type != "cpu":
        return []
    found: list[PackedProduct] = []
    in_c = load_panel_product() if dtype == torch.float32 else None
    if in_c is not None:
        found.append(in_c)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        product = OneDnnProduct(kernels)
        try:
            product(torch.zeros((2, 16), dtype=dtype), product.pack(torch.zeros((16, 16), dtype=dtype)))
        except MISSING:
            return found
        found.append(product)
    return found


def int8_product(device: torch.device, kernels: Kernels) -> PackedProduct:
    """The product of int8 weights with float32 rows. Raises ConfigError where such products cannot be computed or are wrong."""
    if device.type != "cpu":
        raise ConfigError(f"--quantization int8 computes on CPU, and the device is {device}: use fp8 or none")
    in_c = None if "amx_int8" in processor_flags() else load_int8_product()
    if in_c is not None and is_right(in_c):
        return in_c
    try:
        right = [product for largest in _LARGEST_OF_ROWS if is_right(product := OneDnnInt8Product(largest, kernels))]
    except MISSING as error:
        reason = first_line(error)
        raise ConfigError(f"--quantization int8: torch has no int8 products here ({reason}): use --quantization none") from error
    if not right:
        raise ConfigError("--quantization int8: oneDNN's int8 products are wrong on this processor: use --quantization none")
    return right[0]


def is_right(product: PackedProduct) -> bool:
    """Whether products of the largest numbers with int8 weights are right to the last of them."""
    return all(_is_exact(product, *sizes) for sizes in _TRIED)


def _is_exact(product: PackedProduct, rows: int, inputs: int, outputs: int) -> bool:
    generator = torch.Generator().manual_seed(rows)
    signs, weight_signs = (
        2 * torch.randint(0, 2, shape, generator=generator) - 1 for shape in ((rows, inputs), (outputs, inputs))
    )
    packed = product.pack((LARGEST_WEIGHT * weight_signs).to(torch.int8), scale=torch.ones(outputs))
    return torch.equal(product(signs.float(), packed).round().long(), LARGEST_WEIGHT * (signs @ weight_signs.T))
