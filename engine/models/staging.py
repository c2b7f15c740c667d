"""New weights beside those in use: read, checked and packed like them, and then copied into their memory.

Owns what new weights are refused for, and the digest of a model's weights. Does not know threads or steps: `take_over` is called
when none is running. The new weights have memory of their own until then, so what goes wrong on the way changes nothing; the copy
at the end is all that a change of weights takes.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from common.errors import BadRequest, ConfigError, MemoryShort, first_line
from common.host import host_memory_now
from common.ids import Digest
from common.messages.variants import WeightsFromGroup, WeightsInMemory, WeightsOnDisk, WeightsSource
from engine.checkpoint import (
    HASHING_THREADS,
    TensorCopies,
    TensorDigests,
    read_weights,
    tensor_digest,
    tensor_digests,
    weight_files,
    weights_digest,
)
from engine.kv_budget import gib
from engine.models.decoder import EMBEDDING, HEAD, Decoder
from engine.models.moe import require_all_experts, spelling_of, with_one_spelling
from engine.models.registry import make_decoder
from engine.models.served_shape import read_served_shape
from engine.models.shape import ModelShape, ServedShape
from engine.models.weight_groups import TrainerGroups
from engine.models.weights import Cut, Loading, Stored, WeightSlots
from engine.ports import Model
from engine.torch_kernels import Kernels

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has what shm_open(3) makes."""
FileChange = tuple[int, int, int]
"""When a file was written last, and which one it is."""
_FIELDS = {WeightsOnDisk: "model_path", WeightsInMemory: "shared_memory", WeightsFromGroup: "names"}
"""What names a source in a request."""


