"""FP8 layers: against float64 on the same quantised numbers, and within the bound that the format gives on the exact ones."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.linear import Fp8Linear, check_fp8
from engine.ports import Fp8Rows
from engine.torch_kernels import Kernels
from tests.engine.graph_recorder import RecordedGraphs
from tests.engine.kernels.contract import exact_fp8

CPU = torch.device("cpu")
HALF_STEP = 2.0**-4
"""The rounding of a number with three binary places after the first, as a share of it."""
SMALL_HALF_STEP = 2.0**-10
"""The rounding below 2^-6, times the scale."""


def why_not_on_cpu() -> str:
    """Not every version of torch multiplies FP8 rows on CPU."""
    try:
        check_fp8(torch.bfloat16, CPU)
    except ConfigError as error:
        return str(error)
    return ""


needs_fp8_on_cpu = pytest.mark.skipif(why_not_on_cpu() != "", reason=why_not_on_cpu())


def layer(weight: Tensor, bias: Tensor | None) -> Fp8Linear:
    made = Fp8Linear.empty(len(weight), weight.shape[1], bias, CPU, Kernels())
    made.put(slice(0, 16), weight[:16])
    made.put(slice(16, None), weight[16:])
    return made


def quantised(x: Tensor | Fp8Rows) -> Tensor:
    """What the definition makes of each row, in float64; of rows that are quantised already, what they are."""
    if isinstance(x, Fp8Rows):
        return x.values.double() * x.scales
    scale = (x.float().abs().amax(-1, keepdim=True) * torch.tensor(1 / 448)).double()
    return torch.from_numpy(exact_fp8((x.float() / scale.float()).numpy())) * scale


@needs_fp8_on_cpu
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_that_of_its_definition_and_near_the_exact_one(with_bias: bool) -> None:
    torch.manual_seed(4)
    weight = torch.randn(48, 320, dtype=torch.bfloat16) * torch.logspace(-3, 3, 48)[:, None]
    bias = torch.randn(48, dtype=torch.bfloat16) if with_bias else None
    x = (torch.randn(37, 320) ** 3).bfloat16()
    out = layer(weight, bias)(x).double()
    assert out.shape == (37, 48)
    added = torch.zeros(48, dtype=torch.float64) if bias is None else bias.double()
    weight8, x8 = quantised(weight), quantised(x)
    size = x8.abs() @ weight8.abs().T + added.abs()
    defined = x8 @ weight8.T + added
    assert ((out - defined).abs() <= 2**-8 * defined.abs() + 1e-5 * size).all(), "one rounding to bfloat16, and float32 sums"

    def error(exact: Tensor) -> Tensor:
        return HALF_STEP * exact.abs() + SMALL_HALF_STEP * exact.abs().amax(-1, keepdim=True) / 448

    exact_x, exact_weight = x.double(), weight.double()
    bound = exact_x.abs() @ error(exact_weight).T + error(exact_x) @ exact_weight.abs().T + error(exact_x) @ error(exact_weight).T
    exact = exact_x @ exact_weight.T + added
    assert ((defined - exact).abs() <= bound).all()
    assert ((defined - exact).abs() > 0.01 * bound).any(), "the bound is no wider than it must be by far"


@needs_fp8_on_cpu
def test_an_fp8_product_in_a_graph_follows_its_input() -> None:
    made = layer(torch.randn(48, 64), bias=torch.ones(48, dtype=torch.bfloat16))
    x, out = torch.randn(5, 64).bfloat16(), torch.empty(5, 48, dtype=torch.bfloat16)

    def run() -> None:
        out.copy_(made(x))

    replay = RecordedGraphs().capture(run)
    for _ in range(2):
        x.normal_()
        replay()
        assert torch.equal(out, made(x))


def test_fp8_is_refused_where_it_cannot_be_computed() -> None:
    with pytest.raises(ConfigError, match="one of this model has 40 inputs and 64 outputs: use --quantization none"):
        Fp8Linear.empty(64, 40, None, CPU, Kernels())
    with pytest.raises(ConfigError, match="not in float32: give --dtype bfloat16"):
        check_fp8(torch.float32, CPU)
    message = "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0\nand more"
    with (
        mock.patch("torch._scaled_mm", side_effect=RuntimeError(message)),
        pytest.raises(ConfigError, match=r"cpu has no FP8 products here \(torch._scaled_mm is only .* >= 9.0\): use"),
    ):
        check_fp8(torch.bfloat16, CPU)
