"""Attention that needs no pages, for tests of models alone."""

from torch import Tensor

from engine.ports import HeadNorm, Rotation


class OwnValues:
    """Attention of each token to itself alone, rotated nowhere. Implements `StepAttention`. heads: query heads.

    layers: how often it was called."""

    def __init__(self, heads: int) -> None:
        self._heads = heads
        self.layers = 0

    def rotate_and_attend(self, layer: int, heads: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        self.layers += 1
        return heads[:, : self._heads] * 1.0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError("decoders let it rotate")
