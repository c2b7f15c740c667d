"""The timed executor: steps take the time that a cost gives them and compute nothing. For simulation and load tests.

Owns when each step ends. Reads only the clock it was given; nothing runs in the background. Touches no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.engine.executor import EngineDescription
from common.engine.plan import Plan, StepResult
from common.ids import Int32Array


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a constant, and what each prompt token and each decode row adds."""

    step_s: float
    chunk_token_s: float
    decode_row_s: float

    def seconds(self, plan: Plan) -> float:
        return self.step_s + self.chunk_token_s * plan.chunk_tokens + self.decode_row_s * len(plan.decode_rows)


class Timeline:
    """When steps end: one after the other, as on a device. cost: of each step. clock: returns seconds."""

    def __init__(self, cost: StepCost, clock: Callable[[], float]) -> None:
        self.cost = cost
        self.clock = clock
        self._busy_until_s = 0.0

    def add(self, plan: Plan) -> float:
        """Returns when the plan's step ends, on the clock. It begins now, or when the step before it ends."""
        self._busy_until_s = max(self.clock(), self._busy_until_s) + self.cost.seconds(plan)
        return self._busy_until_s


@dataclass(slots=True, eq=False)
class TimedStep:
    """A step in flight until the clock reaches `ends_s`."""

    result: StepResult
    ends_s: float
    clock: Callable[[], float]
    layers_done: int = 0

    def poll(self) -> StepResult | None:
        return self.result if self.clock() >= self.ends_s else None


class TimedExecutor:
    """Implements `common.engine.executor.Executor`. Every sampled token is `token`."""

    def __init__(self, description: EngineDescription, timeline: Timeline, token: int = 10) -> None:
        self.description = description
        self._timeline = timeline
        self._token = token

    def launch(self, plan: Plan) -> TimedStep:
        tokens = np.full(len(plan.sampled_rows), self._token, dtype=np.int32)
        return TimedStep(StepResult(plan, tokens), self._timeline.add(plan), self._timeline.clock)

    def digest_pages(self, pages: Int32Array) -> bytes:
        """Zeros: nothing is ever computed into a page, so all pages are equal, and the CRC-32 of no bytes is 0."""
        return bytes(4 * len(pages))

    def close(self) -> None:
        """Nothing to stop."""
