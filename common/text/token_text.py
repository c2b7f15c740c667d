"""The text of tokens: what an answer's tokens settle, one after the other, and what each stands for alone.

Owns the tokens whose text is not settled yet, and how the kinds of tokenizers write a token. Does not know requests, numbers of
tokens or stop strings. The streaming decoder is the tokenizers library's `DecodeStream`. This file adds what that lacks: a flush
at the end of an answer, a bound on bytes that never become a character, ids that the tokenizer does not have, a context that ends
in half a character, and recovery from its "Invalid prefix" error, which byte fallback causes.

    context │ … │ settled │ pending │
                  └ decoded as the left neighbour of pending: some decoders drop a space at the start

Log probabilities name single tokens. A character may take several of them, and then only their bytes, joined, are its text.
Byte-level tokenizers (GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py) write each byte as a printable
character. Others fall back to tokens like <0xE2> for the bytes of characters that they lack.
"""

import builtins
import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, and for one that is not complete yet."""
CONTEXT_TOKENS = 16
PENDING_TOKENS = 32
"""A character takes at most four bytes, so at most four tokens. This many waiting tokens are not an unfinished character, and
decoding them again for each further token would take more and more time."""


class Vocabulary:
    """A tokenizer, shared by the decoders of all answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        """The ids of the special tokens."""
        largest = max([tokenizer.get_vocab_size(), *tokenizer.get_vocab().values()])
        self.known = frozenset(id for id in range(largest + 1) if tokenizer.id_to_token(id) is not None)
        """The ids of all tokens. A model may have more, as padding of its embedding."""

    def text(self, token_id: int) -> str:
        """What the token stands for by itself."""
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text


class IncrementalDecoder:
    """One answer's text. context: ids before the first token, which decide how it is decoded; their own text is not returned.
    skip_special_tokens: special tokens have no text, but for those in `shown`.

    The texts of all `step` and of `flush`, joined, equal the text of all tokens decoded at once after the context. A decoder may
    rewrite settled text (byte fallback does, for bytes that are no character); what was returned then stays as it was.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
    ) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._decode: Callable[[list[int]], str] = partial(self._tokenizer.decode, skip_special_tokens=False)
        self._known = vocabulary.known
        self._skipped = vocabulary.special.difference(shown) if skip_special_tokens else frozenset[int]()
        before = [id for id in context[-CONTEXT_TOKENS:] if id in self._known and id not in self._skipped]
        complete = len(before)
        while complete and self._decode(before[:complete]).endswith(REPLACEMENT):
            complete -= 1
        self._settled, self._pending = before[:complete], before[complete:]
        self._stream = DecodeStream(self._settled, skip_special_tokens=False)
        for token_id in self._pending:
            text = self._stream.step(self._tokenizer, token_id)
            assert text is None, "pending tokens have settled text"
        self._unwanted = self._text_after_settled(self._pending) if self._pending else ""
        """Text of the context's last bytes, which are not a character, or not yet one; it is not returned."""

    def step(self, token_id: int) -> str:
        """Take the next token. Returns the text that is now settled: often "", often that of one token."""
        if token_id not in self._known or token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the library has no narrower type
            if "Invalid prefix" in str(error):
                return self._settle("", self._pending)  # the decoder changed settled text
            raise
        if text is not None:
            self._settled, self._pending = self._pending, []
            unwanted, self._unwanted = self._unwanted, ""
            return text.removeprefix(unwanted)
        return self._settle_what_is_no_character() if len(self._pending) >= PENDING_TOKENS else ""

    def flush(self) -> str:
        """End the answer. Returns the text of the pending tokens, with U+FFFD for incomplete characters."""
        if not self._pending:
            return ""
        return self._settle(self._text_after_settled(self._pending))

    def _settle_what_is_no_character(self) -> str:
        """Settle all but the last few pending tokens, cut where no character is cut; "" if there is no such place."""
        whole = self._text_after_settled(self._pending)
        for kept in range(4, 8):
            tail = self._pending[-kept:]
            text = self._text_after_settled(self._pending[:-kept])
            if text + self._decode(tail) == whole:
                return self._settle(text, tail)
        return ""

    def _settle(self, text: str, rest: Sequence[int] = ()) -> str:
        """Go on with the rest of the pending tokens alone, behind this text. Returns it, and what the rest settles."""
        self._settled, self._pending = [], []
        self._stream = DecodeStream([], skip_special_tokens=False)
        if text:
            unwanted, self._unwanted = self._unwanted, ""
            text = text.removeprefix(unwanted)
        return text + "".join(map(self.step, rest))

    def _text_after_settled(self, token_ids: list[int]) -> str:
        before = self._decode(self._settled)
        return self._decode(self._settled + token_ids)[len(before) :]


_METASPACE = "▁"
"""What tokenizers that are like SentencePiece write for a space."""
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Token(NamedTuple):
    text: str
    utf8: bytes
    first: bytes
    """What it stands for at the beginning of a text, in UTF-8."""


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
        self._character_of = {byte: character for character, byte in (self._byte_of or {}).items()}
        self._falls_back = "ByteFallback" in kinds
        self._known: dict[int, _Token] = {}

    def text(self, token_id: int) -> str:
        """What the token stands for, with U+FFFD for bytes that are no character by themselves."""
        return self._of(token_id).text

    def bytes(self, token_id: int) -> builtins.bytes:
        """What the token stands for, in UTF-8: it may be a part of a character."""
        return self._of(token_id).utf8

    def first_bytes(self, token_id: int) -> builtins.bytes:
        """As `bytes`, at the beginning of a text: some decoders take off a space there."""
        return self._of(token_id).first

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def written(self, text: str) -> str:
        """The text as the vocabulary writes it within tokens."""
        if self._byte_of is None:
            return text.replace(" ", _METASPACE)
        return "".join(self._character_of[byte] for byte in text.encode())

    def read(self, written: str) -> str:
        """The text of a part of a token, with U+FFFD for bytes that are no character."""
        if self._byte_of is None:
            return written.replace(_METASPACE, " ")
        return bytes(self._byte_of.get(character, 0xFF) for character in written).decode(errors="replace")

    def _of(self, token_id: int) -> _Token:
        known = self._known.get(token_id)
        if known is None:
            written = self._tokenizer.id_to_token(token_id)
            if written is None:
                return _of_text("")
            known = self._known[token_id] = self._read(token_id, written)
        return known

    def _read(self, token_id: int, written: str) -> _Token:
        if token_id in self._added:
            return _of_text(self._added[token_id])
        if self._byte_of is not None:
            if not all(character in self._byte_of for character in written):
                return _of_text(written)  # the decoder takes it as it is, too
            data = bytes(self._byte_of[character] for character in written)
            return _Token(data.decode(errors="replace"), data, data)
        byte = _FALLBACK.fullmatch(written) if self._falls_back else None
        if byte is not None:
            data = bytes.fromhex(byte[1])
            return _Token(data.decode(errors="replace"), data, data)
        # Decoders treat the start of a text in their own way: most drop a space there. So the token is read behind another.
        once, twice = (self._tokenizer.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
        return _of_text(twice.removeprefix(once), once)


def _of_text(text: str, first: str | None = None) -> _Token:
    return _Token(text, text.encode(errors="replace"), (text if first is None else first).encode(errors="replace"))


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
