"""Models compute what follows the last layer's attention for the wanted tokens alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.models.registry import Loading, load_model
from engine.models.shape import read_shape
from engine.torch_kernels import TorchKernels
from tests.engine.checkpoints import llama, qwen3_moe, saved
from tests.engine.models.own_values import OwnValues

LOADING = Loading(torch.float32, torch.device("cpu"), 64)


@torch.inference_mode()
@pytest.mark.parametrize("make", [llama, qwen3_moe])
@pytest.mark.parametrize("wanted", [[], [3], [5, 0, 2]])
def test_hidden_states_are_those_of_the_wanted_tokens(
    tmp_path: Path, make: Callable[[], PreTrainedModel], wanted: list[int]
) -> None:
    path = saved(make(), tmp_path)
    shape = read_shape(path)
    model = load_model(path, shape, LOADING, TorchKernels(), lambda text: None)
    ids, positions, attention = torch.arange(6) * 80, torch.arange(6), OwnValues(shape.heads)
    at = torch.tensor(wanted, dtype=torch.int64)
    whole, some = model.hidden(ids, positions, OwnValues(shape.heads)), model.hidden(ids, positions, attention, at)
    assert some.shape == (len(wanted), shape.hidden)
    torch.testing.assert_close(some, whole[at])
    assert attention.layers == shape.layers, "the keys and values of every layer are of use"
