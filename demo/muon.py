"""Muon (Jordan et al. 2024): momentum whose updates are orthogonalised, for a model's hidden matrices.

Owns the momenta. Knows nothing of what the matrices are for.
"""

import math

import torch
from torch import Tensor


def orthogonal(update: Tensor) -> Tensor:
    """Roughly the nearest orthogonal matrix to `update`, by Newton-Schulz iteration in bfloat16. Same shape and dtype."""
    x: Tensor = (update / (update.norm() + 1e-7)).bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x).to(update.dtype)


class Muon:
    """step() consumes the gradients of `matrices`."""

    def __init__(self, matrices: list[Tensor], momentum: float = 0.95) -> None:
        self._matrices = matrices
        self._momentum = momentum
        self._momenta = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """rate: how far a step moves each singular direction."""
        for matrix, average in zip(self._matrices, self._momenta, strict=True):
            assert matrix.grad is not None
            average.lerp_(matrix.grad, 1 - self._momentum)
            update = orthogonal(matrix.grad.lerp(average, self._momentum))
            matrix.add_(update, alpha=-rate * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1])))
            matrix.grad = None
