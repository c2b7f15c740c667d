"""Finds the folder of a checkpoint on this host from the value of `--model`, and reads its JSON files.

Owns the three ways to name a model. Does not know what is in the files. Imports only the standard library; Hugging Face's is
imported when a name needs it.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.config import DEMO_MODEL
from common.errors import ConfigError, first_line

CONFIG = "config.json"
_CHECKPOINT = "the model as Hugging Face has it: config.json, tokenizer.json and *.safetensors"
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_TEXT_FILES = ("*.json", "*.jinja")
_WEIGHT_FILES = ("*.safetensors",)
_OTHER_FORMATS = ("consolidated*", "original/*")
"""The same weights once more, under the names of their makers (Mistral, Llama)."""


def resolve_model_path(model: str, weights: bool = True) -> Path:
    """The folder of a checkpoint, given a folder, "demo" or a Hugging Face name (downloaded if it is not on this host yet).

    weights: whether the weights are needed too; a download without them is small. Raises ConfigError.
    """
    return model_folder(model) or _download(model, (*_TEXT_FILES, *_WEIGHT_FILES) if weights else _TEXT_FILES)


def model_folder(model: str) -> Path | None:
    """The folder that --model names, or None for a Hugging Face name. Raises ConfigError for what is neither."""
    if model == DEMO_MODEL:
        return _demo_path()
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder
    if model and folder.exists():
        kind = "a GGUF file, which is not supported" if folder.suffix == ".gguf" else "a file"
        raise ConfigError(f"--model {model!r} is {kind}: give the folder that holds {_CHECKPOINT}")
    if not _HUB_NAME.fullmatch(model):
        raise ConfigError(f"--model {model!r}: there is no such folder, and it is not a Hugging Face name (owner/name)")
    return None


def read_model_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint. Raises ConfigError that says what a folder without one holds instead."""
    if not (folder / CONFIG).exists():
        files = any(folder.glob("*.gguf"))
        kind = "holds GGUF files, which are not supported" if files else f"has no {CONFIG}"
        raise ConfigError(f"{folder} {kind}: give the folder that holds {_CHECKPOINT}")
    return read_json(folder / CONFIG)


def model_name(model: str) -> str:
    """The name of a checkpoint: the last part of its folder, or its Hugging Face name."""
    folder = Path(model).expanduser()
    if model == DEMO_MODEL or not folder.is_dir():
        return model
    return folder.resolve().name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises ConfigError."""
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return read


def _demo_path() -> Path:
    package = find_spec("demo")
    roots = package.submodule_search_locations if package is not None else None
    for folder in (Path(root) / "model" for root in roots or ()):
        if (folder / CONFIG).is_file():
            return folder
    raise ConfigError("--model demo: the demo model is not installed; reinstall Tandem, or give a folder or a Hugging Face name")


def _download(model: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns), ignore_patterns=list(_OTHER_FORMATS)))
    except (OSError, HFValidationError) as error:
        raise ConfigError(
            f"--model {model!r}: there is no such folder, and the download from Hugging Face failed: {first_line(error)}"
        ) from error
