"""What an instance remembers of the tokens that it emitted, so that it can send them again.

Owns the answers of requests that are over, packed and within a bound of bytes, the oldest out first. Open requests keep their own
(`Request.token_ids`). Does not know time: the request table says when a key is forgotten.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from sys import getsizeof
from typing import Self

from common.ids import Key
from common.messages import Ending, TokenDelta

LIMIT_BYTES = 16 * 2**20
ENTRY_BYTES = 400
"""What an answer takes besides its tokens, about."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """What was emitted of one request. first: number of the first token. ending: the one that was emitted, if there was one.

    While the request is open its tokens are a list, because that is the fastest to append to.
    """

    first: int
    token_ids: Sequence[int]
    ending: Ending | None

    @classmethod
    def nothing(cls, first: int, ending: Ending) -> Self:
        """No token, only an ending."""
        return cls(first, (), ending)

    def since(self, key: Key, number: int) -> TokenDelta | None:
        """The tokens from this number on, and the ending; None when that is nothing."""
        at = max(0, number - self.first)
        token_ids = tuple(self.token_ids[at:])
        if not token_ids and self.ending is None:
            return None
        return TokenDelta(key, self.first + min(at, len(self.token_ids)), token_ids, self.ending)


class TokenMemory:
    """limit_bytes: most that all answers take together."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._answers: dict[Key, Emitted] = {}
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def keep(self, key: Key, emitted: Emitted) -> None:
        """Remember an answer, if there is anything to tell of it."""
        if not emitted.token_ids and emitted.ending is None:
            return
        self.forget(key)
        self._answers[key] = packed = replace(emitted, token_ids=array("i", emitted.token_ids))
        self.used_bytes += _bytes(packed)
        while self.used_bytes > self._limit_bytes:
            self.forget(next(iter(self._answers)))

    def get(self, key: Key) -> Emitted | None:
        return self._answers.get(key)

    def forget(self, key: Key) -> None:
        """Idempotent."""
        known = self._answers.pop(key, None)
        if known is not None:
            self.used_bytes -= _bytes(known)


def _bytes(emitted: Emitted) -> int:
    return getsizeof(emitted.token_ids) + ENTRY_BYTES
