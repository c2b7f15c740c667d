"""How a tokenizer spells a word: the sequences of tokens that it writes the word with.

Owns the search for them. A word is spelled differently at the beginning of a text, behind a space,
behind a quotation mark or before a full stop, because tokens may hold these too. Which texts may
stand beside the word in one token is seen from the vocabulary, and how the word is spelled beside
them from encoding it there. Does not know requests.
"""

from collections.abc import Iterator
from functools import lru_cache

from tokenizers import Tokenizer

from common.text.token_text import REPLACEMENT, TokenText

_EVERYWHERE = ("", " ", "\n", '"')
"""What any word may stand behind. The last is for tokenizers that put a space before every text: here they put none."""
_BETWEEN = "\0"
_MOST_PLACES = 2048
"""More pairs of what may stand before and behind a word are not tried: it is a mark that stands beside all others."""


class Spellings:
    """The spellings of words by one tokenizer. A word takes some milliseconds."""

    def __init__(self, tokenizer: Tokenizer, texts: TokenText) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._vocabulary = ""
        """All tokens as the vocabulary writes them, with a mark around each."""
        self.of = lru_cache(maxsize=1024)(self._of)

    def _of(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Token ids of each spelling; none for a word without tokens. A spelling may hold more than the word, where tokens do."""
        if not self._vocabulary:
            self._vocabulary = _BETWEEN.join(["", *self._tokenizer.get_vocab(), ""])
        within = set(self._before(word))
        before = {*_EVERYWHERE, *within, *(f"a{text}" for text in within)}
        behind = {"", *self._behind(word)}
        places = [(text, after) for text in before for after in behind]
        if len(places) > _MOST_PLACES:
            places = [(text, "") for text in before] + [(text, after) for text in _EVERYWHERE for after in behind]
        texts = [f"{text}{word}{after}" for text, after in places]
        found: dict[tuple[int, ...], None] = {}
        for (text, _), encoded in zip(places, self._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            begin, end = len(text), len(text) + len(word)
            spans = zip(encoded.ids, encoded.offsets, strict=True)
            found.setdefault(tuple(token_id for token_id, (first, last) in spans if last > begin and first < end))
        found.pop((), None)
        return tuple(found)

    def _before(self, word: str) -> Iterator[str]:
        """What stands before the word, or before its beginning, in a token, where another word ends."""
        for length in range(1, len(word) + 1):
            for text, _ in self._around(word[:length], last=length < len(word)):
                if text and not (text[-1].isalnum() and word[0].isalnum()):
                    yield text

    def _behind(self, word: str) -> Iterator[str]:
        """What stands behind the word, or behind its end, in a token, where another word begins."""
        for length in range(1, len(word) + 1):
            for _, text in self._around(word[-length:], first=length < len(word)):
                if text and not (text[0].isalnum() and word[-1].isalnum()):
                    yield text

    def _around(self, text: str, *, first: bool = False, last: bool = False) -> Iterator[tuple[str, str]]:
        """What stands before and behind this text in each token that holds it. first, last: tokens begin or end with it."""
        vocabulary, written = self._vocabulary, self._texts.written(text)
        sought = _BETWEEN * first + written + _BETWEEN * last
        found = vocabulary.find(sought)
        while found >= 0:
            at = found + first
            begin, end = vocabulary.rindex(_BETWEEN, 0, at) + 1, vocabulary.index(_BETWEEN, at)
            sides = self._texts.read(vocabulary[begin:at]), self._texts.read(vocabulary[at + len(written) : end])
            if REPLACEMENT not in sides[0] + sides[1]:
                yield sides
            found = vocabulary.find(sought, found + 1)
