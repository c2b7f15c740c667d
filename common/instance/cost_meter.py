"""What an instance's steps cost, measured: a fit over the steps that have come back.

Owns the fit and how fast it forgets. Knows plans and times. Does not know who computes steps or who asks.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain, combinations
from operator import add

import numpy as np
from numpy.typing import NDArray

from common.executor import StepPlan
from common.step_cost import StepCost

Vector = NDArray[np.float64]
"""[4]: of a step, a prompt token, a decode row and a token that such a row holds. A matrix is [4, 4]."""
NUMBERS = len(StepCost.__struct_fields__)

HALF_LIFE_STEPS = 256
"""After as many steps, a step counts half."""
MOST_STEPS = 4096
"""Steps between two fits that are looked at, the latest ones."""
LEAST_STEPS = 8
"""Before as many steps there is no cost: the first ones may be slow."""
FORMER_SHARE = 1e-4
"""How much the former fit counts, compared with the most that the steps have ever told."""


class CostMeter:
    """Fits the cost of this instance's steps to the seconds that they took.

        seconds = step_s + chunk_token_s * chunk tokens + decode_row_s * decode rows + held_token_s * tokens that these hold

    It is a least-squares fit over the latest steps: older ones count less and less. Each step's error counts as a share of its
    seconds, so a step that was held up for seconds, as when a kernel is compiled, weighs no more than another one. When steps
    get slower, those before count as if they had been as slow; otherwise many fast ones would outweigh the slow ones. None of the
    four numbers is ever negative. What the latest steps do not show stays as it was: an instance that has computed no prompt for
    an hour still knows how fast it was, and one whose steps are all alike, or whose rows all hold as many tokens, divides their
    seconds in some way that is right for such steps.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=MOST_STEPS)
        """Since the last fit: how many steps came back together, their chunk tokens, their decode rows, what those hold, and
        their seconds."""
        self._ended_s = float("-inf")
        self._count = 0
        self._products: Vector = np.zeros((NUMBERS, NUMBERS))
        self._seconds: Vector = np.zeros(NUMBERS)
        self._weight = 0.0
        """How many steps that is, where each counts by its share: as much as the fit expects it to take of its seconds."""
        self._most: Vector = np.zeros(NUMBERS)
        """The largest that the diagonal of `_products` has been."""
        self._fit: Vector = np.zeros(NUMBERS)
        self._cost = StepCost()

    def step(self, plan: StepPlan, launched_s: float, ended_s: float, drafting_s: float = 0.0) -> None:
        """A step has come back. It began when it was launched, or when the one before it ended. Steps that come back in one
        turn count as one: nobody knows when the first of them ended. drafting_s: see `StepResult`; it does not count."""
        self._count += 1
        work: Iterable[float] = (1, plan.chunk_tokens, plan.decoding, plan.held_tokens)
        seconds = max(0.0, ended_s - max(launched_s, self._ended_s) - drafting_s)
        if ended_s == self._ended_s and self._steps:
            *before, seconds = self._steps.pop()
            work = map(add, before, work)
        self._steps.append((*work, seconds))
        self._ended_s = ended_s

    def skip(self, seconds: float) -> None:
        """Steps of so many seconds together have come back, which tell no more than the one before them."""
        self._ended_s += seconds

    def read(self) -> StepCost:
        """The cost of late. Fits what has come since the last call."""
        if self._steps and self._count >= LEAST_STEPS:
            table = np.array(self._steps)
            self._steps.clear()
            self._take(table[:, :NUMBERS], table[:, NUMBERS])
            self._cost = StepCost(*self._fit.tolist())
        return self._cost

    def _take(self, what: Vector, seconds: Vector) -> None:
        """what: [steps, 4]. seconds: [steps]."""
        expected = what @ self._fit
        if not expected.all():
            expected = np.full_like(seconds, seconds.mean())
        weights = 1 / np.maximum(np.maximum(seconds, expected), 1e-6)
        weighed = what * weights[:, None]
        shares = weights * expected
        kept = 0.5 ** (len(seconds) / HALF_LIFE_STEPS)
        self._products = self._products * kept + weighed.T @ weighed
        self._seconds = self._seconds * kept + weighed.T @ (seconds * weights)
        self._weight = self._weight * kept + float(shares @ shares)
        self._most = np.maximum(self._most, self._products.diagonal())
        former = self._most * FORMER_SHARE
        self._fit = _solve(
            self._products + np.diag(former), self._seconds + former * self._fit, np.flatnonzero(self._most).tolist()
        )
        fitted = float(self._fit @ self._products @ self._fit)
        if fitted > self._weight > 0:  # older steps were faster, and would count for more than they are
            scale = self._weight / fitted
            self._products, self._seconds, self._most = self._products * scale, self._seconds * scale, self._most * scale
        self._weight = min(self._weight, fitted)


def _solve(matrix: Vector, right: Vector, seen: list[int]) -> Vector:
    """The x >= 0 that minimizes x·matrix·x / 2 - right·x; 0 but for the numbers in `seen`. matrix: positive definite.

    What of the answer is above 0 solves its own equations. So of all sets that solve theirs with nothing below 0, it is the best.
    Where the set of all does, there is no better one.
    """
    best, most = np.zeros(NUMBERS), 0.0
    for chosen in map(list, chain.from_iterable(combinations(seen, size) for size in range(len(seen), 0, -1))):
        x = np.linalg.solve(matrix[np.ix_(chosen, chosen)], right[chosen])
        gain = float(right[chosen] @ x)
        if x.min() >= 0 and gain > most:
            best, most = np.zeros(NUMBERS), gain
            best[chosen] = x
            if len(chosen) == len(seen):
                break
    return best
