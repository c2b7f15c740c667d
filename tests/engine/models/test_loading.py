"""Ways to load a model: in half precision, with FP8 weights, and without weight files.

Models compute what follows the last layer's attention for the wanted tokens alone.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import ConfigError
from engine.models.linear import Fp8Linear
from engine.models.registry import load_model, model_digests
from engine.models.shape import read_shape
from engine.models.weights import Loading, WeightSlots
from engine.ports import Fp8Rows
from engine.torch_kernels import Kernels
from tests.engine.checkpoints import llama, prompts_of, qwen2, qwen3, qwen3_moe, saved
from tests.engine.exact import Answer, answers, reference_logits, runner
from tests.engine.models.own_values import OwnValues
from tests.engine.models.test_linear import needs_fp8_on_cpu, quantised

PROMPTS = prompts_of(3, 40, 90)
TOKENS = 4


def distance(logits: Tensor, exact: Tensor) -> float:
    """The error of the tokens' logits, as a share of the exact ones."""
    return float((logits.double() - exact).norm() / exact.norm())


def fp8_by_definition(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64, but for the quantisation of weights and inputs of linear layers."""

    def quantise_input(layer: torch.nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        rows = given[0].flatten(0, -2)
        return (quantised(rows.bfloat16()).view_as(given[0]),)

    made = copy.deepcopy(model).double()
    for name, layer in made.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.data = quantised(layer.weight.data)
            layer.register_forward_pre_hook(quantise_input)
    return made


@pytest.mark.parametrize(("dtype", "room"), [("float16", 0.004), ("bfloat16", 0.032)])
def test_half_precision_loses_no_more_than_its_roundings(tmp_path: Path, dtype: str, room: float) -> None:
    """room: eight roundings of the dtype."""
    model = llama(initializer_range=0.05, attention_bias=True)
    made = runner(saved(model, tmp_path), dtype=dtype)
    assert made.description.layout.dtype == made.description.model.dtype == dtype
    for answer in answers(made, PROMPTS, TOKENS, chunk_tokens=30):
        assert distance(torch.stack(answer.logits), reference_logits(model, answer).double()) < room


@needs_fp8_on_cpu
def test_fp8_layers_are_what_the_definition_says_and_the_model_is_as_near_as_it_can_be(tmp_path: Path) -> None:
    """Each product of a run, with the inputs that it had there. Then the logits, which are not twice as far from float64 as
    the definition itself is."""
    model = qwen2(initializer_range=0.05)
    made = runner(saved(model, tmp_path), dtype="bfloat16", quantization="fp8")
    products: list[tuple[Fp8Linear, Tensor | Fp8Rows, Tensor | Fp8Rows]] = []
    original = Fp8Linear.__call__

    def recording(self: Fp8Linear, x: Tensor | Fp8Rows) -> Tensor | Fp8Rows:
        products.append((self, x, original(self, x)))
        return products[-1][2]

    with mock.patch.object(Fp8Linear, "__call__", recording):
        given = answers(made, PROMPTS, TOKENS, chunk_tokens=30)
    layers = [part for layer in model.model.layers for part in _linears(layer)]
    assert len(products) % len(layers) == 0
    for number, (layer, x, out) in enumerate(products):
        weight, bias = layers[number % len(layers)]
        defined = quantised(x) @ quantised(weight).T + bias.bfloat16().double()
        if isinstance(out, Fp8Rows):
            gates, ups = defined.chunk(2, -1)
            assert layer.gated and distance(quantised(out), F.silu(gates) * ups) < 2**-4, "one rounding to FP8"
        else:
            assert not layer.gated and distance(out, defined) < 2**-8, "one rounding to bfloat16"
        assert isinstance(x, Fp8Rows) == (number % 4 != 1), "attention alone leaves it to the product to quantise"
        assert layer.weight.dtype == torch.float8_e4m3fn
    exact, definition = copy.deepcopy(model).double(), fp8_by_definition(model)
    for answer in given:
        expected = reference_logits(exact, answer).double()
        far = distance(reference_logits(definition, answer), expected)
        assert distance(torch.stack(answer.logits), expected) < 2 * far < 0.4


def _linears(layer: Any) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each product of a layer of transformers' Qwen2, merged and in order as Tandem's are."""
    attention, mlp = layer.self_attn, layer.mlp
    made = []
    for parts in (
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ):
        biases = [torch.zeros(part.out_features) if part.bias is None else part.bias.data for part in parts]
        made.append((torch.cat([part.weight.data for part in parts]), torch.cat(biases)))
    return made


def test_random_weights_need_no_weight_files_and_are_another_model(tmp_path: Path) -> None:
    path = saved(qwen3(), tmp_path)
    real = runner(path).description.model.fingerprint
    (path / "model.safetensors").unlink()
    made = [runner(path, load_format="dummy") for _ in range(2)]
    given: list[list[Answer]] = [answers(one, PROMPTS, TOKENS, chunk_tokens=30) for one in made]
    assert all(torch.equal(*(torch.stack(answer.logits) for answer in pair)) for pair in zip(*given, strict=True))
    assert len({token for answer in given[0] for token in answer.tokens}) > 1
    assert made[0].description.model.fingerprint == made[1].description.model.fingerprint != real
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors"):
        runner(path)


@needs_fp8_on_cpu
def test_fp8_weights_are_another_model(tmp_path: Path) -> None:
    path = saved(qwen3(), tmp_path)
    prints = [runner(path, dtype="bfloat16", quantization=kind).description.model.fingerprint for kind in ("none", "fp8")]
    assert prints[0] != prints[1]


def test_a_context_that_changes_the_angles_changes_the_fingerprint(tmp_path: Path) -> None:
    path = saved(qwen3(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}), tmp_path)
    prints = [runner(path, context_tokens=tokens).description.model.fingerprint for tokens in (0, 1024, 512)]
    assert prints[0] == prints[1] != prints[2]


