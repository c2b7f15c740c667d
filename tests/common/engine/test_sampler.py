"""The sampler against probabilities computed with numpy, and the noise as a function of (seed, position) alone."""

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.sampler import sample

VOCAB = 12
LOGITS = torch.tensor([[2.0, 1.5, 1.0, 0.9, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0]])
DRAWS = 20_000


def draw(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 3) -> Tensor:
    """DRAWS samples at as many positions."""
    rows = DRAWS
    return sample(
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.full((rows,), seed),
        torch.arange(rows),
    )


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
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.5, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (1.2, 6, 0.9, 0.1)],
)
def test_samples_follow_the_filtered_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    counts = torch.bincount(draw(LOGITS, temperature, top_k, top_p, min_p), minlength=VOCAB).numpy()
    expected = probabilities(temperature, top_k, top_p, min_p)
    assert (counts[expected == 0] == 0).all(), "an excluded token was sampled"
    allowed = expected > 0
    chi_square = (((counts - DRAWS * expected) ** 2)[allowed] / (DRAWS * expected[allowed])).sum()
    assert chi_square < 45, "far beyond the 99.99th percentile of 11 degrees of freedom"


def test_temperature_zero_is_greedy_whatever_else_is_set() -> None:
    assert (draw(LOGITS, 0.0, top_k=3, top_p=0.5) == 0).all()


def test_the_noise_is_a_function_of_seed_and_position_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    seeds, positions = torch.tensor([1, 2, 3, 1, 2, -5]), torch.tensor([7, 7, 7, 8, 8, 2**40])

    def tokens(rows: list[int]) -> list[int]:
        count = len(rows)
        ones = torch.ones(count)
        picked: list[int] = sample(
            logits[rows], ones, torch.zeros(count, dtype=torch.int64), ones, torch.zeros(count), seeds[rows], positions[rows]
        ).tolist()
        return picked

    together = tokens([0, 1, 2, 3, 4, 5])
    assert [tokens([row])[0] for row in range(6)] == together
    assert tokens([5, 3, 1]) == [together[5], together[3], together[1]]


def test_seeds_and_positions_give_different_noise() -> None:
    first, second = draw(LOGITS, 1.0, seed=3), draw(LOGITS, 1.0, seed=4)
    agree = float((first == second).float().mean())
    chance = float((probabilities(1.0, 0, 1.0, 0.0) ** 2).sum())
    assert abs(agree - chance) < 0.02
