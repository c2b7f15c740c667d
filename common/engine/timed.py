"""The timed executor: steps take the time that a cost says and compute nothing. For simulation and for load tests of the rest.

Owns when each step ends. Reads only the clock it was given; nothing runs in the background. Touches no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.engine.executor import EngineDescription
from common.engine.plan import Plan, StepResult


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a constant, and what each prompt token and each decode row adds."""

    step_s: float
    chunk_token_s: float
    decode_row_s: float

    def seconds(self, plan: Plan) -> float:
        return self.step_s + self.chunk_token_s * plan.chunk_tokens + self.decode_row_s * len(plan.decode_rows)


@dataclass(slots=True, eq=False)
class TimedStep:
    """A step in flight until the clock reaches `ends_s`."""

    result: StepResult
    ends_s: float
    clock: Callable[[], float]

    def poll(self) -> StepResult | None:
        return self.result if self.clock() >= self.ends_s else None


class TimedExecutor:
    """Implements `common.engine.executor.Executor`. Every sampled token is `token`."""

    def __init__(self, description: EngineDescription, cost: StepCost, clock: Callable[[], float], token: int = 10) -> None:
        self._description = description
        self._cost = cost
        self._clock = clock
        self._token = token
        self._busy_until_s = 0.0

    @property
    def description(self) -> EngineDescription:
        return self._description

    def launch(self, plan: Plan) -> TimedStep:
        """One step after the other, as on a device: this one begins when the last one ends."""
        seconds = self._cost.seconds(plan)
        self._busy_until_s = max(self._clock(), self._busy_until_s) + seconds
        tokens = np.full(len(plan.sampled_rows), self._token, dtype=np.int32)
        return TimedStep(StepResult(plan, tokens, seconds), self._busy_until_s, self._clock)

    def close(self) -> None:
        """Nothing to stop."""
