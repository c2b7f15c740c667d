"""The text of single tokens, as the API's log probabilities name them: what a token adds to an answer, and its exact bytes.

Owns how the kinds of tokenizers write a token. Does not know answers: a character may take several tokens, and then only their
bytes, joined, are its text.

Byte-level tokenizers (GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py) write each byte as a printable
character. Others fall back to tokens like <0xE2> for the bytes of characters that they lack.
"""

import builtins
import json
import re
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Token(NamedTuple):
    text: str
    utf8: bytes


class TokenText:
    """The text of each token of one tokenizer. An id that it lacks (padding of the model's embedding) has no text. Remembers what
    was looked up, which is no more than the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self._special = frozenset(id for id, token in added.items() if token.special)
        kinds = _decoder_kinds(json.loads(tokenizer.to_str())["decoder"])
        self._byte_of = _byte_by_character() if "ByteLevel" in kinds else None
        self._falls_back = "ByteFallback" in kinds
        self._known: dict[int, _Token] = {}

    def text(self, token_id: int) -> str:
        """What the token stands for, with U+FFFD for bytes that are no character by themselves."""
        return self._of(token_id).text

    def bytes(self, token_id: int) -> builtins.bytes:
        """What the token stands for, in UTF-8: it may be a part of a character."""
        return self._of(token_id).utf8

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def _of(self, token_id: int) -> _Token:
        known = self._known.get(token_id)
        if known is None:
            written = self._tokenizer.id_to_token(token_id)
            if written is None:
                return _Token("", b"")
            known = self._known[token_id] = self._read(token_id, written)
        return known

    def _read(self, token_id: int, written: str) -> _Token:
        if token_id in self._added:
            return _of_text(self._added[token_id])
        if self._byte_of is not None:
            if not all(character in self._byte_of for character in written):
                return _of_text(written)  # the decoder takes it as it is, too
            data = bytes(self._byte_of[character] for character in written)
            return _Token(data.decode(errors="replace"), data)
        byte = _FALLBACK.fullmatch(written) if self._falls_back else None
        if byte is not None:
            data = bytes.fromhex(byte[1])
            return _Token(data.decode(errors="replace"), data)
        # Decoders treat the start of a text in their own way: most drop a space there. So the token is read behind another.
        once, twice = (self._tokenizer.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
        return _of_text(twice.removeprefix(once))


def _of_text(text: str) -> _Token:
    return _Token(text, text.encode(errors="replace"))


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    """The kinds of a decoder's parts, as tokenizer.json writes it."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_kinds(part) for part in decoder.get("decoders", ())))


def _byte_by_character() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: printable bytes stand for themselves, and the others, in
    order, are moved behind the first 256 characters."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
