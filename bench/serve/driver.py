"""The driver: which request is sent when, and what follows when it ends.

Owns the order of requests. Does no I/O: the clock and the client are ports, so a test runs it in simulated time. A session whose
time has come is started whatever else is open (open loop), or when one of at most `most_open` places is free (closed loop). It
keeps its place until its last turn has ended. A later turn is due when the one before it has ended; a turn that fails ends its
session. Times of an open load count from when a request was due, so that requests which a slow server kept from being sent are
not forgotten (coordinated omission).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.serve.answers import Answer
from bench.serve.workloads.sessions import Session

EARLY_S = 0.0005
"""Timers have a resolution of a millisecond: a request that is due within half of that is sent with the others."""


class Clock(Protocol):
    """Seconds, and calls at a time. A call may come a little early or late."""

    def now_s(self) -> float: ...

    def call_at(self, at_s: float, call: Callable[[], object]) -> object: ...


Send = Callable[[Session, list[str], Answer, Callable[[Answer], object]], object]
"""Sends the turn of a session that follows these answers, and calls back once with its answer when that is over."""


class Driver:
    """due_s: of each session, from the beginning; never falling. most_open: sessions; 0: no limit. counts_from_due: whether times
    count from when a request was due, also where it was sent later. over: called once, when everything has ended."""

    def __init__(
        self,
        sessions: Sequence[Session],
        due_s: Sequence[float],
        clock: Clock,
        send: Send,
        over: Callable[[], object],
        *,
        most_open: int = 0,
        counts_from_due: bool = True,
    ) -> None:
        assert len(sessions) == len(due_s)
        self._sessions, self._due_s, self._clock, self._send, self._over = sessions, due_s, clock, send, over
        self._most_open, self._counts_from_due = most_open, counts_from_due
        self._waiting: deque[int] = deque()
        self._next = self.ended = 0
        self._said: dict[int, list[str]] = {}
        self.open = 0
        """Sessions that were started and have not ended."""
        self.began_s = self._over_s = 0.0
        self.answers: list[Answer] = []
        """Of every request that was sent, in this order."""
        self.going: dict[int, Answer] = {}
        """Of each open session, the one that it waits for."""
        self.failed = self.tokens = 0
        """Requests that failed, and tokens of those that have ended."""

    @property
    def elapsed_s(self) -> float:
        """Since the beginning, or of the whole run when it is over."""
        return (self._over_s or self._clock.now_s()) - self.began_s

    def start(self) -> None:
        """Begin now."""
        self.began_s = self._clock.now_s()
        if self._sessions:
            self._clock.call_at(self.began_s + self._due_s[0], self._look)
        else:
            self._over()

    def _look(self) -> None:
        """Start the sessions whose time has come, and arm the timer for the next one."""
        now_s = self._clock.now_s()
        while self._next < len(self._sessions) and self.began_s + self._due_s[self._next] <= now_s + EARLY_S:
            self._waiting.append(self._next)
            self._next += 1
        if self._next < len(self._sessions):
            self._clock.call_at(self.began_s + self._due_s[self._next], self._look)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and (not self._most_open or self.open < self._most_open):
            number = self._waiting.popleft()
            self.open += 1
            self._ask(number, [], self.began_s + self._due_s[number])

    def _ask(self, number: int, said: list[str], due_s: float) -> None:
        turn = self._sessions[number].turns[len(said)]
        answer = Answer(number, len(said), due_s, turn.output_tokens, turn.input_tokens)
        self.answers.append(answer)
        self._said[number], self.going[number] = said, answer
        answer.sent(self._clock.now_s(), self._counts_from_due)
        self._send(self._sessions[number], said, answer, self._take)

    def _take(self, answer: Answer) -> None:
        said = [*self._said.pop(answer.session), answer.text]
        del self.going[answer.session]
        self.failed += bool(answer.error)
        self.tokens += answer.counted
        if not answer.error and len(said) < len(self._sessions[answer.session].turns):
            self._ask(answer.session, said, answer.ended_s)
            return
        self.open -= 1
        self.ended += 1
        if self.ended == len(self._sessions):
            self._over_s = self._clock.now_s()
            self._over()
        else:
            self._fill()
