"""The tokens that end an answer, from a checkpoint's configs and its tokenizer.

Owns where they are named. Does not know what is done with them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.model_path import read_json

GENERATION, TOKENIZER, TOKENIZER_CONFIG = "generation_config.json", "tokenizer.json", "tokenizer_config.json"


def read_eos(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: the generation config's (or else the model config's), and the tokenizer's.

    A fine-tuned model may end its turns with its own token (<|im_end|>) that only its tokenizer names.
    """
    named = read_json(path / GENERATION).get("eos_token_id") if (path / GENERATION).exists() else None
    named = config.get("eos_token_id") if named is None else named
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(token, int) for token in ids):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them; it is {named!r}")
    return tuple(dict.fromkeys([*ids, *_tokenizer_eos(path)]))


def _tokenizer_eos(path: Path) -> list[int]:
    """The id of the tokenizer's eos_token, if there is a tokenizer and it names a token that it has."""
    if not ((path / TOKENIZER).exists() and (path / TOKENIZER_CONFIG).exists()):
        return []
    named = read_json(path / TOKENIZER_CONFIG).get("eos_token")
    content = named.get("content") if isinstance(named, dict) else named  # older versions saved the token with its properties
    tokenizer = read_json(path / TOKENIZER)
    try:
        vocab = tokenizer["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [[piece, score], ...], the id is the place
            vocab = {piece: token for token, (piece, _) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
        found = added.get(content, vocab.get(content))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path / TOKENIZER} is not in the tokenizers library's format: {error!r}") from error
    return [] if found is None else [found]
