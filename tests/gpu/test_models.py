"""Models on a card: experts in grouped products, eager and as a graph, and a model that runs through transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.backends import make_kernels
from engine.models.moe import MixtureOfExperts, grouped, one_by_one
from tests.engine.checkpoints import VOCAB, qwen3_moe, saved
from tests.engine.exact import answers, assert_exact, runner
from tests.engine.models.test_transformers_model import gemma2

CUDA = torch.device("cuda:0")
PROMPTS = [np.random.default_rng(5).integers(3, VOCAB, length).astype(np.int32) for length in (1, 30, 120)]


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
    made = runner(saved(model, tmp_path), said.append, device="cuda", dtype="float32")
    assert_exact(model, answers(made, PROMPTS, 6, chunk_tokens=64))
    assert any("decode steps cannot be CUDA graphs: grouped products are for bfloat16" in line for line in said)


def test_a_model_that_runs_through_transformers_answers_as_it_does(tmp_path: Path) -> None:
    model = gemma2()
    made = runner(saved(model, tmp_path), device="cuda", dtype="float32", page_size=8)
    assert_exact(model, answers(made, PROMPTS, 6, chunk_tokens=37))
