"""Which part of a model each rank has: heads, the width of mlps, experts, rows of the vocabulary.

Owns the division, and the refusal of what cannot be divided. Imports no torch; knows no weights or tensors. Source: Shoeybi et
al. 2019 (Megatron-LM): a layer whose outputs are divided feeds one whose inputs are, and the outputs of that one are summed.
"""

from dataclasses import dataclass
from typing import NoReturn

from common.config import Quantization
from common.engine.models.served_shape import ServedShape
from common.engine.models.shape import ModelShape
from common.errors import ConfigError
from common.pages.heads import heads_of

_FP8_MULTIPLE = 16
"""Sizes of FP8 products (`linear.py`)."""


@dataclass(frozen=True, slots=True)
class Share:
    """What of the whole model a rank has. heads, kv_heads: query heads and KV heads. intermediate: of the width of dense mlps.
    vocabulary: of the token ids; its tensors have vocabulary_rows rows, on all ranks, of which the last ones may be padding.
    adds_biases: whether the rank adds the bias of a layer whose outputs are summed: one does."""

    heads: range
    kv_heads: range
    intermediate: range
    experts: range
    vocabulary: range
    vocabulary_rows: int
    adds_biases: bool


def share_of(shape: ModelShape, rank: int, ranks: int) -> Share:
    """What `check_ranks` has not refused."""
    rows = -(-shape.vocab_size // ranks)
    begin = min(rank * rows, shape.vocab_size)
    return Share(
        heads=_part(shape.heads, rank, ranks),
        kv_heads=heads_of(rank, ranks, shape.kv_heads),
        intermediate=_part(shape.intermediate, rank, ranks),
        experts=_part(0 if shape.experts is None else shape.experts.experts, rank, ranks),
        vocabulary=range(begin, min(begin + rows, shape.vocab_size)),
        vocabulary_rows=rows,
        adds_biases=rank == 0,
    )


def check_ranks(shape: ServedShape, ranks: int, quantization: Quantization) -> None:
    """Raises ConfigError, with the numbers of ranks that work, unless so many ranks can have equal parts of the model."""
    if ranks == 1:
        return
    if not isinstance(shape, ModelShape):
        refuse_ranks(shape.architecture, ranks)
    obstacle = _obstacle(shape, ranks, quantization)
    if obstacle is not None:
        works = [str(number) for number in range(1, shape.heads + 1) if _obstacle(shape, number, quantization) is None]
        raise ConfigError(f"--tp {ranks} cannot divide this {shape.architecture}: {obstacle}; what works is {', '.join(works)}")


def refuse_ranks(architecture: str, ranks: int) -> NoReturn:
    """Of a model that transformers' implementation computes. Raises ConfigError."""
    raise ConfigError(
        f"--tp {ranks} is not supported for {architecture}, which transformers' implementation computes: give --tp 1"
    )


def _obstacle(shape: ModelShape, ranks: int, quantization: Quantization) -> str | None:
    """Why so many ranks cannot have equal parts; None: they can."""
    if shape.heads % ranks:
        return f"it has {shape.heads} attention heads"
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        return f"it has {shape.kv_heads} KV heads"
    is_dense = shape.experts is None or len(shape.experts.layers) < shape.layers
    if is_dense and shape.intermediate % ranks:
        return f"its mlps are {shape.intermediate} wide"
    if shape.experts is not None and shape.experts.experts % ranks:
        return f"it has {shape.experts.experts} experts"
    if quantization == "fp8" and ranks > 1:
        widths = shape.heads // ranks * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate // ranks
        if any(width % _FP8_MULTIPLE for width in widths):
            return f"--quantization fp8 needs parts of layers whose sizes are multiples of {_FP8_MULTIPLE}"
    return None


def _part(whole: int, rank: int, ranks: int) -> range:
    return range(rank * whole // ranks, (rank + 1) * whole // ranks)
