"""What the clients of a simulated fleet measure: times to first tokens, times between tokens, and how answers ended.

Owns the figures, in compact arrays: an hour of load has millions of tokens. Knows no instances.
"""

from array import array
from collections import Counter

from common.ids import RequestId
from common.messages import Ending, Failed
from simulation.client import Client
from simulation.clock import Clock


class Measured:
    """The figures of all clients together, in seconds and tokens; first_s and pace_s have one for each answer that finished.

    first_s: to the first token. pace_s: mean between its tokens; 0 for an answer of one. between_s: every time between two
    tokens of one answer, also of those that failed. endings: how many answers ended how.
    """

    def __init__(self) -> None:
        self.first_s = array("d")
        self.pace_s = array("d")
        self.between_s = array("d")
        self.endings: Counter[str] = Counter()
        self.prompt_tokens = self.tokens = 0
        self.open = 0
        self.began_s: float | None = None
        self.ended_s = 0.0

    def asked(self, now: float, prompt_tokens: int) -> None:
        self.began_s = now if self.began_s is None else self.began_s
        self.ended_s = max(self.ended_s, now)
        self.prompt_tokens += prompt_tokens
        self.open += 1

    def ended(self, now: float, how: str) -> None:
        self.endings[how] += 1
        self.ended_s = max(self.ended_s, now)
        self.open -= 1


class MeasuredClient(Client):
    """One request of one choice. It reads what comes as soon as it comes."""

    def __init__(self, request_id: RequestId, clock: Clock, measured: Measured) -> None:
        super().__init__(request_id)
        self.outbox.wake = self._read
        self._clock = clock
        self._measured = measured
        self._asked_s = self._first_s = self._latest_s = clock.now
        self._tokens = 0

    def _read(self) -> None:
        now, measured = self._clock.now, self._measured
        for delta in self.outbox.take():
            for _ in delta.token_ids:
                if self._tokens:
                    measured.between_s.append(now - self._latest_s)
                else:
                    self._first_s = now
                self._tokens, self._latest_s = self._tokens + 1, now
            measured.tokens += len(delta.token_ids)
            if delta.ending is not None:
                self._end(delta.ending, now)

    def _end(self, ending: Ending, now: float) -> None:
        if isinstance(ending, Failed):
            self._measured.ended(now, f"failed: {ending.kind}")
            return
        self._measured.ended(now, f"finished: {ending.reason}")
        self._measured.first_s.append(self._first_s - self._asked_s)
        self._measured.pace_s.append((self._latest_s - self._first_s) / max(1, self._tokens - 1))
