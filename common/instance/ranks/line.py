"""A line between two ranks: messages are numbered, and silence is counted.

Owns the numbers of both directions and when the other side was last heard. Sends nothing itself. A line serves from the welcome
to the end, so it passes from the start-up to the loop that serves.
"""

from collections import deque

from common.errors import TandemError
from common.ids import InstanceId
from common.messages.ranks import Numbered

PING_S = 0.5
SILENCE_S = 3.0
"""An instance whose ranks do not hear from each other for so long ends. A rank that computes still answers: its loop does not
wait for steps."""
START_SILENCE_S = 30.0
"""The same while a model is loaded: importing and compiling keep the interpreter for seconds."""
PONGS_KEPT = 16
"""So many of the latest answers tell how two clocks differ. Clocks drift by less than a millisecond in that time."""


class RankLost(TandemError):
    """A rank of the instance is gone, silent or has failed, so the instance ends. The message names the rank and why."""

    retryable = True


class Line:
    """The line to one rank. to: its name as a sender. who: for people, such as "rank 2 (pid 17 on gpu-4)". now: as it begins."""

    def __init__(self, to: InstanceId, who: str, now: float) -> None:
        self.to = to
        self.who = who
        self.heard_s = now
        """When the other side was last heard."""
        self._sent = 0
        self._taken = 0
        self._offsets_s: deque[float] = deque(maxlen=PONGS_KEPT)

    def next(self) -> int:
        """The number of the message that is about to be sent."""
        self._sent += 1
        return self._sent

    def take(self, message: Numbered, now: float) -> None:
        """A message has arrived. Raises RankLost when one before it has not."""
        if message.number != self._taken + 1:
            raise RankLost(f"{self.who}: message {self._taken + 1} was lost: {message.number} came in its place")
        self._taken = message.number
        self.heard_s = now

    def check(self, now: float, silence_s: float = SILENCE_S) -> None:
        """Take in all mail before. Raises RankLost after too long a silence."""
        if now - self.heard_s > silence_s:
            raise RankLost(f"{self.who} has been silent for {now - self.heard_s:.1f} s")

    def compare_clocks(self, heard_s: float, now: float) -> None:
        """The other side has answered when its clock showed heard_s. Ours has shown `now` since the answer arrived, not before: a
        pause between the two would make leases end too late there."""
        self._offsets_s.append(heard_s - now)

    @property
    def clock_offset_s(self) -> float | None:
        """What to add to a time of our clock to have one of theirs that is no later; None before the first answer.

        An answer was sent before it arrived: at our time `now`, their clock shows at least what it said.
        """
        return max(self._offsets_s, default=None)
