"""Checkpoints: the weight files of a Hugging Face folder, and what tells one checkpoint from another.

Owns the reading of safetensors, and what a checkpoint is refused for before a weight is read. Does not know what a weight is for.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from common.errors import ConfigError
from common.ids import Digest
from common.model_path import CONFIG, read_json

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer
    from torch import Tensor  # the import takes a second, and a fingerprint needs none

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_REPORTS, _LEAST_REPORT_BYTES = 20, 2**30
_BLOCKS, _BLOCK_BYTES = 64, 4096
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes that a weight may have, as safetensors spells them, and the bytes of an item. FP8 is none of them: such weights need
scales."""
_SPELLED = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


def fingerprint(path: Path, *, weights: bool = True, ways: Sequence[str] = ()) -> str:
    """A digest of the config, and of each weight file its name, size, header and 64 blocks of 4 KiB, spread evenly over it. Equal
    for copies of one checkpoint. A fine-tune changes most of a file, or whole tensors: blocks all over the file see it.

    weights: whether the weight files are used. ways: what else tells instances of the checkpoint apart.
    """
    digest = hashlib.sha256((path / CONFIG).read_bytes())
    for file in weight_files(path) if weights else []:
        size = file.stat().st_size
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            digest.update(f"{file.name} {size} ".encode())
            digest.update(opened.read(min(header_bytes, size)))
            room = max(size - _BLOCK_BYTES - opened.tell(), 0)
            begin = opened.tell()
            for block in range(_BLOCKS):
                opened.seek(begin + room * block // (_BLOCKS - 1))
                digest.update(opened.read(_BLOCK_BYTES))
    for way in ways:
        digest.update(f"\n{way}".encode())
    return digest.hexdigest()[:32]


def config_digest(path: Path, ways: Sequence[str]) -> Digest:
    """What must be equal in a fleet whatever its weights are: the config, and `ways` as in `fingerprint`."""
    return Digest(fingerprint(path, weights=False, ways=ways))


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, all there and whole. Raises ConfigError."""
    if (path / INDEX).exists():
        places = read_json(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ConfigError(f"{path / INDEX}: weight_map must say which file holds each weight; it is {str(places)[:80]}")
        names = sorted(set(places.values()))
    else:
        names = [SINGLE]
    files = [path / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        pickled = next((file.name for file in sorted(path.glob("*.bin"))), None)
        fix = f": it has {pickled}, which save_pretrained of transformers converts" if pickled else ""
        raise ConfigError(f"{path} lacks {', '.join(missing)}; Tandem reads safetensors checkpoints{fix}")
    for file in files:
        _dtypes(file)
    return files


def check_weights(files: Sequence[Path], ignored: Callable[[str], bool] = lambda name: False) -> None:
    """What the headers of the files tell before a weight is read: that no weight is there twice, and that none is quantised.
    ignored: which names nobody reads. Raises ConfigError.
    """
    places: dict[str, Path] = {}
    for file in files:
        for name, dtype in _dtypes(file).items():
            if name in places:
                raise ConfigError(f"{file.parent} has the weight {name} twice: in {places[name].name} and in {file.name}")
            places[name] = file
            if not ignored(name):
                _require_float(file, name, dtype)


def _require_float(file: Path, name: str, dtype: str) -> None:
    if dtype not in _FLOATS:
        fix = "give the checkpoint before quantisation"
        raise ConfigError(f"{file}: the weight {name} is of {dtype}; supported are {', '.join(_FLOATS)}: {fix}")


def _dtypes(file: Path) -> dict[str, str]:
    """The dtype of each tensor of a safetensors file, by its header. Raises ConfigError if the file is not whole."""
    return {name: str(tensor["dtype"]) for name, tensor in _header(file)[0].items()}


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where the tensors begin. Raises ConfigError if the file is not whole."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(header_bytes if header_bytes < size else 0))
        header.pop("__metadata__", None)
        needed = 8 + header_bytes + _tiled_bytes(header)
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise not_whole(file, "its header cannot be read") from error
    if needed != size:
        raise not_whole(file, f"by its header it has {needed} bytes, but it has {size}")
    return header, 8 + header_bytes


def _tiled_bytes(header: Mapping[str, Any]) -> int:
    """The bytes of all tensors. Raises LookupError, TypeError or ValueError where they overlap or leave a hole, which the format
    forbids, and for names and dtypes that nobody could be told."""
    for name, tensor in header.items():
        (name + tensor["dtype"]).encode()  # JSON allows halves of characters
    end = 0
    for begin, following in sorted(tensor["data_offsets"] for tensor in header.values()):
        if type(begin) is not int or type(following) is not int or begin != end or following < begin:
            raise ValueError("the tensors overlap, or there is a hole between them")
        end = following
    return end


TensorDigests: TypeAlias = Mapping[str, str]
"""For each tensor of a model, by its name in a checkpoint: its dtype, shape and the digest of its bytes, in one text."""
HASHING_THREADS = 4
_CACHE = "tandem/tensor-digests-blake3.json"
_CACHED_FILES = 1_024
SETTLED_S = 3.0
"""A file that changed later than so long ago may change again within one tick of its clock, so it is not remembered."""


def content_digest(data: "Buffer") -> str:
    """32 hexadecimal digits of BLAKE3, which takes a fourth of the time of hashlib's BLAKE2, and half of that of its SHA-256."""
    return blake3(data).hexdigest(length=16)


def weights_digest(tensors: TensorDigests) -> Digest:
    """What stands for all of them. It does not depend on the files that they came in."""
    lines = "".join(f"{name} {text}\n" for name, text in sorted(tensors.items()))
    return Digest(content_digest(lines.encode()))


def tensor_digests(files: Sequence[Path]) -> dict[str, str]:
    """Those of all tensors in these safetensors files that a model reads. Reads every byte of a file, unless that was done before
    and the file is the same by inode, size and time of its last change. Raises ConfigError."""
    known, found = _read_cache(), dict[str, str]()
    fresh: dict[str, dict[str, str]] = {}
    for file in files:
        status = file.stat()
        key = f"{file.resolve()} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        digests = known.get(key)
        if digests is None:
            digests = _digests_of(file)
            if abs(time.time() - status.st_mtime) > SETTLED_S:
                fresh[key] = digests
        found |= digests
    if fresh:
        _write_cache({**_read_cache(), **fresh})
    return found


def _digests_of(file: Path) -> dict[str, str]:
    header, begin = _header(file)
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as mapped:

        def digest(name: str) -> str:
            tensor = header[name]
            first, end = tensor["data_offsets"]
            with memoryview(mapped)[begin + first : begin + end] as data:
                return _digest_of_tensor(tensor["dtype"], tensor["shape"], data)

        names = [name for name in header if not _is_unread(name)]
        with ThreadPoolExecutor(HASHING_THREADS) as threads:
            return dict(zip(names, threads.map(digest, names), strict=True))


class TensorCopies:
    """What to read of a safetensors file in shared memory, to which somebody may write at any time: by its header, which is read
    once. Raises ConfigError."""

    def __init__(self, file: Path) -> None:
        header, self._begin = _header(file)
        for name, tensor in header.items():
            _require_float(file, name, tensor["dtype"])
        self._file = file
        self._tensors = {name: tensor for name, tensor in header.items() if not _is_unread(name)}
        try:
            self.shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor["shape"]) for name, tensor in self._tensors.items()}
        except (LookupError, TypeError) as error:
            raise not_whole(file, error) from error

    def read(self, progress: Callable[[str], None]) -> Iterator[tuple[str, "Tensor"]]:
        """One tensor after the other, each a copy of the bytes that are there at one moment. progress: as for `read_weights`.
        Raises ConfigError."""
        import torch

        dtypes = {spelled: getattr(torch, name.removeprefix("torch.")) for name, spelled in _SPELLED.items()}
        with self._file.open("rb") as opened:
            for name, of in self._tensors.items():
                progress("reading weights")
                try:
                    first, end = of["data_offsets"]
                    tensor = torch.empty(self.shapes[name], dtype=dtypes[of["dtype"]])
                    opened.seek(self._begin + first)
                    if end - first != tensor.nbytes or opened.readinto(bytes_of(tensor)) != tensor.nbytes:
                        raise ValueError(f"{name} is not there as a whole")
                except (LookupError, TypeError, ValueError, RuntimeError) as error:
                    raise not_whole(self._file, error) from error
                yield name, tensor


