"""What `launch bench ranks` measures: its flags and their limits.

Owns names, defaults and limits. Imports nothing heavy, starts nothing.
"""

from dataclasses import dataclass
from typing import Any

from common.config import MOST_RANKS
from common.options import option, parse_numbers, require, require_at_least


@dataclass(frozen=True, kw_only=True)
class RanksBench:
    """What is measured, and for how long."""

    ranks: str = option("1,2,4,8", "numbers of ranks, one after the other; each rank is a process")
    rows: str = option("1,64,256", "requests in the batch of the decode steps")
    steps: int = option(2000, "steps of each measurement")
    json: str = option("", "write the figures to this file: a list with an object for each measurement")

    def __post_init__(self) -> None:
        require(
            all(1 <= count <= MOST_RANKS for count in self.counts), "ranks", f"numbers between 1 and {MOST_RANKS}", self.ranks
        )
        require(all(1 <= rows <= 4096 for rows in self.batches), "rows", "numbers between 1 and 4096", self.rows)
        require_at_least(self, steps=1)

    @property
    def counts(self) -> tuple[int, ...]:
        return parse_numbers(self.ranks, "ranks", int)

    @property
    def batches(self) -> tuple[int, ...]:
        return parse_numbers(self.rows, "rows", int)


QUICK: dict[str, Any] = {"ranks": "1,2", "rows": "64", "steps": 200}
"""What `--quick` measures."""
