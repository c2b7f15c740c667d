"""Which products with packed weights work on this processor.

Owns the trials. Does not know layers, or which product is the fastest in a dtype of floats (`models/packing.py`).

In int8 the product in C is the fastest one wherever it exists, for all numbers of rows, but perhaps where oneDNN has instructions
that multiply whole tiles (AMX). With oneDNN, rows are moved to be positive, which is what processors multiply. One without VNNI
adds two products in 16 bits: they do not fit if rows have 8 bits, so they have 7 there.

The port of products with packed weights, which linear layers on CPU compute with.

Owns what a packed weight is, and the order of outputs that the products in C share. Does not know layers (`models/linear.py`,
`models/int8.py`) or which product is the fastest (`models/packing.py`).

The call of a product in C.

Owns the structure `product_call` of `groups.h`, which products over packed weights share. Does not know what they compute.

oneDNN's products with packed weights, through torch: in the model's dtype, and in int8.

Owns torch's names for them. Does not know which of them works here (`choice.py`).

The product of int8 layers in C, for processors that multiply bytes: it quantises the rows, multiplies and scales in one call.

Owns how a weight is packed for it. Does not know what the C computes (`int8_product.c`), or
where oneDNN's product is used (`choice.py`).

The product of float32 layers in C, over weights that are packed in panels: for decode steps and chunks on CPU.

Owns how a weight is packed for it. Does not know what the C computes (`panel_product.c`), or
whether it is the fastest product (`models/packing.py`).

Which product the linear layers of a model on CPU use for how many rows: torch's over plain weights, or one over packed ones.

Owns the measurement at start, the memory that second copies may take, and the order of packing: layer by layer, so that beyond
second copies no more than one weight is in memory twice. Knows layers by their shapes only.

Which product is the fastest one depends on the processor and on the rows. For the few rows of decode steps torch's own is the
slowest nearly everywhere, and the one in C (`panel_product.c`) is as fast as the memory. For the many rows of a chunk
all are about equal on some processors, and one is clearly faster or slower on others. So the products over packed weights
compete, and each layer has the plain weight, one that is packed for the fastest of them, or, where that is clearly faster and
memory allows, both.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from engine.cpu.build import NativeFunction, load, processor_flags
from engine.ports import Kernels

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
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed.weight, packed.bias, "none", [], "")
        return self._kernels.silu_and_mul(out) if packed.gated else out


class OneDnnInt8Product:
    """Implements `PackedProduct` with int8 weights and float32 rows, which it quantises. largest: the largest number of a
    quantised row."""

    def __init__(self, largest: int, kernels: Kernels) -> None:
        self.largest = largest
        self._kernels = kernels
        self._zeros: dict[int, Tensor] = {}

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        assert scale is not None
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        return Packed(packed, None if bias is None else bias.float(), scale, len(weight) // (1 + gated), gated)

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
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
        return self._kernels.silu_and_mul(out) if packed.gated else out


INT8_SOURCE = Path(__file__).with_name("int8_product.c")
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
    library = load(INT8_SOURCE)
    block = 0 if library is None else int(library.int8_block())
    return Int8Product(library, block) if library is not None and block else None


PANEL_SOURCE = Path(__file__).with_name("panel_product.c")


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
    library = load(PANEL_SOURCE)
    return None if library is None else PanelProduct(library)


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
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--quantization int8: torch has no int8 products here ({reason}): use --quantization none") from error
    if not right:
        raise ConfigError("--quantization int8: oneDNN's int8 products are wrong on this processor: use --quantization none")
    return right[0]


def is_right(product: PackedProduct) -> bool:
    """Of int8 weights: whether products of the largest numbers are right to the last of them."""
    return all(_is_exact(product, *sizes) for sizes in _TRIED)


def _is_exact(product: PackedProduct, rows: int, inputs: int, outputs: int) -> bool:
    generator = torch.Generator().manual_seed(rows)
    signs, weight_signs = (
        2 * torch.randint(0, 2, shape, generator=generator) - 1 for shape in ((rows, inputs), (outputs, inputs))
    )
    packed = product.pack((LARGEST_WEIGHT * weight_signs).to(torch.int8), scale=torch.ones(outputs))
    return torch.equal(product(signs.float(), packed).round().long(), LARGEST_WEIGHT * (signs @ weight_signs.T))
