"""The shape of a checkpoint that an instance serves, whichever implementation computes it.

Owns the sizes that are known before weights are loaded. Imports no torch; transformers only for a model that it alone knows.
"""

from pathlib import Path
from typing import Protocol

from common.engine.models.shape import DEFAULTS, read_architecture, read_shape


class ServedShape(Protocol):
    """What an instance must know of a model before its weights are loaded. Sizes of one layer are those of all.

    intermediate: the widest activation of an mlp. context_tokens: the longest sequence that the model is for. eos_token_ids: the
    tokens that end an answer.
    """

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


def read_served_shape(path: Path) -> ServedShape:
    """The shape of the checkpoint in a folder, before its weights are read. Raises ConfigError if nothing can serve it."""
    architecture = read_architecture(path)
    if architecture in DEFAULTS:
        return read_shape(path)
    from common.engine.models.transformers_shape import read_transformers_shape

    return read_transformers_shape(path, architecture)
