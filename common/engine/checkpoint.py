"""Checkpoints: the weight files of a Hugging Face folder, and what tells one checkpoint from another.

Owns the reading of safetensors. Does not know what a weight is for.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.engine.models.shape import CONFIG
from common.errors import ConfigError
from common.model_path import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_REPORTS, _LEAST_REPORT_BYTES = 20, 2**30


def fingerprint(path: Path, *, weights: bool = True, ways: Sequence[str] = ()) -> str:
    """A digest of the config and the weight files' headers and ends. Equal for copies of one checkpoint; reads little.

    weights: whether the weight files are used. ways: what else tells instances of the checkpoint apart.
    """
    digest = hashlib.sha256((path / CONFIG).read_bytes())
    for file in weight_files(path) if weights else []:
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            digest.update(opened.read(min(header_bytes, 2**24)))
            opened.seek(-min(4096, file.stat().st_size), 2)
            digest.update(opened.read())
    for way in ways:
        digest.update(f"\n{way}".encode())
    return digest.hexdigest()[:32]


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises ConfigError."""
    if (path / INDEX).exists():
        places = read_json(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ConfigError(f"{path / INDEX}: weight_map must say which file holds each weight; it is {str(places)[:80]}")
        names = sorted(set(places.values()))
    else:
        names = [SINGLE]
    files = [path / name for name in names]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; Tandem reads safetensors checkpoints")
    return files


def read_weights(path: Path, progress: Callable[[str], None]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by name, as it is in the file, one after the other. Raises ConfigError.

    progress: is told the bytes read of all, at the start and now and then.
    """
    files = weight_files(path)
    total_bytes = sum(file.stat().st_size for file in files)
    step_bytes = max(total_bytes // _MOST_REPORTS, _LEAST_REPORT_BYTES)
    read_bytes, next_report = 0, 0
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in opened.offset_keys():  # in the order of the file, so that a disk reads ahead
                    if read_bytes >= next_report:
                        progress(f"loading weights: {read_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB")
                        next_report += step_bytes
                    if name.endswith(".rotary_emb.inv_freq"):
                        continue  # a buffer that older versions of transformers saved; the config determines it
                    tensor = opened.get_tensor(name)
                    read_bytes += tensor.nbytes
                    yield name, tensor
        except SafetensorError as error:
            raise ConfigError(f"{file} is not a safetensors file, or not a whole one: {error}") from error
