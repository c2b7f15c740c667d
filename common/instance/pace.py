"""The pace of an instance: what its steps take, measured while it works.

Owns the fit of the seconds of steps to what they computed:

    seconds = step_s + chunk_token_s * chunk tokens + decode_row_s * decode rows

Does not know who uses it, requests, or clocks.

It is a least-squares fit over the latest steps: what is older counts less and less. Each step's error counts as a share of its
seconds, so that a step that was held up for seconds, as when a kernel is compiled, weighs no more than another one. When steps
get slower, those before count as if they had been as slow, for many fast ones would outweigh the slow ones else. None of the
three is ever negative. What the latest steps do not tell stays as it was: an instance that has computed no prompt for an hour
still knows how fast it was, and one whose steps are all alike divides their seconds in some way that is right for such steps.
"""

from collections import deque
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from common.executor import Plan

Vector = NDArray[np.float64]
"""[3]: of a step, a prompt token and a decode row. A matrix is [3, 3]."""

HALF_LIFE_STEPS = 256
"""After as many steps, a step counts half."""
MOST_STEPS = 4096
"""Steps between two fits that are looked at, the latest ones."""
LEAST_STEPS = 8
"""Before as many steps there is no pace: the first ones may be slow."""
FORMER_SHARE = 1e-4
"""How much the former fit counts, compared with the most that the steps have ever told."""


@dataclass(frozen=True, slots=True)
class StepPace:
    """Seconds of a step, and what each prompt token and each decode row adds. 0: not measured, or next to nothing."""

    step_s: float = 0.0
    chunk_token_s: float = 0.0
    decode_row_s: float = 0.0


class PaceMeter:
    """Of one instance."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, int, float]] = deque(maxlen=MOST_STEPS)
        """Since the last fit: how many steps came back together, their chunk tokens, their decode rows, and their seconds."""
        self._ended_s = float("-inf")
        self._count = 0
        self._told: Vector = np.zeros((3, 3))
        self._seconds: Vector = np.zeros(3)
        self._weight = 0.0
        """How many steps that is, where each counts by its share: as much as the fit expects it to take of its seconds."""
        self._most: Vector = np.zeros(3)
        """The largest that the diagonal of `_told` has been."""
        self._fit: Vector = np.zeros(3)
        self._pace = StepPace()

    def step(self, plan: Plan, launched_s: float, ended_s: float) -> None:
        """A step has come back. It began when it was launched, or when the one before it ended. Steps that come back in one
        turn count as one: nobody knows when the first of them ended."""
        self._count += 1
        steps, tokens, rows, seconds = 1, plan.chunk_tokens, len(plan.decode_rows), ended_s - max(launched_s, self._ended_s)
        if ended_s == self._ended_s and self._steps:
            before = self._steps.pop()
            steps, tokens, rows, seconds = before[0] + 1, before[1] + tokens, before[2] + rows, before[3]
        self._steps.append((steps, tokens, rows, seconds))
        self._ended_s = ended_s

    def read(self) -> StepPace:
        """The pace of late. Fits what has come since the last call."""
        if self._steps and self._count >= LEAST_STEPS:
            table = np.array(self._steps)
            self._steps.clear()
            self._take(table[:, :3], table[:, 3])
            self._pace = StepPace(*self._fit.tolist())
        return self._pace

    def _take(self, what: Vector, seconds: Vector) -> None:
        """what: [steps, 3]. seconds: [steps]."""
        expected = what @ self._fit
        if not expected.all():
            expected = np.full_like(seconds, seconds.mean())
        weights = 1 / np.maximum(np.maximum(seconds, expected), 1e-6)
        weighed = what * weights[:, None]
        shares = weights * expected
        kept = 0.5 ** (len(seconds) / HALF_LIFE_STEPS)
        self._told = self._told * kept + weighed.T @ weighed
        self._seconds = self._seconds * kept + weighed.T @ (seconds * weights)
        self._weight = self._weight * kept + float(shares @ shares)
        self._most = np.maximum(self._most, self._told.diagonal())
        former = self._most * FORMER_SHARE
        self._fit = _solve(self._told + np.diag(former), self._seconds + former * self._fit, np.flatnonzero(self._most).tolist())
        told = float(self._fit @ self._told @ self._fit)
        if told > self._weight > 0:  # older steps were faster, and would count for more than they are
            scale = self._weight / told
            self._told, self._seconds, self._most = self._told * scale, self._seconds * scale, self._most * scale
        self._weight = min(self._weight, told)


def _solve(matrix: Vector, right: Vector, seen: list[int]) -> Vector:
    """The x >= 0 that minimizes x·matrix·x / 2 - right·x; 0 but for the numbers in `seen`. matrix: positive definite.

    What of the answer is above 0 solves its own equations. So of all sets that solve theirs with nothing below 0, it is the best.
    """
    best, most = np.zeros(3), 0.0
    for chosen in map(list, chain.from_iterable(combinations(seen, size) for size in range(1, len(seen) + 1))):
        x = np.linalg.solve(matrix[np.ix_(chosen, chosen)], right[chosen])
        gain = float(right[chosen] @ x)
        if x.min() >= 0 and gain > most:
            best, most = np.zeros(3), gain
            best[chosen] = x
    return best
