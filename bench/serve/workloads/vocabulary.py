"""The tokens that made-up prompts consist of, and how they are sent: as words, or as ids.

Owns the choice of tokens. A prompt of n tokens that is sent as text has n tokens for the server too, so its words are tokens that
stay what they are when their text is read again.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.serve.workloads.sessions import Content
from common.errors import ConfigError
from common.text.tokenizer_manager import TokenizerManager

TRIED_WORDS = 8192
FEWEST_WORDS = 32

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """ids: the tokens to choose from, [tokens] int32. write: makes what is sent of some of them. added_tokens: what the server
    adds to a prompt by itself, such as one for its beginning."""

    ids: Ids
    write: Callable[[Ids], Content]
    added_tokens: int = 0

    def draw(self, random: np.random.Generator, tokens: int) -> Ids:
        """So many random tokens, [tokens] int32."""
        return self.ids[random.integers(0, len(self.ids), tokens)]


def vocabulary(tokenizer: str, prompts: str) -> Vocabulary:
    """Of a tokenizer: a folder, a Hugging Face name, or demo. prompts: text or ids. Raises ConfigError."""
    try:
        manager = TokenizerManager(tokenizer)
    except ConfigError as error:
        raise ConfigError(f"prompts cannot be made up without the model's tokenizer: give --tokenizer ({error})") from error
    added = manager.backend.get_added_tokens_decoder()
    plain = np.array(sorted(set(manager.backend.get_vocab(with_added_tokens=False).values()) - set(added)), np.int32)
    if prompts == "ids":
        return Vocabulary(plain, lambda ids: ids)
    words = _words(manager, plain)
    if len(words) < FEWEST_WORDS:
        raise ConfigError(f"--tokenizer {tokenizer}: only {len(words)} of its tokens are words; send --prompts ids")
    return Vocabulary(words, lambda ids: manager.backend.decode(ids.tolist()), len(manager.encode("")))


def _words(manager: TokenizerManager, ids: Ids) -> Ids:
    """Those of these tokens that are a word with a space before it, and are read as the same token again. At most TRIED_WORDS are
    looked at, the same ones each time."""
    if len(ids) > TRIED_WORDS:
        ids = np.sort(np.random.default_rng(0).choice(ids, TRIED_WORDS, replace=False))
    pairs = [[token, token] for token in ids.tolist()]
    texts = manager.backend.decode_batch(pairs)
    read = manager.backend.encode_batch(texts, add_special_tokens=False)
    kept = [pair[0] for pair, text, again in zip(pairs, texts, read, strict=True) if _is_word_twice(text) and again.ids == pair]
    return np.array(kept, np.int32)


def _is_word_twice(text: str) -> bool:
    parts = text.split(" ")
    words = [part for part in parts if part]
    return len(words) == 2 and words[0] == words[1] and words[0].isalpha()
