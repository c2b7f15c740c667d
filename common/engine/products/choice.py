"""Which products with packed weights work on this processor.

Owns the trials. Does not know layers, or which product is the fastest in a dtype of floats (`models/packing.py`).

In int8 the product in C is the fastest one wherever it exists, for all numbers of rows, but perhaps where oneDNN has instructions
that multiply whole tiles (AMX). With oneDNN, rows are moved to be positive, which is what processors multiply. One without VNNI
adds two products in 16 bits: they do not fit if rows have 8 bits, so they have 7 there.
"""

import torch

from common.engine.kernels.port import Kernels
from common.engine.native.build import processor_flags
from common.engine.products.int8_product import load_int8_product
from common.engine.products.onednn import MISSING, OneDnnInt8Product, OneDnnProduct
from common.engine.products.panel_product import load_panel_product
from common.engine.products.port import LARGEST_WEIGHT, PackedProduct
from common.errors import ConfigError

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
