"""The product in C for few rows, against float64."""

from collections.abc import Iterator

import pytest
import torch

from common.engine.models.few_rows import MOST_ROWS, fits, load_few_rows
from common.engine.models.linear import PackedLinear

SHAPES = [(4, 16), (48, 144), (68, 512), (36, 1040), (12, 1536)]
"""(outputs, inputs): less than a block of inputs, one, and several."""


@pytest.fixture
def threads() -> Iterator[tuple[int, ...]]:
    """How many to try. The number is restored at the end."""
    before = torch.get_num_threads()
    yield 1, 2, 3
    torch.set_num_threads(before)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_few_rows_are_multiplied_as_in_float64_on_any_number_of_threads(
    outputs: int, inputs: int, threads: tuple[int, ...]
) -> None:
    few_rows = load_few_rows()
    if few_rows is None:
        pytest.skip("there is no C compiler")
    generator = torch.Generator().manual_seed(inputs)
    wide = torch.full((MOST_ROWS, inputs + 8), torch.nan)
    wide[:, :inputs] = torch.randn(MOST_ROWS, inputs, generator=generator)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    assert fits(weight)
    exact = wide[:, :inputs].double() @ weight.double().T
    whole = few_rows(wide[:, :inputs], weight, None)
    for count in threads:
        torch.set_num_threads(count)
        for rows in (1, 2, 3, 5, 6, 7, 13, 33, MOST_ROWS):
            x = wide[:rows, :inputs]  # its rows are not next to each other
            assert torch.allclose(few_rows(x, weight, bias).double(), exact[:rows] + bias, rtol=1e-5, atol=1e-5 * inputs**0.5)
            assert torch.equal(few_rows(x, weight, None), whole[:rows]), "a row's numbers depend on the others, or on threads"
        columns = wide[:5, :inputs].T.contiguous().T
        assert torch.equal(few_rows(columns, weight, None), whole[:5])


def test_what_there_is_no_code_for_is_told_apart() -> None:
    weight = torch.zeros(16, 32)
    assert fits(weight)
    others = torch.zeros(15, 32), torch.zeros(16, 30), torch.zeros(32, 16).T, weight.bfloat16(), weight[:, :16]
    assert not any(map(fits, others))


def test_a_layer_uses_it_for_few_rows_alone() -> None:
    asked: list[int] = []

    class Counted:
        def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            asked.append(len(x))
            return x @ weight.T

    layer = PackedLinear(torch.randn(16, 32), None, few_rows=Counted())  # type: ignore[arg-type]
    for rows in (0, 1, MOST_ROWS, MOST_ROWS + 1):
        assert layer(torch.ones(rows, 32)).shape == (rows, 16)
    assert asked == [1, MOST_ROWS]
