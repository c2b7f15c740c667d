"""Which implementation serves a checkpoint: a decoder of Tandem's own, or transformers' implementation of any other model.

Owns the choice and the loading. Knows no pages, rows or plans. transformers' models are imported only for a checkpoint that needs
them: the import takes seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common.engine.checkpoint import read_weights
from common.engine.kernels.port import Kernels
from common.engine.models.decoder import Decoder
from common.engine.models.moe import grouped, mlp_of_layer, one_by_one, why_not_grouped, with_one_spelling
from common.engine.models.port import Model, ServedShape
from common.engine.models.shape import DEFAULTS, ModelShape, read_architecture, read_shape
from common.engine.models.weights import WeightSlots
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loading:
    """How an instance loads its model. context_tokens: the longest sequence that it was asked for."""

    dtype: torch.dtype
    device: torch.device
    context_tokens: int


def read_served_shape(path: Path) -> ServedShape:
    """The shape of the checkpoint in a folder, before its weights are read. Raises ConfigError if nothing can serve it."""
    architecture = read_architecture(path)
    if architecture in DEFAULTS:
        return read_shape(path)
    from common.engine.models.transformers_shape import read_transformers_shape

    return read_transformers_shape(path, architecture)


def load_model(path: Path, shape: ServedShape, loading: Loading, kernels: Kernels, progress: Callable[[str], None]) -> Model:
    """The model of the checkpoint in a folder. shape: as `read_served_shape` gave it. Raises ConfigError."""
    try:
        return _loaded(path, shape, loading, kernels, progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the weights in {path} do not fit in the memory of {loading.device}: {error}") from error


def _loaded(path: Path, shape: ServedShape, loading: Loading, kernels: Kernels, progress: Callable[[str], None]) -> Model:
    if not isinstance(shape, ModelShape):
        from common.engine.models.transformers_model import load_transformers_model

        return load_transformers_model(path, shape, loading.dtype, loading.device, progress)
    slots = WeightSlots(loading.dtype, loading.device)
    model = make_decoder(shape, slots, loading, kernels, progress)
    slots.fill(with_one_spelling(read_weights(path, progress)))
    return model


def make_decoder(
    shape: ModelShape, slots: WeightSlots, loading: Loading, kernels: Kernels, progress: Callable[[str], None]
) -> Decoder:
    """A model of Tandem's own, whose weights are in `slots`."""
    experts = shape.experts
    if experts is None:
        return Decoder(shape, slots, kernels, loading.context_tokens)
    obstacle = why_not_grouped(shape, experts, loading.dtype, loading.device)
    if obstacle is not None:
        progress(f"experts compute one after the other, and decode steps cannot be CUDA graphs: {obstacle}")
    products = grouped if obstacle is None else one_by_one
    make_mlp = partial(mlp_of_layer, shape, experts, slots, kernels, products)
    return Decoder(shape, slots, kernels, loading.context_tokens, make_mlp, capturable=obstacle is None)
