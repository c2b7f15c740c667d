"""What is told of a step's layers while it computes."""

import pytest
import torch

from engine.step_runner import LayerProgress


@pytest.mark.parametrize(
    ("layers", "groups", "expected"),
    [(8, 4, [2, 4, 6, 8]), (8, 2, [4, 8]), (8, 1, [8]), (8, 0, []), (3, 4, [1, 2, 3]), (10, 4, [2, 5, 7, 10])],
)
def test_progress_is_reported_after_each_group(layers: int, groups: int, expected: list[int]) -> None:
    told: list[int] = []
    progress = LayerProgress(torch.device("cpu"), layers, groups, told.append)
    for layer in range(1, layers + 1):
        progress.written(layer)
    progress.wait()
    assert told == expected
