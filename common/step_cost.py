"""What the steps of an instance cost in time.

Owns the three numbers, and how a flag spells them. Does not know who measures them, plans or requests.
"""

import math

import msgspec

from common.options import require
from common.ranges import Seconds

STEP_COST = "0.005,0.00001,0.00002"
"""What a flag that is not given stands for."""


class StepCost(msgspec.Struct, frozen=True):
    """The seconds of a step, in three parts. 0: not measured, or next to nothing."""

    step_s: Seconds = 0.0
    """What every step takes."""
    chunk_token_s: Seconds = 0.0
    """What each prompt token adds."""
    decode_row_s: Seconds = 0.0
    """What each decode row adds."""

    @classmethod
    def parse(cls, text: str) -> "StepCost":
        """The cost that a flag spells as three numbers of seconds; "" stands for STEP_COST. Raises ConfigError."""
        try:
            step_s, chunk_token_s, decode_row_s = (float(part) for part in (text or STEP_COST).split(","))
        except ValueError:
            step_s = chunk_token_s = decode_row_s = -1.0
        is_valid = all(0 <= cost < math.inf for cost in (step_s, chunk_token_s, decode_row_s))
        require(is_valid, "step-cost", f"three numbers of seconds such as {STEP_COST}", text)
        return cls(step_s, chunk_token_s, decode_row_s)

    def seconds(self, chunk_tokens: int, decode_rows: int) -> float:
        """How long a step with so much work takes."""
        return self.step_s + self.chunk_token_s * chunk_tokens + self.decode_row_s * decode_rows
