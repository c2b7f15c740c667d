"""New weights beside those in use: read, checked and packed like them, and then copied into their memory.

Owns what new weights are refused for, and the digest of a model's weights. Does not know threads or steps: `take_over` is called
when none is running. The new weights have memory of their own until then, so what goes wrong on the way changes nothing; the copy
at the end is all that a change of weights takes.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

import torch

from common.errors import BadRequest, MemoryShort
from common.host import host_memory_now
from common.ids import Digest
from common.messages.weights import WeightsInMemory, WeightsSource
from engine.checkpoint import TensorDigests, read_image, read_weights, tensor_digests, weight_files, weights_digest
from engine.kv_budget import gib
from engine.models.decoder import EMBEDDING, HEAD, Decoder
from engine.models.moe import with_one_spelling
from engine.models.registry import make_decoder
from engine.models.served_shape import read_served_shape
from engine.models.shape import ModelShape, ServedShape
from engine.models.weights import Loading, WeightSlots
from engine.ports import Model
from engine.torch_kernels import Kernels

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has what shm_open(3) makes."""


class ModelWeights:
    """The weights of a model that was loaded from this folder."""

    def __init__(self, model: Model, path: Path, shape: ServedShape, loading: Loading, kernels: Kernels) -> None:
        self._model, self._shape, self._loading, self._kernels = model, shape, loading, kernels
        self._is_random = loading.load_format == "dummy"
        self._tensors: TensorDigests = {"random weights": loading.device.type}
        if not self._is_random:
            self._tensors = self._digests(weight_files(path))

    @property
    def digest(self) -> Digest:
        return weights_digest(self._tensors)

    def stage(self, source: WeightsSource, progress: Callable[[str], None]) -> "StagedModel":
        """New weights that are ready to be taken over. Takes as long as loading a model; steps may run meanwhile. progress:
        called now and then; what it raises ends the work. Raises ConfigError, BadRequest, MemoryShort."""
        if isinstance(source, WeightsInMemory):
            given, tensors = self._read_segments(source)
            files: list[Path] = []
        else:
            files = self._files(Path(source.folder))
            before = [_last_change(file) for file in files]
            given, tensors = None, self._digests(files)
        try:
            take_over = self._take_over(source, files, given, progress)
        except torch.OutOfMemoryError as error:
            reason = str(error).strip().splitlines()[0]
            raise MemoryShort(f"new weights do not fit beside those in use on {self._loading.device}: {reason}") from error
        if files and [_last_change(file) for file in files] != before:
            raise BadRequest("the files of the new weights changed while they were read: write them before you send their names")
        return StagedModel(tensors, take_over)

    def switch(self, staged: "StagedModel") -> None:
        """Compute with these from now on. No step is running."""
        staged.take_over()
        staged.take_over = _nothing_left  # which gives their memory back
        self._tensors = staged.tensors
        self._is_random = "random weights" in staged.tensors
        staged.is_in_use.set()

    def _digests(self, files: Sequence[Path]) -> TensorDigests:
        """Those of all weights in these files; a tied head is the embedding and does not count."""
        found = tensor_digests(files)
        if isinstance(self._shape, ModelShape) and self._shape.tied:
            found.pop(HEAD, None)
        return found

    def _files(self, folder: Path) -> list[Path]:
        if not folder.is_dir():
            raise BadRequest(f"model_path: there is no folder {folder} on this host", field="model_path")
        _require_same_shape(read_served_shape(folder), self._shape, folder)
        return weight_files(folder)

    def _read_segments(self, source: WeightsInMemory) -> tuple[dict[str, torch.Tensor], TensorDigests]:
        """What is in shared memory now, and the digests of all weights with it."""
        given, digests = dict[str, torch.Tensor](), dict(self._tensors)
        for segment in source.segments:
            file = SHARED_MEMORY / segment
            if "/" in segment or not file.is_file():
                raise BadRequest(f"shared_memory: there is no {segment[:80]!r} on this host", field="shared_memory")
            tensors, of_tensors = read_image(file)
            for name, tensor in tensors.items():
                if name in given:
                    raise BadRequest(f"shared_memory: the weight {name} is there twice", field="shared_memory")
                given[name] = tensor
                is_tied = name == HEAD and isinstance(self._shape, ModelShape) and self._shape.tied
                if not is_tied:
                    digests[name] = of_tensors[name]
        unknown = digests.keys() - self._tensors.keys()
        if unknown and not self._is_random:  # another spelling of the same weights would have another digest
            rule = f"the checkpoint that is served has no weight {min(unknown)}: use its names"
            raise BadRequest(f"shared_memory: {rule}", field="shared_memory")
        return given, digests

    def _take_over(
        self,
        source: WeightsSource,
        files: Sequence[Path],
        given: Mapping[str, torch.Tensor] | None,
        progress: Callable[[str], None],
    ) -> Callable[[], None]:
        live, loading = self._model, self._loading
        if not isinstance(live, Decoder) or not isinstance(self._shape, ModelShape):
            return self._take_over_foreign(source, progress)
        given = None if given is None else dict(with_one_spelling(given.items()))
        only = None if given is None else set(given)
        if only is not None and HEAD in only and self._shape.tied:
            only.add(EMBEDDING)  # which it is compared with
        self._require_memory(live.slots.nbytes(only))
        slots = WeightSlots(loading.dtype, loading.device, self._kernels, loading.quantization, only)
        make_decoder(self._shape, slots, loading, self._kernels, progress)
        if given is None:
            slots.fill(with_one_spelling(read_weights(files, progress)))
        else:
            slots.fill_from(live.slots, given.items(), given.keys())
        slots.pack_as(live.slots)
        if loading.device.type == "cuda":
            torch.cuda.current_stream(loading.device).synchronize()  # the copies are made on another one
        return lambda: live.slots.take_over(slots)

    def _take_over_foreign(self, source: WeightsSource, progress: Callable[[str], None]) -> Callable[[], None]:
        from engine.models.transformers_model import TransformersModel, load_transformers_model

        if isinstance(source, WeightsInMemory):
            raise BadRequest(
                f"shared_memory: {self._shape.architecture} runs through transformers' implementation, whose weights change as "
                "whole checkpoints: send POST /update_weights_from_disk",
                field="shared_memory",
            )
        live = self._model
        assert isinstance(live, TransformersModel)
        self._require_memory(sum(tensor.nbytes for tensor in live.tensors()))
        new = load_transformers_model(Path(source.folder), self._shape, self._loading, progress)
        return lambda: _copy_all(live.tensors(), new.tensors())

    def _require_memory(self, needed: int) -> None:
        """Raises MemoryShort when it is sure that new weights of so many bytes do not fit: the host would kill the process."""
        device = self._loading.device
        free = host_memory_now().free_bytes if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        if needed > free:
            raise MemoryShort(f"new weights take {gib(needed)} beside those in use, and {gib(free)} of {device} are free")


