"""What is known of one answer: when its tokens came, how many there were, and how it ended.

Owns the arithmetic of times. Pure: the time is an argument. Knows neither HTTP nor JSON.
"""

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Answer:
    """One request and its answer. Times: seconds of one clock.

    due_s: when it was to be sent. began_s: from when TTFT and E2E count. token_s: when the last token came. last_s: when the last
    event did. gaps_s: between each token and the one before; tokens of one event have gaps of 0. output_tokens: what the server
    said at the end, or else what was counted. prompt_tokens: what the server said, or else what was asked. error: its kind; empty
    for a whole answer. message: what is known of the error.
    """

    session: int
    turn: int
    due_s: float
    asked_tokens: int
    prompt_tokens: int = 0
    began_s: float = 0.0
    sent_s: float = 0.0
    first_s: float = 0.0
    token_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    counted: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    text: str = ""
    error: str = ""
    message: str = ""

    def sent(self, now_s: float, counts_from_due: bool) -> None:
        """It is sent now. A timer may fire a little early: then the times count from the sending."""
        self.sent_s = now_s
        self.began_s = min(self.due_s, now_s) if counts_from_due else now_s

    def arrived(self, now_s: float, tokens: int) -> None:
        """An event with so many tokens came; with none, it only shows that the answer still went on.

        k tokens of one event are one gap and k - 1 gaps of 0.
        """
        if tokens > 0:
            if self.counted:
                self.gaps_s.append(now_s - self.token_s)
            else:
                self.first_s = now_s
            for _ in range(tokens - 1):
                self.gaps_s.append(0.0)
            self.counted += tokens
            self.token_s = now_s
        self.last_s = now_s

    def ended(self, now_s: float, error: str = "", message: str = "") -> None:
        """It is over: whole, or with an error."""
        self.ended_s = now_s
        self.output_tokens = self.output_tokens or self.counted
        self.error, self.message = error, message
        if not error and not self.counted:
            self.error, self.message = "empty", "the answer had no token"

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.began_s

    @property
    def e2el_s(self) -> float:
        """Until the last event that holds something of the answer."""
        return self.last_s - self.began_s

    @property
    def tpot_s(self) -> float | None:
        """Time of each token after the first; None for an answer of one token."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def queue_s(self) -> float:
        """How long after it was due it was sent."""
        return max(0.0, self.sent_s - self.due_s)
