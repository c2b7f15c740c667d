"""The rows of the executor's batch: which are free, and how many steps in flight still name each.

Owns row numbers. Knows nothing of requests, pages or time. The owner gives a row back only when no step in flight names it: a
step may still write the pages of the request that has the row.
"""

import numpy as np

from common.ids import Int32Array


class Rows:
    """`total` rows. in_flight[row]: launched steps that name the row and have not returned."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.in_flight = np.zeros(total, dtype=np.int32)
        self._free = list(range(total - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free row. Raises IndexError when there is none: ask `free_count` first."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        assert self.in_flight[row] == 0, f"row {row} is named by a step in flight"
        self._free.append(row)

    def launched(self, rows: Int32Array) -> None:
        """A plan that names `rows` (each once) was launched."""
        self.in_flight[rows] += 1

    def returned(self, rows: Int32Array) -> None:
        """The step of that plan returned."""
        self.in_flight[rows] -= 1
        assert (self.in_flight[rows] >= 0).all(), "a step returned twice"
