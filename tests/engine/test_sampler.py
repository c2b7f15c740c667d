"""The sampler against probabilities computed with numpy, and the noise against its distribution.

Token for token, whatever is in the rows beside, the contract of `Kernels` compares samples with the definitions.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import torch_kernels
from engine.ports import RowSampling
from engine.sampling import Sampler
from engine.torch_kernels import Kernels
from tests.engine.kernels.contract import exact_noise, random_bits

VOCAB = 12
LOGITS = torch.tensor([[2.0, 1.5, 1.0, 0.9, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0]])
DRAWS = 20_000
Values: TypeAlias = float | Sequence[float]


def sampled(
    logits: Tensor,
    temperature: Values = 1.0,
    top_k: Values = 0,
    top_p: Values = 1.0,
    min_p: Values = 0.0,
    seed: Values | None = None,
    position: Values = 7,
) -> Tensor:
    """A token for each row. A value is that of every row, or there is one for each; without seeds, a row's is its number."""
    rows = len(logits)
    given = (temperature, top_k, top_p, [0.0] * rows, list(range(rows)) if seed is None else seed, position)
    params = RowSampling(*(torch.tensor(value).expand(rows).contiguous() for value in given))
    return Sampler(Kernels()).draw(logits, params._replace(min_logit=torch.tensor(min_p).expand(rows).log()))


def draw(temperature: float, seed: int = 3, **filters: float) -> Tensor:
    """DRAWS samples of LOGITS, at as many positions."""
    return sampled(LOGITS.expand(DRAWS, -1), temperature, seed=seed, position=list(range(DRAWS)), **filters)


