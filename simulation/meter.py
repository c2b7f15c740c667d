"""The CPU time of the processes of one role, by what they do.

Owns the sample. Some turns are timed and stand for all: a clock of CPU time costs as much as a small message. The simulated clock
never depends on it, so a run can be repeated exactly however long its turns took.
"""

import time
from collections.abc import Callable, Mapping

STRIDE = 13
"""One turn in so many is timed. Prime, so that it meets every member of a fleet whose size is a round number."""


class Meter:
    """One for all processes of a role, whose turns do not overlap. clock: CPU seconds of this thread."""

    def __init__(self, clock: Callable[[], float] = time.thread_time, stride: int = STRIDE) -> None:
        self._clock = clock
        self._stride = stride
        self._turns = self._timed = 0
        self._seconds: dict[str, float] = {}
        self._since_s = 0.0
        self.timing = False
        """Whether the present turn is timed."""

    def begin(self) -> None:
        """A turn begins."""
        self._turns += 1
        self.timing = self._turns % self._stride == 0
        if self.timing:
            self._timed += 1
            self._since_s = self._clock()

    def lap(self, what: str) -> None:
        """What was done since the last lap, or since the turn began, was this."""
        if self.timing:
            now = self._clock()
            self._seconds[what] = self._seconds.get(what, 0.0) + now - self._since_s
            self._since_s = now

    def clear(self) -> None:
        """Begin to measure anew."""
        self._turns = self._timed = 0
        self._seconds.clear()

    def seconds(self) -> Mapping[str, float]:
        """CPU seconds by what was done, as far as the sample tells."""
        share = self._timed / self._turns if self._turns else 1.0
        return {what: seconds / share for what, seconds in self._seconds.items()}
