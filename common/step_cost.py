"""What the steps of an instance cost in time.

Owns the four numbers, and how a flag spells them. Does not know who measures them, plans or requests.
"""

import math

import msgspec

from common.options import parse_numbers, require
from common.ranges import Seconds

STEP_COST = "0.005,0.00001,0.00002"
"""What a flag that is not given stands for."""


class StepCost(msgspec.Struct, frozen=True):
    """The seconds of a step, in four parts. 0: not measured, or next to nothing."""

    step_s: Seconds = 0.0
    """What every step takes."""
    chunk_token_s: Seconds = 0.0
    """What each prompt token adds."""
    decode_row_s: Seconds = 0.0
    """What each decode row adds, whatever it holds."""
    held_token_s: Seconds = 0.0
    """What each token of KV adds that the decode rows read."""

    @classmethod
    def parse(cls, text: str) -> "StepCost":
        """The cost that a flag spells as three or four numbers of seconds; "" stands for STEP_COST. Raises ConfigError."""
        rule = f"three numbers of seconds such as {STEP_COST}, or four"
        parts = parse_numbers(text or STEP_COST, "step-cost", float, rule)
        require(len(parts) in (3, 4) and all(0 <= cost < math.inf for cost in parts), "step-cost", rule, text)
        return cls(*parts)

    def seconds(self, chunk_tokens: int, decode_rows: int, held_tokens: float = 0) -> float:
        """How long a step with so much work takes."""
        row_s = self.decode_row_s * decode_rows + self.held_token_s * held_tokens
        return self.step_s + self.chunk_token_s * chunk_tokens + row_s

    def seconds_after(self, steps: int, decode_rows: int, held_tokens: int) -> float:
        """How long so many decode steps take that follow one with these rows and tokens: each row holds one more in every step.
        The same below 0: what the last of so many steps took, less than 0, where that one is the last."""
        grown = decode_rows * steps * (steps + 1) / 2
        return steps * self.seconds(0, decode_rows, held_tokens) + self.held_token_s * grown