class ModelWeights:
    """The weights of a model that was loaded from this folder."""

    def __init__(self, model: Model, path: Path, shape: ServedShape, loading: Loading, kernels: Kernels) -> None:
        self._model, self._shape, self._loading, self._kernels = model, shape, loading, kernels
        self._is_random = loading.load_format == "dummy"
        self._tensors: TensorDigests = {"random weights": loading.device.type}
        if not self._is_random:
            self._tensors = self._digests(weight_files(path))
        self.groups = TrainerGroups(loading.group.rank, loading.device)

    @property
    def digest(self) -> Digest:
        return weights_digest(self._tensors)

    def stage(self, source: WeightsSource, progress: Callable[[str], None]) -> "StagedModel":
        """New weights that are ready to be taken over. Takes as long as loading a model; steps may run meanwhile. progress:
        called now and then; what it raises ends the work. Raises BadRequest, MemoryShort, Unavailable."""
        try:
            return self._staged(source, progress)
        except MemoryShort:
            raise
        except (ConfigError, OSError) as error:  # OSError: no such name can be, or nobody may read it
            field = _FIELDS[type(source)]
            raise BadRequest(f"{field}: {error}", field=field) from error
        except torch.OutOfMemoryError as error:
            where = self._loading.device
            raise MemoryShort(f"new weights do not fit beside those in use on {where}: {first_line(error)}") from error

    def _staged(self, source: WeightsSource, progress: Callable[[str], None]) -> "StagedModel":
        part, files, before = None, list[Path](), list[FileChange]()
        if isinstance(source, WeightsOnDisk):
            files = self._files(Path(source.folder))
            before = last_changes(files)
            tensors = self._digests(files)
        elif isinstance(source, WeightsInMemory):
            part = self._read_segments(source, progress)
        else:
            part = self._expect(source, progress)
        if part is not None:
            self._require_known(part)
        take_over = self._take_over(source, files, part, progress)
        if last_changes(files) != before:
            raise BadRequest("the files of the new weights changed while they were read: write them before you send their names")
        return StagedModel(tensors if part is None else self._with(part.digests), take_over)

    def read(self, name: str, rows: int) -> list[float] | list[list[float]]:
        """The first rows of a weight in use; of one with one dimension, the first items. Raises BadRequest."""
        live = self._model
        if not isinstance(live, Decoder) or self._loading.group.ranks > 1:
            rule = "runs through transformers' implementation" if not isinstance(live, Decoder) else "is shared by several ranks"
            raise BadRequest(f"name: weights cannot be read where the model {rule}", field="name")
        wanted = EMBEDDING if name == HEAD and self._is_tied else name
        ((spelled, _),) = with_one_spelling([(wanted, Announced(()))])
        slot = live.slots.slots.get(spelled)
        if slot is None:
            fix = (
                "" if spelling_of(name) is None else ": weights of experts are read one at a time, by names as Qwen3-MoE has them"
            )
            raise BadRequest(f"name: the model has no weight {name}{fix}", field="name")
        found: list[float] | list[list[float]] = slot.read()[:rows].float().cpu().tolist()
        return found

    def abandon(self, source: WeightsSource) -> None:
        """These weights are not ready, and will not be."""
        if isinstance(source, WeightsFromGroup):  # this rank may have missed what others have received
            self.groups.leave(source.group)

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
        if self._is_tied:
            found.pop(HEAD, None)
        return found

    @property
    def _is_tied(self) -> bool:
        return isinstance(self._shape, ModelShape) and self._shape.tied

    def _files(self, folder: Path) -> list[Path]:
        if not folder.is_dir():
            raise BadRequest(f"model_path: there is no folder {folder} on this host", field="model_path")
        _require_same_shape(read_served_shape(folder), self._shape, folder)
        return weight_files(folder)

    def _read_segments(self, source: WeightsInMemory, progress: Callable[[str], None]) -> "PartOfModel":
        """What is in shared memory. Each weight is read when it is taken out."""
        announced, files, digests = dict[str, Stored](), list[TensorCopies](), dict[str, str]()
        for segment in source.segments:
            file = SHARED_MEMORY / segment
            if "/" in segment or not file.is_file():
                raise BadRequest(f"shared_memory: there is no {segment[:80]!r} on this host", field="shared_memory")
            files.append(TensorCopies(file))
            for name, shape in files[-1].shapes.items():
                if name in announced:
                    raise BadRequest(f"shared_memory: the weight {name} is there twice", field="shared_memory")
                announced[name] = Announced(shape)
        copies = chain.from_iterable(file.read(progress) for file in files)
        return PartOfModel(_FIELDS[WeightsInMemory], announced, _digested(copies, digests), digests)

    def _expect(self, source: WeightsFromGroup, progress: Callable[[str], None]) -> "PartOfModel":
        """What a trainer is about to send. It is received when it is taken out."""
        announced = {weight.name: Announced(weight.shape) for weight in source.weights}
        if len(announced) < len(source.weights):
            raise BadRequest("names: a weight is there twice", field="names")
        self.groups.require(source.group)
        digests = dict[str, str]()
        weights = _digested(self.groups.receive(source, progress), digests)
        return PartOfModel(_FIELDS[WeightsFromGroup], announced, weights, digests)

    def _require_known(self, part: "PartOfModel") -> None:
        """Raises BadRequest for a name that the checkpoint does not have: another spelling of a weight would have another
        digest."""
        unknown = part.shapes.keys() - self._tensors.keys() - ({HEAD} if self._is_tied else set())
        rule = f"the checkpoint that is served has no weight {min(unknown, default='')}: use its names"
        if self._is_random:  # any are, but experts go on with those that came first
            ways = dict(filter(None, map(spelling_of, self._tensors)))
            unknown = {name for name in unknown if (found := spelling_of(name)) and ways.get(*found) != found[1]}
            rule = f"experts were given with other names than {min(unknown, default='')} before: use those"
        if unknown:
            raise BadRequest(f"{part.field}: {rule}", field=part.field)
        if isinstance(self._shape, ModelShape) and self._shape.experts is not None:
            require_all_experts(part.shapes, self._shape.experts.experts)

    def _with(self, digests: Mapping[str, str]) -> TensorDigests:
        """Those of all weights when these have changed; a tied head is the embedding and does not count."""
        return {**self._tensors, **{name: digest for name, digest in digests.items() if name != HEAD or not self._is_tied}}

    def _take_over(
        self, source: WeightsSource, files: Sequence[Path], part: "PartOfModel | None", progress: Callable[[str], None]
    ) -> Callable[[], None]:
        """part: None: all weights are in the files."""
        live, loading = self._model, self._loading
        if not isinstance(live, Decoder) or not isinstance(self._shape, ModelShape):
            return self._take_over_foreign(source, progress)
        given = None if part is None else {name for name, _ in with_one_spelling(part.shapes.items())}
        only = given
        if given is not None and HEAD in given and self._is_tied:
            only = given | {EMBEDDING}  # which it is compared with
        loading = replace(loading, device=_roomy_device(loading, live.slots.nbytes(only)))
        is_away = loading.device != self._loading.device
        slots = WeightSlots(loading.dtype, loading.device, self._kernels, loading.quantization, only, pinned=is_away)
        make_decoder(self._shape, slots, loading, self._kernels, progress)
        if part is None or given is None:
            slots.fill(with_one_spelling(read_weights(files, progress)))
        else:
            slots.require(with_one_spelling(part.shapes.items()))  # before anything is received, so that all ranks refuse alike
            slots.fill_from(live.slots, with_one_spelling(part.weights), given)
        slots.pack_as(live.slots)
        if loading.device.type == "cuda":
            torch.cuda.current_stream(loading.device).synchronize()  # the copies are made on another one
        return lambda: live.slots.take_over(slots)

    def _take_over_foreign(self, source: WeightsSource, progress: Callable[[str], None]) -> Callable[[], None]:
        from engine.models.transformers_model import TransformersModel, load_transformers_model

        if not isinstance(source, WeightsOnDisk):
            field = "shared_memory" if isinstance(source, WeightsInMemory) else "names"
            raise BadRequest(
                f"{field}: {self._shape.architecture} runs through transformers' implementation, whose weights change as "
                "whole checkpoints: send POST /update_weights_from_disk",
                field=field,
            )
        live = self._model
        assert isinstance(live, TransformersModel)
        place = _roomy_device(self._loading, sum(tensor.nbytes for tensor in live.tensors()))
        new = load_transformers_model(Path(source.folder), self._shape, replace(self._loading, device=place), progress)
        return lambda: _copy_all(live.tensors(), new.tensors())


