"""Where weights go as they are read, and what is said of a checkpoint that does not have what its config asks for."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.linear import Linear
from engine.models.weights import WeightPart, WeightSlots
from engine.torch_kernels import Kernels

CPU = torch.device("cpu")


def slots_of(dtype: torch.dtype = torch.float32) -> tuple[WeightSlots, Tensor, Tensor, Tensor]:
    """A norm, and the weight and bias of a merged layer of two parts."""
    slots = WeightSlots(dtype, CPU, Kernels())
    norm = slots.tensor("norm.weight", 4)
    linear = slots.linear([WeightPart("a", 2), WeightPart("b", 3)], inputs=4, bias=True)
    assert isinstance(linear, Linear) and linear.weight is not None and linear.bias is not None
    return slots, norm, linear.weight, linear.bias


def checkpoint(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(3)
    shapes = {"b.bias": (3,), "norm.weight": (4,), "a.weight": (2, 4), "a.bias": (2,), "b.weight": (3, 4)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def test_parts_of_a_layer_are_merged_in_any_order_and_converted() -> None:
    slots, norm, weight, bias = slots_of(torch.bfloat16)
    given = checkpoint()
    slots.fill(given.items())
    assert torch.equal(norm, given["norm.weight"].bfloat16())
    assert torch.equal(weight, torch.cat([given["a.weight"], given["b.weight"]]).bfloat16())
    assert torch.equal(bias, torch.cat([given["a.bias"], given["b.bias"]]).bfloat16())


def test_a_tensor_that_was_read_is_let_go_before_the_next() -> None:
    slots = slots_of()[0]
    held: list[weakref.ref[Tensor]] = []

    def reading() -> Iterator[tuple[str, Tensor]]:
        for name in list(checkpoint()):
            held.append(weakref.ref(tensor := checkpoint()[name]))
            yield name, tensor
            del tensor
            assert sum(reference() is not None for reference in held) <= 1

    slots.fill(reading())
    assert len(held) == 5


def test_a_weight_that_is_missing_unknown_or_of_another_shape_is_named() -> None:
    given = checkpoint()
    for changes, reason in (
        ({"b.bias": None}, "lacks weights that its config.json asks for: b.bias"),
        ({f"c{n}": torch.ones(1) for n in range(7)}, "does not ask for: c0, c1, c2, c3, c4 and 2 more"),
        ({"a.weight": torch.ones(4, 2)}, r"a.weight has the shape \[4, 2\] in the checkpoint, but \[2, 4\] by config.json"),
    ):
        changed = {name: tensor for name, tensor in (given | changes).items() if tensor is not None}
        with pytest.raises(ConfigError, match=reason):
            slots_of()[0].fill(changed.items())


@pytest.mark.parametrize(
    ("dtype", "value", "reason"),
    [
        (torch.float32, torch.nan, "infinite or not numbers in float32: b.weight"),
        (torch.bfloat16, -torch.inf, "infinite or not numbers in bfloat16: b.weight"),
        (torch.float16, 1e6, "infinite or not numbers in float16: b.weight; float16 ends at 65504: give --dtype bfloat16"),
    ],
)
def test_a_weight_that_is_not_finite_in_the_models_dtype_is_named(dtype: torch.dtype, value: float, reason: str) -> None:
    given = checkpoint()
    given["b.weight"][1, 2] = value
    with pytest.raises(ConfigError, match=reason):
        slots_of(dtype)[0].fill(given.items())


def test_a_tied_weight_may_be_there_if_it_is_equal() -> None:
    for copied, fine in ((checkpoint()["a.weight"], True), (torch.ones(2, 4), False), (torch.ones(1, 4), False)):
        slots, _, weight, _ = slots_of()
        slots.tie("head", "a.weight", weight[:2])
        given = {"head": copied, **checkpoint()}
        if fine:
            slots.fill(given.items())
        else:
            with pytest.raises(ConfigError, match=r"head differs from the embedding, but .* tie_word_embeddings true"):
                slots.fill(given.items())


def test_random_weights_depend_on_the_seed_and_the_name_only() -> None:
    made = []
    for seed in (0, 0, 1):
        slots, norm, weight, _ = slots_of()
        slots.fill_random(seed)
        assert torch.equal(norm, torch.ones(4))
        made.append(weight)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert len({float(number) for number in made[0].flatten()}) == made[0].numel(), "no two parts are alike"
    other = WeightSlots(torch.float32, CPU, Kernels())
    alone = other.linear([WeightPart("b", 3)], inputs=4, bias=False)
    other.fill_random()
    assert isinstance(alone, Linear) and alone.weight is not None
    assert torch.equal(alone.weight, made[0][2:])
