"""FP8 layers on a card: their products at the shapes of real models, against the same products on the numbers that they round."""

import pytest
import torch

from common.errors import ConfigError
from engine.backends import make_kernels
from engine.models.linear import Fp8Linear, check_fp8

CUDA = torch.device("cuda", 0)


def layer(outputs: int, inputs: int, *, bias: bool) -> Fp8Linear:
    try:
        check_fp8(torch.bfloat16, CUDA)
    except ConfigError as error:
        pytest.skip(str(error))
    added = torch.randn(outputs, dtype=torch.bfloat16, device=CUDA) if bias else None
    made = Fp8Linear.empty(outputs, inputs, added, CUDA, make_kernels(CUDA))
    made.put(slice(0, outputs), torch.randn(outputs, inputs, dtype=torch.bfloat16))
    return made


@pytest.mark.parametrize("tokens", [1, 7, 256, 2049])
@pytest.mark.parametrize(
    ("outputs", "inputs", "bias"), [(6144, 4096, False), (4608, 3584, True), (2048, 1024, False), (4096, 14336, False)]
)
def test_products_are_those_of_the_rounded_numbers(tokens: int, outputs: int, inputs: int, bias: bool) -> None:
    made = layer(outputs, inputs, bias=bias)
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=CUDA)
    values, scales = made.kernels.quantise(x)
    weight = made.weight.double() * made.scale.double().T
    exact = (values.double() * scales.double()) @ weight.T
    if made.bias is not None:
        exact += made.bias.double()
    out = made(x).double()
    assert float((out - exact).norm() / exact.norm()) < 2**-8 + 1e-3, "one rounding, and the sums of tensor cores"


def test_a_captured_product_follows_its_input() -> None:
    made = layer(4096, 4096, bias=True)
    x = torch.randn(8, 4096, dtype=torch.bfloat16, device=CUDA)
    made(x)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made(x)
    x.normal_()
    graph.replay()
    assert torch.equal(out, made(x))
