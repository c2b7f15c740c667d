"""What the clients of a simulated fleet measure: times to first tokens, times between tokens, and how answers ended.

Owns the figures, in compact arrays: an hour of load has millions of tokens. Knows no instances.
"""

from array import array
from collections import Counter
from collections.abc import Callable

from common.messages import Ending, Failed
from router.requests import RequestSpec
from simulation.client import Client
from simulation.clock import Clock


class Measured:
    """The figures of all clients together, in seconds, tokens and bytes.

    One for each answer that finished, in one order: turn (its number in its conversation, from 0), first_s (to the first token),
    pace_s (mean between its tokens; 0 for an answer of one), prompt_tokens, cached_tokens (of its prompt, not computed by whom it
    was given to), pushed_bytes (of its KV, all attempts).
    between_s: every time between two tokens of one answer, also of those that failed. endings: how many answers ended how.
    """

    def __init__(self) -> None:
        self.turn = array("L")
        self.first_s = array("d")
        self.pace_s = array("d")
        self.prompt_tokens = array("L")
        self.cached_tokens = array("L")
        self.pushed_bytes = array("Q")
        self.between_s = array("d")
        self.endings: Counter[str] = Counter()
        self.prompt_tokens_asked = self.tokens = 0

    def asked(self, prompt_tokens: int) -> None:
        self.prompt_tokens_asked += prompt_tokens

    def ended(self, how: str) -> None:
        self.endings[how] += 1


class MeasuredClient(Client):
    """One request of one choice. It reads what comes as soon as it comes.

    turn: its number in its conversation, from 0. over: called when the answer has ended, with its tokens, or None when it failed.
    """

    def __init__(
        self, spec: RequestSpec, turn: int, clock: Clock, measured: Measured, over: Callable[[list[int] | None], None]
    ) -> None:
        super().__init__(spec.request_id)
        self.outbox.wake = self._read
        self.pushed_bytes = 0
        self._turn = turn
        self._prompt_tokens = spec.prompt_tokens
        self._clock = clock
        self._measured = measured
        self._over = over
        self._asked_s = self._first_s = self._latest_s = clock.now
        self._said: list[int] = []
        self._cached_tokens = 0

    def _read(self) -> None:
        now, measured = self._clock.now, self._measured
        for delta in self.outbox.take():
            for token in delta.token_ids:
                if self._said:
                    measured.between_s.append(now - self._latest_s)
                else:
                    self._first_s = now
                self._said.append(token)
                self._latest_s = now
            measured.tokens += len(delta.token_ids)
            self._cached_tokens += delta.cached_tokens
            if delta.ending is not None:
                self._end(delta.ending)

    def _end(self, ending: Ending) -> None:
        if isinstance(ending, Failed):
            self._measured.ended(f"failed: {ending.kind}")
            self._over(None)
            return
        measured = self._measured
        measured.ended(f"finished: {ending.reason}")
        measured.turn.append(self._turn)
        measured.first_s.append(self._first_s - self._asked_s)
        measured.pace_s.append((self._latest_s - self._first_s) / max(1, len(self._said) - 1))
        measured.prompt_tokens.append(self._prompt_tokens)
        measured.cached_tokens.append(self._cached_tokens)
        measured.pushed_bytes.append(self.pushed_bytes)
        self._over(self._said)
