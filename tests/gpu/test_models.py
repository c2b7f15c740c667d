"""Models on a card: experts in grouped products, eager and as a graph, and a model that runs through transformers.

FP8 layers: their products at the shapes of real models, against the same products on the numbers that they round.
"""

from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from engine.backends import make_kernels
from engine.models.linear import Fp8Linear, check_fp8
from engine.models.moe import MixtureOfExperts, grouped, one_by_one
from tests.engine.checkpoints import prompts_of, qwen3_moe, saved
from tests.engine.exact import answers, assert_exact, runner
from tests.engine.models.test_transformers_model import gemma2

CUDA = torch.device("cuda:0")
PROMPTS = prompts_of(1, 30, 120)


def mixture(experts: int, hidden: int, inner: int, chosen: int) -> MixtureOfExperts:
    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=CUDA, dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

    return MixtureOfExperts(
        router=weight(experts, hidden),
        gate_up=weight(experts, 2 * inner, hidden),
        down=weight(experts, hidden, inner),
        chosen=chosen,
        normalised=True,
        products=grouped,
        kernels=make_kernels(CUDA),
    )


@pytest.mark.parametrize(("experts", "hidden", "inner", "chosen"), [(8, 4096, 14336, 2), (128, 2048, 768, 8)])
@torch.inference_mode()
def test_grouped_products_at_real_shapes_are_those_of_the_loop_and_can_be_a_graph(
    experts: int, hidden: int, inner: int, chosen: int
) -> None:
    if torch.cuda.get_device_capability(CUDA)[0] not in (9, 10):
        pytest.skip("grouped products are for compute capability 9.x and 10.x")
    ours = mixture(experts, hidden, inner, chosen)
    for tokens in (1, 8, 256, 3001):
        x = torch.randn(tokens, hidden, device=CUDA, dtype=torch.bfloat16)
        ours.products = grouped
        out = ours(x)
        ours.products = one_by_one
        expected = ours(x)
        assert (out - expected).norm() < 0.02 * expected.norm()
    ours.products = grouped
    x, graph = torch.randn(32, hidden, device=CUDA, dtype=torch.bfloat16), torch.cuda.CUDAGraph()
    ours(x)
    with torch.cuda.graph(graph):
        out = ours(x)
    for _ in range(5):
        x.normal_()  # other tokens choose other experts
        graph.replay()
        expected = ours(x)
        assert (out - expected).norm() < 0.02 * expected.norm()


def test_experts_one_by_one_answer_as_transformers_does(tmp_path: Path) -> None:
    model = qwen3_moe(norm_topk_prob=True)
    said: list[str] = []
    made = runner(saved(model, tmp_path), said.append, device="cuda", dtype="float32", attention="torch")
    assert_exact(model, answers(made, PROMPTS, 6, chunk_tokens=64))
    assert any("decode steps cannot be CUDA graphs: grouped products are for bfloat16" in line for line in said)


def test_a_model_that_runs_through_transformers_answers_as_it_does(tmp_path: Path) -> None:
    model = gemma2()
    made = runner(saved(model, tmp_path), device="cuda", dtype="float32", attention="torch", page_size=8)
    assert_exact(model, answers(made, PROMPTS, 6, chunk_tokens=37))


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
