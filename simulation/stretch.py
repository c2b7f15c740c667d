"""Decode steps that are all alike, taken at once: what makes hours of a simulated fleet cheap.

Owns the stretch of one instance: from a turn after which nothing but tokens can come, until a step that changes more, a message
or a deadline. The scheduler says how long it may last. What comes meanwhile ends it sooner: then only what is done of it counts.

    steps     ├─ in flight ─┼─ spared ─┼─ spared ─┼─ spared ─┼ …      those in flight are moved behind the ones that are spared
    turns     ▲ begin                         ▲ mail: end

Tokens of a stretch are told when it ends. The fleet keeps how long ago the last of them came, for the clients that measure.
"""

from bisect import bisect_right
from collections import deque
from itertools import chain
from typing import TypeAlias

import numpy as np

from common.executor import EngineDescription, StepPlan
from common.ids import Int32Array, RequestId
from common.instance.worker import InstanceWorker
from common.messages import TokenBatch
from common.step_cost import StepCost
from decode.scheduler import DecodeScheduler
from engine.timed import Pace, TimedExecutor, TimedStep

LateTokens: TypeAlias = dict[tuple[RequestId, int], float]
LEAST_STEPS = 4
"""Fewer are not worth the arithmetic."""


class SparingExecutor(TimedExecutor):
    """Knows its last steps, and answers of which one word stands for all but the first of its words, which ends them."""

    def __init__(self, description: EngineDescription, pace: Pace, words: Int32Array) -> None:
        super().__init__(description, pace, words)
        self.word = int(words[1])
        self.last: deque[TimedStep] = deque(maxlen=2)
        self.held_tokens = 0
        """What the rows of the last step hold, where it has been moved."""

    def launch(self, plan: StepPlan) -> TimedStep:
        step = super().launch(plan)
        self.last.append(step)
        self.held_tokens = plan.held_tokens
        return step

    @property
    def cost(self) -> StepCost:
        return self._pace.cost

    def spare_steps(self, rows: Int32Array) -> int:
        """How many steps sample the same word for each of these rows, as do the two before."""
        place = self._next[rows] % len(self._words)
        return 0 if place.min() < 2 else int(len(self._words) - 1 - place.max())

    def move(self, rows: Int32Array, steps: int) -> None:
        """So many steps like the last one come before the last two; below 0: fewer than were told. The time that reading more and
        more tokens takes is counted in the steps that come, and the last two take as long as before: the sum is the same."""
        seconds = self._pace.repeat(rows, steps, self.held_tokens)
        self.held_tokens += steps * len(rows)
        self._next[rows] += steps
        for step in self.last:
            step.ends_s += seconds


class Stretch:
    """The stretch of an instance, while it decodes. late_s: gets the seconds since the last token that is told late, by its
    request and how many tokens the answer has with it."""

    def __init__(self, worker: InstanceWorker, executor: SparingExecutor, late_s: LateTokens) -> None:
        self._worker, self._executor, self._late_s = worker, executor, late_s
        self._scheduler: DecodeScheduler
        self._rows: Int32Array = np.empty(0, dtype=np.int32)
        self._steps = 0
        """How many it spares; 0: there is none."""
        self._first_ends_s = 0.0
        """When the first of them ends."""
        self._held_tokens = 0
        """What its rows hold before them."""

    def begin(self, now: float) -> None:
        """After a turn: spare as many steps as may be."""
        last, scheduler = self._executor.last, self._worker.scheduler
        if not isinstance(scheduler, DecodeScheduler) or len(last) < 2 or last[0].ends_s <= now:
            return
        before, after = last[0].result.plan, last[1].result.plan
        rows = after.decode_rows
        if before.chunks or after.chunks or not np.array_equal(before.decode_rows, rows):
            return
        steps = min(scheduler.spare_steps(rows), self._executor.spare_steps(rows))
        if steps >= LEAST_STEPS:
            self._scheduler, self._rows, self._steps, self._first_ends_s = scheduler, rows, steps, last[0].ends_s
            self._held_tokens = self._executor.held_tokens
            self._executor.move(rows, steps)

    def end(self, now: float) -> None:
        """Before a turn: what is done of it counts, and steps go on one by one. Idempotent."""
        spared, self._steps = self._steps, 0
        if not spared:
            return
        cost = self._executor.cost

        def passed_s(steps: int) -> float:
            return cost.seconds_after(steps, len(self._rows), self._held_tokens)

        done = bisect_right(range(spared), now - self._first_ends_s, key=passed_s)
        self._executor.move(self._rows, done - spared)
        if done:
            late_s = now - self._first_ends_s - passed_s(done - 1)
            actions = self._scheduler.skip(self._rows, done, self._executor.word)
            batches = [action.message for action in actions if isinstance(action.message, TokenBatch)]
            for delta in chain.from_iterable(batch.deltas for batch in batches):
                self._late_s[delta.key.request_id, delta.first + done] = late_s
            self._worker.skip(passed_s(done), actions)