def tensor_digest(tensor: "Tensor") -> str:
    """That of a tensor of a float dtype, as `tensor_digests` gives it for one in a file."""
    return _digest_of_tensor(_SPELLED[str(tensor.dtype)], list(tensor.shape), bytes_of(tensor.cpu().contiguous()))


def _digest_of_tensor(dtype: str, shape: list[int], data: "Buffer") -> str:
    return f"{dtype} {shape} {content_digest(data)}"


def bytes_of(tensor: "Tensor") -> memoryview:
    """Those of a contiguous tensor in the host's memory, which can be written."""
    from torch import uint8

    return tensor.reshape(-1).view(uint8).numpy().data


def _is_unread(name: str) -> bool:
    """It is a buffer that older versions of transformers saved; the config determines it."""
    return name.endswith(".rotary_emb.inv_freq")


def _cache_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _CACHE


def _read_cache() -> dict[str, dict[str, str]]:
    """{} if there is none that can be read."""
    try:
        return msgspec.json.decode(_cache_path().read_bytes(), type=dict[str, dict[str, str]])
    except (OSError, RuntimeError, msgspec.MsgspecError):
        return {}


def _write_cache(known: dict[str, dict[str, str]]) -> None:
    """The newest entries. Others may write at the same time: the last one counts, and what is lost is computed again."""
    path = _cache_path()
    with suppress(OSError, RuntimeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}-{threading.get_native_id()}")
        new.write_bytes(msgspec.json.encode(dict(list(known.items())[-_CACHED_FILES:])))
        new.replace(path)


