"""The outbox: what one client has not read yet.

Owns the unread deltas of one HTTP request, and counts them against a limit. Does not know HTTP, sockets or loops: the reader
gives a callable that wakes it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(slots=True, eq=False)
class Outbox:
    """Unread deltas of every choice of one HTTP request, in order. wake: called when there is one more.

    limit_chars: a request whose unread_chars exceed it is ended, because its client reads too slowly. Endings are still taken in.
    """

    wake: Callable[[], object]
    limit_chars: int = UNREAD_LIMIT_CHARS
    unread_chars: int = 0
    unread: list[ChoiceDelta] = field(default_factory=list)

    def put(self, delta: ChoiceDelta) -> None:
        self.unread.append(delta)
        self.unread_chars += len(delta.text) + DELTA_CHARS
        self.wake()

    def take(self) -> list[ChoiceDelta]:
        """Everything that is unread."""
        unread, self.unread, self.unread_chars = self.unread, [], 0
        return unread
