"""Products of int8 weights: which one is chosen, and what the one in C promises beyond the definition (`models/test_int8.py`)."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from engine.cpu import products
from engine.cpu.products import MOST_INPUTS, OneDnnInt8Product, Packed, PackedProduct, int8_product, load_int8_product
from engine.models.linear import Int8Linear
from tests.engine.cpu.here import CPU, KERNELS, SIZES, int8_products, numbers_of_threads

PRODUCTS = int8_products()
needs_c = pytest.mark.skipif(
    load_int8_product() is None, reason="this processor does not multiply bytes, or there is no C compiler"
)


def packed_of(weight: Tensor, bias: Tensor | None, product: PackedProduct, *, gated: bool = False) -> Packed:
    made = Int8Linear.empty(len(weight), weight.shape[1], bias, product, KERNELS, gated=gated)
    made.put(slice(None), weight)
    made.pack()
    assert made.packed is not None
    return made.packed


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("width", [1, 16, 40, 257])
def test_a_gated_layer_is_the_gate_of_the_plain_one(product: PackedProduct, width: int) -> None:
    torch.manual_seed(width)
    weight, bias, x = torch.randn(2 * width, 70), torch.randn(2 * width), torch.randn(20, 70)
    gates, ups = product(x, packed_of(weight, bias, product)).double().chunk(2, -1)
    out = product(x, packed_of(weight, bias, product, gated=True))
    assert out.shape == (20, width)
    assert torch.allclose(out.double(), F.silu(gates) * ups, rtol=2e-6, atol=1e-6)


@needs_c
@pytest.mark.parametrize(("outputs", "inputs", "gated"), SIZES)
def test_the_product_in_c_depends_on_no_other_row_and_no_number_of_threads(outputs: int, inputs: int, gated: bool) -> None:
    product = load_int8_product()
    assert product is not None
    torch.manual_seed(inputs)
    packed = packed_of(torch.randn(outputs, inputs), torch.randn(outputs), product, gated=gated)
    wide = torch.full((40, inputs + 3), torch.inf)
    wide[:, :inputs] = torch.randn(40, inputs)
    wide[7, inputs // 2], wide[6, 0], wide[9] = torch.nan, torch.inf, 0.0
    alone = torch.cat([product(wide[row : row + 1, :inputs].contiguous(), packed) for row in range(40)])
    assert alone[6:8].isnan().all() and alone[[*range(6), *range(8, 40)]].isfinite().all()
    with numbers_of_threads() as each:
        for _ in each:
            for rows in range(41):  # which are not next to each other
                assert torch.equal(product(wide[:rows, :inputs], packed)[:6], alone[: min(rows, 6)])
                assert torch.equal(product(wide[8:rows, :inputs], packed), alone[8:rows])
            assert torch.equal(product(wide[10:, :inputs].T.contiguous().T, packed), alone[10:])


def test_the_product_is_the_one_in_c_but_where_there_is_none_or_tiles_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    class InC(OneDnnInt8Product):
        """Stands for the one in C on processors that have none."""

    if not any(isinstance(product, OneDnnInt8Product) for product in PRODUCTS):
        pytest.skip("oneDNN has no int8 products here")
    in_c = InC(63, KERNELS)
    for found, flags, expected in (
        (in_c, "avx512_vnni", InC),
        (in_c, "avx512_vnni amx_int8", OneDnnInt8Product),
        (None, "", OneDnnInt8Product),
    ):
        monkeypatch.setattr(products, "load_int8_product", lambda found=found: found)
        monkeypatch.setattr(products, "processor_flags", lambda flags=flags: flags)
        assert type(int8_product(CPU, KERNELS)) is expected
    monkeypatch.setattr(products, "load_int8_product", lambda: in_c)
    monkeypatch.setattr(products, "processor_flags", lambda: "")
    right = OneDnnInt8Product.__call__
    monkeypatch.setattr(InC, "__call__", lambda self, *given: right(self, *given) + 1)
    assert type(int8_product(CPU, KERNELS)) is OneDnnInt8Product, "a product that is wrong is not used"


def test_int8_is_refused_where_it_cannot_be_computed_or_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--quantization int8 computes on CPU, and the device is cuda: use fp8 or none"):
        int8_product(torch.device("cuda"), KERNELS)
    if PRODUCTS:
        with pytest.raises(
            ConfigError, match=f"layers of at most {MOST_INPUTS} inputs, but one of this model has {MOST_INPUTS + 1}"
        ):
            Int8Linear.empty(4, MOST_INPUTS + 1, None, PRODUCTS[0], KERNELS)
    monkeypatch.setattr(products, "load_int8_product", lambda: None)
    right = OneDnnInt8Product.__call__

    def saturating(self: OneDnnInt8Product, *given: Any) -> Tensor:
        """Sums of two products that do not fit into 16 bits are wrong, as on processors without VNNI."""
        out = right(self, *given)
        return out if 2 * 127 * (2 * self.largest + 1) < 2**15 else out - 1

    def refusing(*_: object) -> Tensor:
        raise RuntimeError("could not create a primitive\nand more")

    if any(isinstance(product, OneDnnInt8Product) for product in PRODUCTS):
        monkeypatch.setattr(OneDnnInt8Product, "__call__", saturating)
        product = int8_product(CPU, KERNELS)
        assert isinstance(product, OneDnnInt8Product) and product.largest == 63
        monkeypatch.setattr(OneDnnInt8Product, "__call__", lambda self, *given: right(self, *given) + 1)
        with pytest.raises(ConfigError, match="int8 products are wrong on this processor: use --quantization none"):
            int8_product(CPU, KERNELS)
    monkeypatch.setattr(OneDnnInt8Product, "__call__", refusing)
    with pytest.raises(ConfigError, match=r"no int8 products here \(.+\): use --quantization none"):
        int8_product(CPU, KERNELS)


@needs_c
def test_to_pack_a_weight_in_c_takes_no_memory_but_its_own() -> None:
    product = load_int8_product()
    assert product is not None
    weight, taken = torch.ones(4096, 1024, dtype=torch.int8), list[int]()
    with torch.profiler.profile(profile_memory=True) as profile:
        product.pack(weight, scale=torch.ones(4096))
    for event in profile.events():
        taken.append(event.self_cpu_memory_usage)
    assert sum(bytes_ for bytes_ in taken if bytes_ > 0) < 1.1 * weight.nbytes
