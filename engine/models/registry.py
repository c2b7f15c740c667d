"""Which implementation serves a checkpoint, and how an instance loads it: a decoder of Tandem's own, or transformers'
implementation of any other model.

Owns the choice and the loading. Knows no pages, rows or plans. transformers' models are imported only for a checkpoint that needs
them: the import takes seconds.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from common.errors import ConfigError, MemoryShort, first_line
from common.ids import Digest
from common.model_path import CONFIG
from engine.checkpoint import config_digest, fingerprint, read_weights, weight_files
from engine.models.decoder import Decoder
from engine.models.moe import grouped, mlp_of_layer, one_by_one, why_not_grouped, with_one_spelling
from engine.models.shape import ModelShape, ServedShape, check_quantization, share_of
from engine.models.weights import Loading, WeightSlots
from engine.ports import Model
from engine.torch_kernels import Kernels


def model_digests(path: Path, shape: ServedShape, loading: Loading) -> tuple[str, Digest]:
    """The fingerprint, which is equal for instances that load the same checkpoint in the same way, and the digest of the config
    and of that way alone."""
    ways = [f"answers end at {list(shape.eos_token_ids)}"]  # generation_config.json may name them, which no digest reads
    if loading.load_format == "dummy":
        ways.append(f"random weights made on {loading.device.type}")
    if loading.quantization != "none":
        ways.append(f"weights in {loading.quantization}")
    if isinstance(shape, ModelShape) and shape.rope.kind in ("dynamic", "longrope"):
        ways.append(f"rotary embedding for {loading.context_tokens} tokens")
    return fingerprint(path, weights=loading.load_format != "dummy", ways=ways), config_digest(path, ways)


def load_model(path: Path, shape: ServedShape, loading: Loading, kernels: Kernels, progress: Callable[[str], None]) -> Model:
    """The model of the checkpoint in a folder. shape: as `read_served_shape` gave it. Raises ConfigError, MemoryShort."""
    try:
        return _loaded(path, shape, loading, kernels, progress)
    except torch.OutOfMemoryError as error:
        raise MemoryShort(f"the weights in {path} do not fit in the memory of {loading.device}: {first_line(error)}") from error


def _loaded(path: Path, shape: ServedShape, loading: Loading, kernels: Kernels, progress: Callable[[str], None]) -> Model:
    check_quantization(shape.architecture, shape if isinstance(shape, ModelShape) else None, loading.quantization)
    if not isinstance(shape, ModelShape):
        from engine.models.transformers_model import load_transformers_model

        return load_transformers_model(path, shape, loading, progress)
    slots = WeightSlots(loading.dtype, loading.device, kernels, loading.quantization)
    try:
        model = make_decoder(shape, slots, loading, kernels, progress)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # what torch raises for a size that no host memory has
        raise ConfigError(
            f"{path / CONFIG} asks for weights that do not fit in the memory of {loading.device}: {first_line(error)}"
        ) from error
    if loading.load_format == "dummy":
        progress("making random weights")
        slots.fill_random()
    else:
        slots.fill(with_one_spelling(read_weights(weight_files(path), progress)))
    model.spared_bytes = slots.pack(loading.sharers, progress)
    return model


def make_decoder(
    shape: ModelShape, slots: WeightSlots, loading: Loading, kernels: Kernels, progress: Callable[[str], None]
) -> Decoder:
    """A model of Tandem's own, whose weights are in `slots`."""
    experts, group = shape.experts, loading.group
    if experts is None:
        return Decoder(shape, slots, kernels, loading.context_tokens, group=group)
    obstacle = why_not_grouped(shape, experts, loading.dtype, loading.device)
    if obstacle is not None and loading.device.type == "cuda":
        progress(f"experts compute one after the other, and decode steps cannot be CUDA graphs: {obstacle}")
    products = grouped if obstacle is None else one_by_one
    share = share_of(shape, group.rank, group.ranks)
    make_mlp = partial(mlp_of_layer, shape, experts, share, slots, kernels, products)
    return Decoder(shape, slots, kernels, loading.context_tokens, make_mlp, capturable=obstacle is None, group=group)
