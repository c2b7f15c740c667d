"""Which tokens keep an answer with a grammar UTF-8.

Owns the masks for that. Knows the bytes of the vocabulary, and no grammars.

xgrammar 0.2 takes some bytes for a character that are none: surrogates, and characters written with more bytes than they need. A
client would see several replacement characters in place of one. What else would be no UTF-8 it refuses itself.
"""

import re
from collections.abc import Sequence

import numpy as np

from common.ids import Int64Array

_WRONG_BEHIND = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F)}
"""First bytes of characters, and the continuation bytes that may not follow them (RFC 3629, section 4)."""
_WRONG = re.compile(b"|".join(b"%c[%c-%c]" % (first, low, high) for first, (low, high) in _WRONG_BEHIND.items()), re.DOTALL)


class Utf8:
    """vocabulary: the bytes of each token. words: of 64 tokens each, in a mask."""

    def __init__(self, vocabulary: Sequence[bytes], words: int) -> None:
        self._words = words
        never = [token for token, data in enumerate(vocabulary) if data and _WRONG.search(data)]
        self._ever = self._all_but(never) if never else None
        begins: dict[int, list[int]] = {}
        for token, data in enumerate(vocabulary):
            if data and 0x80 <= data[0] < 0xC0:
                begins.setdefault(data[0], []).append(token)
        masks = {
            first: self._all_but([token for byte in range(low, high + 1) for token in begins.get(byte, ())])
            for first, (low, high) in _WRONG_BEHIND.items()
        }
        self._behind = {token: masks[data[-1]] for token, data in enumerate(vocabulary) if data and data[-1] in masks}

    def narrow(self, mask: Int64Array, before: int | None) -> None:
        """Take the tokens out of the mask, [words], that may not follow this token of the answer. None: the answer is empty."""
        if self._ever is not None:
            mask &= self._ever
        if before in self._behind:
            mask &= self._behind[before]

    def _all_but(self, tokens: list[int]) -> Int64Array:
        bits = np.ones(self._words * 64, dtype=np.uint8)
        bits[tokens] = 0
        return np.packbits(bits, bitorder="little").view(np.int64)
