"""The outbox: what one client has not read yet.

Owns the unread deltas of one HTTP request, and counts them against a limit. Does not know HTTP, sockets or loops: the reader
gives a callable that wakes it.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from common.messages import Ending

DELTA_CHARS = 32
"""What a delta counts besides its text, so that the limit bounds empty ones too."""
UNREAD_LIMIT_CHARS = 1_000_000


class ChoiceDelta(msgspec.Struct, frozen=True):
    """News of one choice: text (maybe empty), the tokens behind it, and the ending if this is the last."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    ending: Ending | None = None


class Outbox:
    """Unread deltas of every choice of one HTTP request, in order.

    limit_chars: a request whose unread_chars exceed it is ended, because its client reads too slowly. Endings are still taken in.
    """

    def __init__(self, wake: Callable[[], object], limit_chars: int = UNREAD_LIMIT_CHARS) -> None:
        self._wake = wake
        self.limit_chars = limit_chars
        self._deltas: deque[ChoiceDelta] = deque()
        self.unread_chars = 0

    def put(self, delta: ChoiceDelta) -> None:
        self._deltas.append(delta)
        self.unread_chars += len(delta.text) + DELTA_CHARS
        self._wake()

    def take(self) -> list[ChoiceDelta]:
        """Everything that is unread."""
        deltas = list(self._deltas)
        self._deltas.clear()
        self.unread_chars = 0
        return deltas