@dataclass(frozen=True, slots=True)
class Announced:
    """A weight that has not come yet. Implements `Stored`."""

    shape: tuple[int, ...]

    def __getitem__(self, cut: Cut) -> torch.Tensor:
        raise AssertionError("it has not come yet")


@dataclass(frozen=True, slots=True)
class PartOfModel:
    """Some weights, by their names in the checkpoint."""

    field: str
    """The field of a request that names them, for people."""
    shapes: Mapping[str, Stored]
    weights: Iterable[tuple[str, Stored]]
    """To be taken out once."""
    digests: Mapping[str, str]
    """Complete when all weights have been taken out."""


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


def _roomy_device(loading: Loading, needed: int) -> torch.device:
    """Where new weights of so many bytes fit beside those in use: on their device, or else in the memory of its host, from which
    the change then copies them. FP8 is made on the device. Raises MemoryShort when it is sure that they fit nowhere: the host
    would kill the process."""
    device, host = loading.device, torch.device("cpu")
    places = [device] if loading.quantization == "fp8" or device == host else [device, host]
    free = {place: host_memory_now().free_bytes if place == host else torch.cuda.mem_get_info(place)[0] for place in places}
    for place, free_bytes in free.items():
        if needed <= free_bytes:
            return place
    found = " and ".join(f"{gib(free_bytes)} of {place}" for place, free_bytes in free.items())
    raise MemoryShort(f"new weights take {gib(needed)} beside those in use, and {found} are free")


def _digested(weights: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, one after the other; `digests` has those of all in the end."""
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        found = dict[str, Future[str]]()
        for name, tensor in weights:
            found[name] = threads.submit(tensor_digest, tensor)
            yield name, tensor
        digests |= {name: digest.result() for name, digest in found.items()}


def last_changes(files: Iterable[Path]) -> list[FileChange]:
    """Files that have the same ones before and after something was read hold what was read. Raises OSError."""
    found = map(Path.stat, files)
    return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in found]


def _nothing_left() -> None:
    raise AssertionError("weights are taken over once")


def _copy_all(live: Iterable[torch.Tensor], new: Iterable[torch.Tensor]) -> None:
    for mine, theirs in zip(live, new, strict=True):
        mine.copy_(theirs)
