"""The order of one answer's tokens, which come from several instances over several sockets.

Owns the numbers: which token is next, which wait for a gap to close, where the answer ends. Keeps every token, and its log
probability if it has one, in case the text of some is lost on its way and must be made again. Does not know text, keys or time.
Tokens are numbered from 0, so each is taken once and in order, even if it arrives twice, late or early.

    taken │ next … gap … │ waiting │ … │ the ending's place
"""

from array import array
from collections.abc import Sequence

from common.messages import Ending, TokenLogprob, TokenLogprobs, pack_logprobs, unpack_logprobs


class TokenOrder:
    """first: the number of the first token that is expected. has_logprobs: each token comes with its log probability, which goes
    where the token goes."""

    def __init__(self, first: int = 0, has_logprobs: bool = False) -> None:
        self._first = first
        self._taken = array("i")
        self.next = first
        """Number of the next token: all before it were taken or are ready to be."""
        self._dropped_tokens = 0
        self._ready: list[int] = []
        self._waiting: dict[int, tuple[tuple[int, ...], TokenLogprobs]] = {}
        self.waiting_tokens = 0
        self._ending: Ending | None = None
        self._ends_at = 2**63
        self.has_logprobs = has_logprobs
        self._taken_logprobs: list[bytes] = []
        """Packed, of all tokens that were taken."""
        self._ready_logprobs: list[TokenLogprob] = []
        self._prompt_logprobs = b""
        """Packed."""
        self.cached_tokens = 0
        """They are told with token 0, as the prompt's log probabilities."""

    def put(self, first: int, token_ids: Sequence[int], ending: Ending | None, logprobs: Sequence[TokenLogprob] = ()) -> int:
        """Take in tokens; `first` is the number of the first of them. The first ending that comes counts. logprobs: one for each
        token, if this answer has them.

        Returns how many tokens are of no use: they came before, or they lie after the ending.
        """
        dropped_before = self._dropped_tokens
        end = first + len(token_ids)
        if ending is not None and self._ending is None:
            self._ending, self._ends_at = ending, end
        if first > self.next and token_ids:
            self._let_wait(first, tuple(token_ids), tuple(logprobs))
        else:
            next_before = self.next
            self._append(first, token_ids, logprobs)
            if self.next > next_before and self._waiting:
                self._close_gap()
        return self._dropped_tokens - dropped_before

    def take(self) -> list[int]:
        """Returns the tokens that are in order and were not taken before. Take their log probabilities too, if it has them."""
        ready, self._ready = self._ready, []
        self._taken.extend(ready)
        return ready

    def take_logprobs(self) -> list[TokenLogprob]:
        """Returns those of the tokens that the last `take` returned."""
        ready, self._ready_logprobs = self._ready_logprobs, []
        if ready:
            self._taken_logprobs.append(pack_logprobs(ready))
        return ready

    @property
    def prompt_logprobs(self) -> TokenLogprobs:
        """They come with token 0, whoever tells it, and go with it."""
        return unpack_logprobs([self._prompt_logprobs]) if self._prompt_logprobs else ()

    @prompt_logprobs.setter
    def prompt_logprobs(self, logprobs: TokenLogprobs) -> None:
        self._prompt_logprobs = pack_logprobs(logprobs)

    def pour_into(self, other: "TokenOrder") -> None:
        """Give everything that has arrived to another order of the same answer, which may begin elsewhere."""
        if other.has_logprobs and not self.has_logprobs:
            return  # what is here lacks them
        logprobs = [*unpack_logprobs(self._taken_logprobs), *self._ready_logprobs]
        other.put(self._first, [*self._taken, *self._ready], None, logprobs)
        for first, (token_ids, waiting) in self._waiting.items():
            other.put(first, token_ids, None, waiting)
        if self._ending is not None:
            other.put(self._ends_at, (), self._ending)
        other._prompt_logprobs = self._prompt_logprobs
        other.cached_tokens = self.cached_tokens

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

    def _let_wait(self, first: int, token_ids: tuple[int, ...], logprobs: TokenLogprobs) -> None:
        known = self._waiting.get(first, ((), ()))
        came = (token_ids, logprobs)
        kept, again = (came, known) if len(token_ids) > len(known[0]) else (known, came)
        self._waiting[first] = kept
        self._dropped_tokens += len(again[0])
        self.waiting_tokens += len(kept[0]) - len(known[0])

    def _close_gap(self) -> None:
        for first in sorted(self._waiting):
            if first > self.next:
                return
            token_ids, logprobs = self._waiting.pop(first)
            self.waiting_tokens -= len(token_ids)
            self._append(first, token_ids, logprobs)

    def _append(self, first: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        begin, end = max(0, self.next - first), max(0, self._ends_at - first)
        fresh = token_ids[begin:end]
        self._dropped_tokens += len(token_ids) - len(fresh)
        self._ready += fresh
        self.next += len(fresh)
        if self.has_logprobs:
            assert len(logprobs) == len(token_ids), "each token has its log probability"
            self._ready_logprobs += logprobs[begin:end]
