"""Incremental detokenizing: one answer's tokens in, the text that they settle out.

Owns the tokens whose text is not settled yet. Does not know requests, numbers of tokens or stop strings. The streaming decoder is
that of the tokenizers library (`DecodeStream`); here are its flush, its bounds and its recovery.

    context │ … │ settled │ pending │
                  └ decoded as the left neighbour of pending: some decoders drop a space at the start
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, and for one that is not complete yet."""
CONTEXT_TOKENS = 16
PENDING_TOKENS = 32
"""A character takes at most four bytes, so at most four tokens. When so many wait, they are no character in the making, and
decoding them again for each further token would take time without bound."""
_MAX_ID = 2**31


class Vocabulary:
    """A tokenizer as its answers' decoders share it. Tokens that never show as text are left out before they are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._special = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)

    def shows(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token can have text. Ids that the tokenizer does not have (padding of the model's embedding) have none."""
        if skip_special_tokens and token_id in self._special:
            return False
        return 0 <= token_id < _MAX_ID and self.tokenizer.id_to_token(token_id) is not None


class IncrementalDecoder:
    """One answer's text. context: ids before the first token that decide how it is decoded; their own text is not returned.

    All texts of `step` and that of `flush` together are what the tokens decode to at once, after the context. When a decoder
    rewrites text that was settled (byte fallback does, for bytes that are no character), what was returned stays as it was.
    """

    _settled: list[int]
    _pending: list[int]
    _stream: DecodeStream

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        shown = [id for id in context[-CONTEXT_TOKENS:] if vocabulary.shows(id, skip_special_tokens)]
        complete = len(shown)
        while complete and self._decode(shown[:complete]).endswith(REPLACEMENT):
            complete -= 1
        self._begin(shown[:complete], shown[complete:])
        self._unwanted = self._pending_text()
        """Text of the context that the stream has not passed: bytes at its end that are no character, or not yet."""

    def step(self, token_id: int) -> str:
        """Take the next token; returns the text that is now settled, often "" or one token's."""
        if not self._vocabulary.shows(token_id, self._skip_special_tokens):
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._vocabulary.tokenizer, token_id)
        except Exception as error:  # the library has no narrower type
            if "Invalid prefix" in str(error):
                return self._start_over()
            raise
        if text is not None:
            self._settled, self._pending = self._pending, []
            return self._wanted(text)
        if len(self._pending) >= PENDING_TOKENS:
            return self._settle_what_is_no_character()
        return ""

    def flush(self) -> str:
        """The answer is complete: returns the text of what is pending, incomplete characters as U+FFFD."""
        text = self._pending_text()
        self._begin([], [])
        return self._wanted(text)

    def _begin(self, settled: list[int], pending: list[int]) -> None:
        self._settled, self._pending = settled, pending
        self._stream = DecodeStream(settled, self._skip_special_tokens)
        for token_id in pending:
            text = self._stream.step(self._vocabulary.tokenizer, token_id)
            assert text is None, "pending tokens have settled text"

    def _settle_what_is_no_character(self) -> str:
        """Cut the pending tokens where no character is cut, if there is such a place among the last few."""
        whole = self._pending_text()
        for kept in range(4, 8):
            tail = self._pending[-kept:]
            text = self._text_after_settled(self._pending[:-kept])
            if text + self._decode(tail) == whole:
                self._begin([], [])
                return self._wanted(text) + "".join(self.step(token_id) for token_id in tail)
        return ""

    def _start_over(self) -> str:
        """The decoder changed text that was settled: go on with the pending tokens alone."""
        pending = self._pending
        self._begin([], [])
        return "".join(self.step(token_id) for token_id in pending)

    def _wanted(self, text: str) -> str:
        unwanted, self._unwanted = self._unwanted, ""
        return text.removeprefix(unwanted)

    def _pending_text(self) -> str:
        return self._text_after_settled(self._pending)

    def _text_after_settled(self, token_ids: list[int]) -> str:
        before = self._decode(self._settled)
        return self._decode(self._settled + token_ids)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._vocabulary.tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text