def test_fingerprints_tell_end_tokens_and_makers_of_random_weights_apart(tmp_path: Path) -> None:
    path = saved(qwen3(), tmp_path)
    cpu, cuda = (Loading(torch.float32, torch.device(name), 64, "dummy") for name in ("cpu", "cuda"))
    shape = read_shape(path)
    prints = [model_digests(path, shape, loading)[0] for loading in (cpu, cuda)]
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    prints.append(model_digests(path, read_shape(path), cpu)[0])
    assert len(set(prints)) == 3


def test_weights_that_do_not_fit_in_memory_are_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(qwen3(), tmp_path)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")

    monkeypatch.setattr(WeightSlots, "fill", full)
    with pytest.raises(ConfigError, match=r"the weights in .* do not fit in the memory of cpu: CUDA out of memory"):
        runner(path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 2147483646'))
    with pytest.raises(ConfigError, match=r"config.json asks for weights that do not fit in the memory of cpu"):
        runner(path)


LOADING = Loading(torch.float32, torch.device("cpu"), 64)


@torch.inference_mode()
@pytest.mark.parametrize("make", [llama, qwen3_moe])
@pytest.mark.parametrize("wanted", [[], [3], [5, 0, 2]])
def test_hidden_states_are_those_of_the_wanted_tokens(
    tmp_path: Path, make: Callable[[], PreTrainedModel], wanted: list[int]
) -> None:
    path = saved(make(), tmp_path)
    shape = read_shape(path)
    model = load_model(path, shape, LOADING, Kernels(), lambda text: None)
    ids, positions, attention = torch.arange(6) * 80, torch.arange(6), OwnValues(shape.heads)
    at = torch.tensor(wanted, dtype=torch.int64)
    whole, some = model.hidden(ids, positions, OwnValues(shape.heads)), model.hidden(ids, positions, attention, at)
    assert some.shape == (len(wanted), shape.hidden)
    torch.testing.assert_close(some, whole[at])
    assert attention.layers == shape.layers, "the keys and values of every layer are of use"
