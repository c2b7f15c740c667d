"""Checkpoints: the weight files of a Hugging Face folder, and what tells one checkpoint from another.

Owns the reading of safetensors. Does not know what a weight is for.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from common.engine.models.shape import CONFIG
from common.errors import ConfigError
from common.model_path import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def fingerprint(path: Path) -> str:
    """A digest of the config and the weight files' headers and ends. Equal for copies of one checkpoint; reads little."""
    digest = hashlib.sha256((path / CONFIG).read_bytes())
    for file in weight_files(path):
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            digest.update(opened.read(min(header_bytes, 2**24)))
            opened.seek(-min(4096, file.stat().st_size), 2)
            digest.update(opened.read())
    return digest.hexdigest()[:32]


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises ConfigError."""
    if (path / INDEX).exists():
        names = sorted(set(read_json(path / INDEX)["weight_map"].values()))
    else:
        names = [SINGLE]
    files = [path / name for name in names]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; Tandem reads safetensors checkpoints")
    return files


def read_weights(path: Path, progress: Callable[[str], None]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by name, as it is in the file, one after the other."""
    files = weight_files(path)
    for number, file in enumerate(files):
        progress(f"loading weights: {file.name} ({number + 1} of {len(files)})")
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                if name.endswith(".rotary_emb.inv_freq"):
                    continue  # a buffer that older versions of transformers saved; the config determines it
                yield name, opened.get_tensor(name)