class StoredWeight:
    """A weight in its file, which is open: only what is taken out of it is read."""

    def __init__(self, file: Path, stored: Any) -> None:
        self._file, self._stored = file, stored
        self.shape: tuple[int, ...] = tuple(stored.get_shape())

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight."""
        return prod(self.shape) * _FLOATS[self._stored.get_dtype()]

    def __getitem__(self, cut: tuple[slice, ...]) -> "Tensor":
        """The part in these ranges of the first dimensions, as it is in the file. Raises ConfigError."""
        try:
            part: Tensor = self._stored[cut or ...]
        except SafetensorError as error:
            raise not_whole(self._file, error) from error
        return part


def read_weights(files: Sequence[Path], progress: Callable[[str], None]) -> Iterator[tuple[str, StoredWeight]]:
    """Every weight in these files by name, one after the other. Raises ConfigError.

    progress: is told how far in the files it is, at the start and now and then.
    """
    check_weights(files)
    total_bytes = sum(file.stat().st_size for file in files)
    step_bytes = max(total_bytes // _MOST_REPORTS, _LEAST_REPORT_BYTES)
    passed_bytes, next_report = 0, 0
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in opened.offset_keys():  # in the order of the file, so that a disk reads ahead
                    if passed_bytes >= next_report:
                        progress(f"loading weights: {passed_bytes / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB")
                        next_report += step_bytes
                    if _is_unread(name):
                        continue
                    stored = StoredWeight(file, opened.get_slice(name))
                    passed_bytes += stored.nbytes
                    yield name, stored
        except SafetensorError as error:
            raise not_whole(file, error) from error


def not_whole(file: Path, why: object) -> ConfigError:
    return ConfigError(f"{file} is not a safetensors file, or not a whole one: {why}")
