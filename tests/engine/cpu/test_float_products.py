"""Products in the model's dtype against float64, of plain and of gated layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu.products import NativeProduct, OneDnnProduct, PackedProduct, float_products, load_panel_product
from engine.models.linear import PackedLinear
from tests.engine.cpu.here import CPU, KERNELS, SIZES, numbers_of_threads

PRODUCTS = {dtype: float_products(dtype, CPU, KERNELS) for dtype in (torch.float32, torch.bfloat16)}


def gate(out: Tensor) -> Tensor:
    """By its definition."""
    gates, ups = out.chunk(2, -1)
    return F.silu(gates) * ups


@pytest.mark.parametrize(
    ("product", "dtype", "rounding"),
    [
        pytest.param(product, dtype, rounding, id=f"{type(product).__name__}-{dtype}")
        for dtype, rounding in ((torch.float32, 2**-18), (torch.bfloat16, 2**-8))
        for product in PRODUCTS[dtype]
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_packed_layer_computes_what_a_plain_one_does(
    product: PackedProduct, dtype: torch.dtype, rounding: float, with_bias: bool, gated: bool
) -> None:
    torch.manual_seed(5)
    weight, bias = torch.randn(48, 130).to(dtype) / 4, torch.randn(48).to(dtype) if with_bias else None
    gate_of_plain = KERNELS.silu_and_mul if gated else None
    made = PackedLinear(weight, bias, gate_of_plain)
    made.pack(product, range(1, 9), keeps_weight=True)
    packed_alone = PackedLinear(weight, bias, gate_of_plain)
    packed_alone.pack(product, range(10**9), keeps_weight=False)
    for rows in (0, 1, 8, 9, 300):
        x = torch.randn(130, rows).to(dtype).T  # its rows are not contiguous
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        most = float(exact.abs().amax()) + 1 if gated and rows else 1.0  # what an error of one half is multiplied by
        exact = gate(exact) if gated else exact
        for one in (made, packed_alone):
            out = one(x)
            assert out.dtype == dtype and out.shape == exact.shape
            assert torch.allclose(out.double(), exact, rtol=(4 if gated else 1) * rounding, atol=130 * rounding / 32 * most)


@pytest.mark.parametrize(("outputs", "inputs", "gated"), SIZES)
def test_a_row_in_c_depends_on_no_other_row_and_no_number_of_threads(outputs: int, inputs: int, gated: bool) -> None:
    product = load_panel_product()
    if product is None:
        pytest.skip("there is no C compiler")
    torch.manual_seed(inputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    packed = product.pack(weight, bias, gated=gated)
    wide = torch.full((40, inputs + 3), torch.nan)
    wide[:, :inputs] = torch.randn(40, inputs)
    exact = wide[:, :inputs].double() @ weight.double().T + bias
    most = float(exact.abs().amax()) if gated else 1.0
    alone = torch.cat([product(wide[row : row + 1, :inputs].contiguous(), packed) for row in range(40)])
    assert torch.allclose(alone.double(), gate(exact) if gated else exact, rtol=1e-5, atol=1e-5 * inputs**0.5 * most)
    with numbers_of_threads() as each:
        for _ in each:
            for rows in range(41):
                assert torch.equal(product(wide[:rows, :inputs], packed), alone[:rows])  # its rows are not next to each other
            assert torch.equal(product(wide[:, :inputs].T.contiguous().T, packed), alone)


@pytest.mark.skipif(load_panel_product() is None, reason="there is no C compiler")
def test_a_gate_in_c_is_right_where_exponents_end() -> None:
    product = load_panel_product()
    assert product is not None
    gates = torch.tensor([-3e38, -200.0, -126.0, -88.0, -87.0, -20.0, -1.0, -1e-30, 0.0, 1e-30, 1.0, 20.0, 88.0, 126.0, 3e38])
    weight = torch.cat([gates, torch.ones(len(gates))])[:, None]
    out = product(torch.ones(1, 1), product.pack(weight, gated=True))[0]
    assert torch.allclose(out, F.silu(gates.double()).float(), rtol=1e-6, atol=1e-35)
    lost = product(torch.tensor([[torch.nan]]), product.pack(weight, gated=True))
    assert lost.isnan().all()


def test_what_computes_a_dtype_here_is_found_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float_products(torch.float32, torch.device("cuda"), KERNELS) == float_products(torch.float64, CPU, KERNELS) == []
    assert not any(isinstance(product, NativeProduct) for product in PRODUCTS[torch.bfloat16])
    assert any(isinstance(product, NativeProduct) for product in PRODUCTS[torch.float32]) == (load_panel_product() is not None)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not any(isinstance(product, OneDnnProduct) for product in float_products(torch.float32, CPU, KERNELS))