class StagedModel:
    """New weights that are ready. take_over: copies them into the memory of those in use."""

    def __init__(self, tensors: TensorDigests, take_over: Callable[[], None]) -> None:
        self.tensors, self.take_over = tensors, take_over
        self.is_in_use = threading.Event()
        """Set when they have been taken over."""

    @property
    def digest(self) -> Digest:
        return weights_digest(self.tensors)


def _require_same_shape(new: ServedShape, live: ServedShape, folder: Path) -> None:
    """Raises BadRequest that names the first difference."""
    if type(new) is not type(live) or not is_dataclass(new):
        raise BadRequest(f"model_path: {folder} holds {new.architecture}, and {live.architecture} is served", field="model_path")
    for each in fields(new):
        ours, theirs = getattr(live, each.name), getattr(new, each.name)
        if ours != theirs:
            rule = f"its config.json says {each.name} {theirs}, and the model that is served has {ours}"
            raise BadRequest(f"model_path: {folder} holds another model: {rule}", field="model_path")


def _last_change(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _nothing_left() -> None:
    raise AssertionError("weights are taken over once")


def _copy_all(live: Iterable[torch.Tensor], new: Iterable[torch.Tensor]) -> None:
    for mine, theirs in zip(live, new, strict=True):
        mine.copy_(theirs)
