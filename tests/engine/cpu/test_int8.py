"""Int8 layers: against float64 on the same quantised numbers, within the bound of the format on the exact ones, in models too."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.cpu.products import PackedProduct, int8_product
from engine.models.linear import Int8Linear
from tests.engine.checkpoints import VOCAB, qwen2, qwen3, saved
from tests.engine.cpu.here import CPU, KERNELS, int8_products, largest_of
from tests.engine.exact import answers, reference_logits, runner
from tests.engine.ranks import answers_of_ranks

PROMPTS = [np.random.default_rng(6).integers(3, VOCAB, length).astype(np.int32) for length in (3, 40, 90)]
PRODUCTS = int8_products()
needs_int8 = pytest.mark.skipif(not PRODUCTS, reason="no product in int8 is right on this processor")


def quantised(x: Tensor, largest: int) -> Tensor:
    """What the definition makes of each row, in float64."""
    step = x.double().abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest
    return (x.double() / step).round() * step


def ties(x: Tensor, largest: int) -> Tensor:
    """A step for each number that lies between two of them, 0 for all others: [rows, inputs]."""
    step = x.double().abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest
    between = ((x.double() / step) % 1 - 0.5).abs() < 1e-4
    return between * step


def layer(weight: Tensor, bias: Tensor | None, product: PackedProduct) -> Int8Linear:
    made = Int8Linear.empty(len(weight), weight.shape[1], bias, product, KERNELS)
    made.put(slice(0, 16), weight[:16])
    made.put(slice(16, None), weight[16:])
    made.pack()
    return made


@needs_int8
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda each: f"{type(each).__name__}-{largest_of(each)}")
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.0**-20), (torch.bfloat16, 2.0**-8)])
def test_a_product_is_that_of_its_definition_and_near_the_exact_one(
    dtype: torch.dtype, rounding: float, product: PackedProduct
) -> None:
    largest = largest_of(product)
    torch.manual_seed(4)
    weight = torch.randn(48, 321, dtype=dtype) * torch.logspace(-3, 3, 48, dtype=dtype)[:, None]
    for rows, bias in ((0, None), (1, None), (37, torch.randn(48, dtype=dtype))):
        x = torch.randn(rows, 321, dtype=dtype) ** 3
        out = layer(weight, bias, product)(x)
        assert out.shape == (rows, 48) and out.dtype == dtype
        added = torch.zeros(48, dtype=torch.float64) if bias is None else bias.double()
        weight8, x8 = quantised(weight, 127), quantised(x, largest)
        size = x8.abs() @ weight8.abs().T + added.abs()
        defined, exact = x8 @ weight8.T + added, x.double() @ weight.double().T + added
        # a number between two steps may be rounded to either
        tie = ties(x, largest) @ weight8.abs().T + x8.abs() @ ties(weight, 127).T
        assert ((out.double() - defined).abs() <= rounding * defined.abs() + 1e-5 * size + tie).all()

        def error(of: Tensor, steps: int) -> Tensor:
            return (of.double().abs().amax(-1, keepdim=True) * 0.5 / steps).expand(of.shape)

        error_x, error_weight = error(x, largest), error(weight, 127)
        bound = x.double().abs() @ error_weight.T + error_x @ weight.double().abs().T + error_x @ error_weight.T
        assert ((out.double() - exact).abs() <= bound + rounding * exact.abs() + 1e-5 * size).all()
        assert not rows or ((out.double() - exact).abs() > 0.01 * bound).any(), "the bound is no wider than it must be by far"


def by_definition(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64, but for the quantisation of weights and inputs of linear layers."""
    largest = largest_of(int8_product(CPU, KERNELS))
    made = copy.deepcopy(model).double()
    for layer in made.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(quantised(layer.weight.data, 127), requires_grad=False)
            layer.register_forward_pre_hook(lambda _, given: (quantised(given[0], largest),))
    return made


@needs_int8
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_models_logits_are_as_near_as_the_definition_makes_them(tmp_path: Path, ranks: int) -> None:
    """With biases and a tied head; on ranks with a head of its own, whose scales are of parts of rows."""
    model = (
        qwen2(initializer_range=0.05, tie_word_embeddings=True)
        if ranks == 1
        else qwen3(initializer_range=0.05, tie_word_embeddings=False)
    )
    path, exact, definition = saved(model, tmp_path), copy.deepcopy(model).double(), by_definition(model)
    if ranks == 1:
        of_ranks = [answers(runner(path, quantization="int8"), PROMPTS, 4, chunk_tokens=30)]
    else:
        of_ranks = answers_of_ranks(path, ranks, PROMPTS, 4, 30, quantization="int8")
    for given in of_ranks:
        for answer in given:
            expected = reference_logits(exact, answer).double()
            far = float((reference_logits(definition, answer).double() - expected).norm() / expected.norm())
            ours = float((torch.stack(answer.logits).double() - expected).norm() / expected.norm())
            assert 0.5 * far < ours < 2 * far < 0.2
