"""How prompts become embeddings: what --pooling says, and what a checkpoint says that was made with sentence-transformers.

Owns the reading of modules.json and of the pooling's config.json beside it. Imports no torch: the router reads them. Format:
https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import PoolingName
from common.errors import ConfigError
from common.model_path import read_json, resolve_model_path
from common.sampling_params import Pooling

_MODULES = "modules.json"
_SIZES = ("hidden_size", "n_embd", "d_model")
"""How configs call the length of a hidden state."""
_MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_NAMED_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EmbeddingMode:
    """How embeddings are made."""

    pooling: Pooling
    normalize: bool
    """They are scaled to length 1."""
    size: int | None
    """How many numbers they have; None: the checkpoint's config does not say."""
    is_matryoshka: bool = False
    """The model was trained so that their first numbers are embeddings too."""
    shorter_sizes: tuple[int, ...] = ()
    """How many of them are, then; empty: any number."""

    def can_have(self, size: int) -> bool:
        """Whether embeddings of this size are some that the model makes."""
        if size == self.size:
            return True
        return self.is_matryoshka and (size in self.shorter_sizes if self.shorter_sizes else size < (self.size or 0))


def read_embedding(model: str, pooling: PoolingName) -> EmbeddingMode | None:
    """model: as of `resolve_model_path`. pooling: --pooling. Returns None when the model is not served for embeddings. Raises
    ConfigError for files that cannot be read."""
    if pooling == "none":
        return None
    path = resolve_model_path(model, weights=False)
    config = read_json(path / "config.json")
    text_config = config.get("text_config", config)
    size = next((text_config[name] for name in _SIZES if isinstance(text_config.get(name), int)), None)
    modules = _modules(path)
    normalize = not modules or "Normalize" in modules
    shorter = tuple(text_config.get("matryoshka_dimensions") or ())
    is_matryoshka = bool(shorter or text_config.get("is_matryoshka"))
    if pooling != "auto":
        return EmbeddingMode(pooling, normalize, size, is_matryoshka, shorter)
    if "Pooling" not in modules:
        return None
    further = sorted(modules.keys() - {"Transformer", "Pooling", "Normalize"})
    if further:
        _log.warning("%s: --pooling auto serves no embeddings: it does not know %s", path / _MODULES, ", ".join(further))
        return None
    file = path / modules["Pooling"] / "config.json"
    found = _pooling_in(read_json(file))
    if found is None:
        _log.warning("%s: --pooling auto serves no embeddings: the pooling is none of last, mean and cls", file)
        return None
    return EmbeddingMode(found, normalize, size, is_matryoshka, shorter)


def _modules(path: Path) -> dict[str, str]:
    """The kind of each module of sentence-transformers, and its folder. {} if the checkpoint has none."""
    file = path / _MODULES
    if not file.is_file():
        return {}
    try:
        return {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in json.loads(file.read_bytes())}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} is not what sentence-transformers writes: {error!r}") from error


def _pooling_in(config: dict[str, Any]) -> Pooling | None:
    """Newer versions name the mode; older ones have a switch for each."""
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [name for name, on in config.items() if name.startswith("pooling_mode") and on]
    if len(modes) != 1 or config.get("include_prompt") is False:
        return None
    return (_MODES | _NAMED_MODES).get(modes[0])
