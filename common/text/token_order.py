"""The order of one answer's tokens, which come from several instances over several sockets.

Owns the numbers: which token is next, which wait for a gap to close, where the answer ends. Keeps every token, in case the text
of some is lost on its way and must be made again. Does not know text, keys or time.
Tokens are numbered from 0, so each is taken once and in order, even if it arrives twice, late or early.

    taken │ next … gap … │ waiting │ … │ the ending's place
"""

from array import array
from collections.abc import Sequence

from common.messages import Ending


class TokenOrder:
    """first: the number of the first token that is expected."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._taken = array("i")
        self.next = first
        """Number of the next token: all before it were taken or are ready to be."""
        self._dropped_tokens = 0
        self._ready: list[int] = []
        self._waiting: dict[int, tuple[int, ...]] = {}
        self.waiting_tokens = 0
        self._ending: Ending | None = None
        self._ends_at = 2**63

    def put(self, first: int, token_ids: Sequence[int], ending: Ending | None) -> int:
        """Take in tokens; `first` is the number of the first of them. The first ending that comes counts.

        Returns how many tokens are of no use: they came before, or they lie after the ending.
        """
        dropped_before = self._dropped_tokens
        end = first + len(token_ids)
        if ending is not None and self._ending is None:
            self._ending, self._ends_at = ending, end
        if first > self.next and token_ids:
            self._let_wait(first, tuple(token_ids))
        else:
            next_before = self.next
            self._append(first, token_ids)
            if self.next > next_before and self._waiting:
                self._close_gap()
        return self._dropped_tokens - dropped_before

    def take(self) -> list[int]:
        """Returns the tokens that are in order and were not taken before."""
        ready, self._ready = self._ready, []
        self._taken.extend(ready)
        return ready

    def pour_into(self, other: "TokenOrder") -> None:
        """Give everything that has arrived to another order of the same answer, which may begin elsewhere."""
        other.put(self._first, [*self._taken, *self._ready], None)
        for first, token_ids in self._waiting.items():
            other.put(first, token_ids, None)
        if self._ending is not None:
            other.put(self._ends_at, (), self._ending)

    @property
    def ending(self) -> Ending | None:
        """The ending, once every token before it is there."""
        return self._ending if self._ends_at <= self.next else None

    @property
    def announced_ending(self) -> Ending | None:
        """The ending, even while tokens before it are missing."""
        return self._ending

    @property
    def has_gap(self) -> bool:
        """Whether something arrived that must wait for tokens before it."""
        return bool(self._waiting) or (self._ending is not None and self.ending is None)

    def _let_wait(self, first: int, token_ids: tuple[int, ...]) -> None:
        known = self._waiting.get(first, ())
        kept, again = (token_ids, known) if len(token_ids) > len(known) else (known, token_ids)
        self._waiting[first] = kept
        self._dropped_tokens += len(again)
        self.waiting_tokens += len(kept) - len(known)

    def _close_gap(self) -> None:
        for first in sorted(self._waiting):
            if first > self.next:
                return
            token_ids = self._waiting.pop(first)
            self.waiting_tokens -= len(token_ids)
            self._append(first, token_ids)

    def _append(self, first: int, token_ids: Sequence[int]) -> None:
        fresh = token_ids[max(0, self.next - first) : max(0, self._ends_at - first)]
        self._dropped_tokens += len(token_ids) - len(fresh)
        self._ready += fresh
        self.next += len(fresh)
