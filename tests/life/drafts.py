"""A drafter that knows what the toy answers, and errs now and then: drafts are right, wrong, and right up to some place.

Depths are drawn, whether they pay or not. What the toy samples at a temperature above 0 it does not foresee.
"""

from functools import lru_cache
from random import Random

import numpy as np

from common.drafting import Drafting
from common.ids import Int32Array, Int64Array
from common.step_cost import StepCost
from decode.speculation import NO_DRAFTS, Drafts, Speculation
from tests.life.expected import undisturbed

ERRS, MOST = 0.2, 5


@lru_cache(maxsize=4096)
def _foreseen(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(undisturbed(tokens, MOST))


class SeeingSpeculation(Speculation):
    def __init__(self, drafting: Drafting, rows: int, context_tokens: int, chunk_tokens: int) -> None:
        super().__init__(drafting, rows, context_tokens, chunk_tokens)
        self._all_rows, self._random = rows, Random(17)
        self._known: dict[int, list[int]] = {}

    def begin(self, row: int, tokens: Int32Array) -> None:
        super().begin(row, tokens)
        self._known[row] = tokens.tolist()

    def add(self, rows: Int32Array, tokens: Int32Array, drafted: bool = False) -> None:
        super().add(rows, tokens, drafted)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._known[row].append(token)

    def depths(self, rows: Int32Array, most: Int32Array, cost: StepCost, held: Int32Array) -> Int64Array:
        depths, room = np.zeros(len(rows), dtype=np.int64), self._all_rows - len(rows)
        for at, row in enumerate(rows.tolist()):
            if row in self._known:
                depths[at] = min(self._random.choice((0, 0, 1, 2, MOST)), max(0, int(most[at])), room)
                room -= depths[at]
        return depths

    def draft(self, rows: Int32Array, depths: Int64Array, held: Int32Array) -> Drafts:
        of_rows, drafted = list[int](), list[int]()
        for row, depth in zip(rows.tolist(), depths.tolist(), strict=True):
            for token in _foreseen(tuple(self._known[row]))[:depth]:
                of_rows.append(row)
                drafted.append(token if self._random.random() > ERRS else token + 1)
        return Drafts(np.array(of_rows, dtype=np.int32), np.array(drafted, dtype=np.int32), 0) if drafted else NO_DRAFTS
