"""The products with packed weights that compute on this processor, and the threads they are tried on."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from engine.backends import make_kernels
from engine.cpu.products import MISSING, OneDnnInt8Product, PackedProduct, is_right, load_int8_product

CPU = torch.device("cpu")
KERNELS = make_kernels(CPU)
SIZES = [
    *((outputs, inputs, False) for outputs, inputs in ((1, 1), (33, 62), (32, 64), (80, 320), (515, 130))),
    *((outputs, inputs, True) for outputs, inputs in ((2, 1), (34, 62), (32, 64), (80, 320), (514, 130))),
]
"""Outputs, inputs and whether the layer is gated: blocks that are full and not, also in each half."""


def int8_products() -> list[PackedProduct]:
    """Those that are right: the one in C, and oneDNN's with rows of 8 and of 7 bits."""
    in_c = load_int8_product()
    found: list[PackedProduct] = [] if in_c is None else [in_c]
    with suppress(*MISSING):
        found += [product for largest in (127, 63) if is_right(product := OneDnnInt8Product(largest, KERNELS))]
    return found


def largest_of(product: PackedProduct) -> int:
    """The largest number of a row that it quantises."""
    return product.largest if isinstance(product, OneDnnInt8Product) else 127


@contextmanager
def numbers_of_threads() -> Iterator[Iterator[int]]:
    """Sets each in turn. The number is restored at the end."""

    def each() -> Iterator[int]:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            yield count

    before = torch.get_num_threads()
    try:
        yield each()
    finally:
        torch.set_num_threads(before)
