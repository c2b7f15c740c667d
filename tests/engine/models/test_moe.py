"""Mixtures of experts against transformers' own models: the same greedy tokens in float32, and nearly the same logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import ConfigError
from engine.models import registry
from engine.models.moe import MixtureOfExperts, Products, grouped, one_by_one, why_not_grouped
from engine.models.registry import make_decoder
from engine.models.shape import read_shape
from engine.models.weights import Loading, WeightSlots
from engine.torch_kernels import Kernels
from tests.engine.checkpoints import mixtral, prompts_of, qwen3_moe, saved
from tests.engine.exact import answers, assert_exact, runner
from tests.engine.graph_recorder import NotCapturable, RecordedGraphs

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: mixtral(max_position_embeddings=1024),
    "qwen3, weights as they are": lambda: qwen3_moe(norm_topk_prob=False),
    "qwen3, weights normalised, dense layers between": lambda: qwen3_moe(
        norm_topk_prob=True, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_gets_the_answers_of_transformers(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    made = runner(saved(model, tmp_path))
    prompts = prompts_of(900 if name == "mixtral" else 300, *np.random.default_rng(9).integers(1, 60, 7))
    assert_exact(model, answers(made, prompts, 6, chunk_tokens=150))


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_experts_that_were_saved_as_one_tensor_are_read(tmp_path: Path, make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    model.save_pretrained(tmp_path, save_original_format=False)
    prompts = [np.arange(40, dtype=np.int32)]
    assert_exact(model, answers(runner(tmp_path), prompts, 3, chunk_tokens=64))


def block_and_ours(model: PreTrainedModel, products: Products) -> tuple[Any, MixtureOfExperts]:
    """The mixture of transformers' first layer, and ours with the same weights."""
    block: Any = model.model.layers[0].mlp
    normalised = model.config.model_type == "mixtral" or model.config.norm_topk_prob
    experts = block.experts
    ours = MixtureOfExperts(
        router=block.gate.weight,
        gate_up=experts.gate_up_proj,
        down=experts.down_proj,
        chosen=model.config.num_experts_per_tok,
        normalised=normalised,
        products=products,
        kernels=Kernels(),
    )
    return block, ours


@pytest.mark.parametrize("products", [grouped, one_by_one])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 200])
@torch.inference_mode()
def test_both_products_compute_the_layer_of_transformers(products: Products, dtype: torch.dtype, tokens: int) -> None:
    for model in (mixtral(), qwen3_moe(norm_topk_prob=False), qwen3_moe(norm_topk_prob=True)):
        block, ours = block_and_ours(model.to(dtype), products)
        x = torch.randn(tokens, 64).to(dtype)
        expected: Tensor = block(x[None])[0]
        assert ours(x).dtype == dtype
        likes = F.linear(x, ours.router).sort(descending=True).values
        decided = likes[:, ours.chosen - 1] > likes[:, ours.chosen]  # of equal experts transformers takes any
        assert decided.sum() > 0.9 * tokens
        off = (ours(x) - expected)[decided].float().abs().max() / expected.float().abs().max()
        assert off < (1e-5 if dtype == torch.float32 else 2e-2)


@torch.inference_mode()
def test_experts_are_chosen_by_scores_in_float32() -> None:
    """The scores of experts that the router nearly likes the same are one number in bfloat16."""
    rows = torch.tensor([[0.0010, 0.0011, 0.0012, 0.0013]]).bfloat16()
    chosen: list[int] = []

    def products(pairs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        chosen.append(int((ends == 0).sum()))  # all pairs are of one expert: those before it end at 0
        return torch.ones(len(pairs), weights.shape[1], dtype=pairs.dtype)

    for turn in range(4):
        router = rows.roll(turn, dims=1).T
        weights = torch.zeros(4, 2, 1).bfloat16(), torch.zeros(4, 1, 1).bfloat16()
        MixtureOfExperts(router, *weights, 1, False, products, Kernels())(torch.ones(1, 1).bfloat16())
    assert chosen[::2] == [3, 0, 1, 2]


def test_a_mixture_is_captured_only_if_its_products_are_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, kernels = torch.device("cpu"), Kernels()

    def capturable() -> bool:
        loading = Loading(torch.float32, cpu, 64)
        shape = read_shape(saved(mixtral(), tmp_path))
        return make_decoder(shape, WeightSlots(torch.float32, cpu, kernels), loading, kernels, lambda text: None).capturable

    assert not capturable()
    monkeypatch.setattr(registry, "why_not_grouped", lambda *_: None)
    assert capturable()


@pytest.mark.parametrize("products", [grouped, one_by_one])
@torch.inference_mode()
def test_experts_that_nobody_chose_add_nothing(products: Products) -> None:
    block, ours = block_and_ours(mixtral(), products)
    x = torch.randn(1, 64).expand(9, 64).contiguous()  # all choose the same two experts
    for weights in (ours.gate_up, ours.down):
        chosen = block.gate(x)[2][0]
        others = [expert for expert in range(5) if expert not in chosen]
        weights[others] = torch.nan
    assert ours(x).isfinite().all()


@torch.inference_mode()
def test_a_mixture_of_grouped_products_can_be_a_graph_and_one_by_one_cannot() -> None:
    _, ours = block_and_ours(mixtral(), grouped)
    x, out = torch.randn(6, 64), torch.empty(6, 64)

    def run() -> None:
        out.copy_(ours(x))

    replay = RecordedGraphs().capture(run)
    for _ in range(3):
        x.normal_()  # other tokens choose other experts
        replay()
        assert torch.equal(out, ours(x))
    ours.products = one_by_one
    with pytest.raises(NotCapturable):
        RecordedGraphs().capture(run)


def test_grouped_products_are_used_where_their_kernel_reads_nothing_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, odd = (read_shape(saved(made, tmp_path)) for made in (mixtral(), mixtral(intermediate_size=100)))
    assert shape.experts and odd.experts
    cuda, bfloat16 = torch.device("cuda:0"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_not_grouped(shape, shape.experts, bfloat16, cuda) is None
    assert "100 items" in str(why_not_grouped(odd, odd.experts, bfloat16, cuda))
    assert "not for torch.float16" in str(why_not_grouped(shape, shape.experts, torch.float16, cuda))
    assert "not for cpu" in str(why_not_grouped(shape, shape.experts, bfloat16, torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "cuda:0 has 8.9" in str(why_not_grouped(shape, shape.experts, bfloat16, cuda))


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    path = saved(mixtral(), tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"num_local_experts": 5', '"num_local_experts": 6'))
    with pytest.raises(ConfigError, match=r"mlp.gate.weight has the shape \[5, 64\]|experts\.5\.gate_proj"):
        runner(path)
