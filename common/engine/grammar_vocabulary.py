"""Which tokens are text to a grammar: all but special tokens, which give no text in an answer.

Owns that choice. A structural tag may name special tokens in its marks, as the calls of some models do: these are text to it, and
the router shows those of calls and thoughts. Does not know how grammars are compiled, nor any model.

A vocabulary comes with its special tokens *marked*: their bytes follow a prefix that no text has. So one `TokenizerInfo` says all
that is needed, also to another process.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from common.sampling_params import Grammar

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

_MARK = b"\xff\xfe\xff"
_OPAQUE = {"json_schema", "pattern", "grammar"}
"""Keys of a structural tag that hold no marks."""
_TOKENS = {"token", "trigger_tokens", "rules"}
"""Keys that may hold ids of tokens."""


def marked(vocabulary: "TokenizerInfo", special: set[int]) -> "TokenizerInfo":
    """The vocabulary with its special tokens marked. Stop tokens stay as they are: xgrammar never takes them for text."""
    hidden = special - set(vocabulary.stop_token_ids)
    texts = [_MARK + text if token in hidden else text for token, text in enumerate(vocabulary.decoded_vocab)]
    return _with_texts(vocabulary, texts)


class GrammarVocabulary:
    """vocabulary: with its special tokens marked."""

    def __init__(self, vocabulary: "TokenizerInfo") -> None:
        self._marked, texts = vocabulary, vocabulary.decoded_vocab
        self._special = {token: text.removeprefix(_MARK) for token, text in enumerate(texts) if text.startswith(_MARK)}
        self._texts = [b"" if token in self._special else text for token, text in enumerate(texts)]
        self._plain = _with_texts(vocabulary, self._texts)

    def of(self, grammar: Grammar) -> "TokenizerInfo":
        """What this grammar takes for text. xgrammar never allows a token without bytes."""
        named = self._named(grammar)
        if not named:
            return self._plain
        texts = list(self._texts)
        for token in named:
            texts[token] = self._special[token]
        return _with_texts(self._marked, texts)

    def _named(self, grammar: Grammar) -> list[int]:
        if grammar.kind != "structural_tag":
            return []
        named = set(_named(json.loads(grammar.text)))
        marks = "\0".join(each for each in named if isinstance(each, str)).encode(errors="replace")
        return [token for token, text in self._special.items() if token in named or (text and text in marks)]


def _named(tag: Any, key: str = "") -> Iterator[str | int]:
    """The texts and the ids of tokens that a structural tag names. key: where it stands."""
    match tag:
        case str():
            yield tag
        case int() if key in _TOKENS:
            yield tag
        case list():
            for each in tag:
                yield from _named(each, key)
        case dict():
            for at, each in tag.items():
                if at not in _OPAQUE:
                    yield from _named(each, at)


def _with_texts(vocabulary: "TokenizerInfo", texts: list[bytes]) -> "TokenizerInfo":
    from xgrammar import TokenizerInfo, VocabType

    return TokenizerInfo(
        texts,
        VocabType.RAW,
        vocab_size=vocabulary.vocab_size,
        stop_token_ids=vocabulary.stop_token_ids,
        add_prefix_space=vocabulary.add_prefix_space,
    )