def probabilities(temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The filtered distribution, from the definitions."""
    weights = np.exp(LOGITS[0].numpy().astype(np.float64) / temperature)
    full = weights / weights.sum()
    kept = np.ones(VOCAB, dtype=bool)
    if top_k:
        kept &= np.arange(VOCAB) < top_k  # the logits are in descending order
    among = np.where(kept, full, 0.0) / full[kept].sum()
    kept &= np.concatenate([[0.0], among.cumsum()[:-1]]) < top_p
    kept &= among >= min_p * among.max()
    filtered: np.ndarray = np.where(kept, full, 0.0) / full[kept].sum()
    return filtered


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (1.5, 5, 1.0, 0.0),
        (2.0, 0, 0.8, 0.0),
        (0.7, 0, 1.0, 0.2),
        (1.2, 6, 0.9, 0.1),
    ],
)
def test_samples_follow_the_filtered_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    counts = torch.bincount(draw(temperature, top_k=top_k, top_p=top_p, min_p=min_p), minlength=VOCAB).numpy()
    expected = probabilities(temperature, top_k, top_p, min_p)
    assert (counts[expected == 0] == 0).all(), "an excluded token was sampled"
    allowed = expected > 0
    chi_square = (((counts - DRAWS * expected) ** 2)[allowed] / (DRAWS * expected[allowed])).sum()
    assert chi_square < 45, "far beyond the 99.99th percentile of 11 degrees of freedom"


def test_seeds_and_positions_give_different_noise() -> None:
    first, second = draw(1.0, seed=3), draw(1.0, seed=4)
    agree = float((first == second).float().mean())
    chance = float((probabilities(1.0, 0, 1.0, 0.0) ** 2).sum())
    assert abs(agree - chance) < 0.02


def test_top_p_of_one_excludes_nothing_beside_other_filters() -> None:
    """Beside one likely token, the others' probabilities are lost when a running sum in float32 is rounded to 1."""
    logits = torch.full((1, 1000), -30.0)
    logits[0, 500] = 0.0
    assert kept(logits, top_k=0, top_p=1.0, min_p=1e-14).all()
    assert kept(logits, top_k=999, top_p=1.0, min_p=0.0).sum() == 999


def test_the_nucleus_ends_with_the_token_whose_sum_reaches_top_p() -> None:
    equal = torch.zeros(1, 8)
    assert [int(kept(equal, 0, top_p, 0.0).sum()) for top_p in (1e-50, 0.124, 0.125, 0.126, 0.5)] == [1, 1, 1, 2, 4]


def test_the_nucleus_is_exact_where_thousands_of_tokens_share_little() -> None:
    """In float32 a running sum next to 1 steps over 58 of these tokens at once."""
    logits, top_p = torch.full((1, 1000), -20.0), 1 - 2.0**-20
    logits[0, 500] = 0.0
    share = np.exp(-20.0)
    expected = 1 + np.ceil((top_p * (1 + 999 * share) - 1) / share)
    assert abs(int(kept(logits, 0, top_p, 0.0).sum()) - expected) <= 1


def kept(logits: Tensor, top_k: Values, top_p: Values, min_p: Values) -> Tensor:
    given = (1.0, top_k, top_p, 0.0, 0, 0)
    rows = RowSampling(*(torch.tensor(value).expand(len(logits)) for value in given))
    return torch_kernels.kept(logits, rows._replace(min_logit=torch.tensor(min_p).expand(len(logits)).log()))


def test_noise_is_gumbel_noise_to_its_tails() -> None:
    """Each number against float64, and the numbers' distribution: at 2^-32 steps of u the outermost are known."""
    generator = np.random.default_rng(0)
    ends = np.arange(3000)
    bits = np.concatenate([generator.integers(0, 2**32, 300_000), ends, 2**32 - 1 - ends, 2**31 - 1500 + ends]).astype(np.uint32)
    below, beyond = (bits + 0.5) / 2.0**32, (2.0**32 - bits - 0.5) / 2.0**32
    exact = np.where(below < 0.5, -np.log(-np.log(below)), -np.log(-np.log1p(-beyond)))
    noise = exact_noise(bits)
    assert np.abs(noise - exact).max() < 1e-6 and np.abs((noise - exact)[np.abs(exact) < 4]).max() < 5e-7
    assert np.diff(exact_noise(np.sort(bits)).astype(np.float64)).min() > -1e-6
    drawn = torch_kernels.gumbel(torch.arange(40), torch.full((40,), 9), torch_kernels.token_noise(25_000, torch.device("cpu")))
    in_order = np.sort(drawn.double().numpy().ravel())
    share = np.exp(-np.exp(-in_order))
    assert np.abs(share - (np.arange(10**6) + 0.5) / 10**6).max() < 1.95e-3, "Kolmogorov's 99.9th percentile"
    for tail in (1e-5, 1e-4, 1e-3):
        for found in ((share < tail).sum(), (1 - share < tail).sum()):
            assert abs(found - tail * 10**6) < 4 * (tail * 10**6) ** 0.5


def test_every_device_has_the_same_noise() -> None:
    """Bit by bit: torch against numpy."""
    seeds, positions = torch.tensor([3, -5, 2**62]), torch.tensor([0, 9, 2**40])
    drawn = torch_kernels.gumbel(seeds, positions, torch_kernels.token_noise(5000, torch.device("cpu"))).numpy()
    for row, (seed, position) in enumerate(zip(seeds.numpy(), positions.numpy(), strict=True)):
        assert drawn[row].tobytes() == exact_noise(random_bits(seed, position, 5000)).tobytes()


def test_probabilities_are_those_of_float64_and_never_rise_beyond_one() -> None:
    logits = -torch.cat([torch.linspace(0, 87, 200_000), torch.logspace(-9, 0, 1000), torch.tensor([0.0])])
    exact = logits.double().exp()
    found = torch_kernels.exponential(logits).double()
    assert ((found - exact).abs() <= 1.5e-7 * exact).all() and found.max() == 1
    assert torch_kernels.exponential(torch.tensor([-88.0, -torch.inf])).tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [1e-39, 1e-30, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_is_greedy_and_never_overflows(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[79.5, -50.0, 80.0, 3.0, 0.0]])
    assert sampled(logits.expand(8, -1), temperature, top_p=top_p).tolist() == [2] * 8
