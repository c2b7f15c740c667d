"""What the figures of all benchmarks share: spreads, goals, and an outcome.

Owns their shape. Measures and prints nothing.
"""

import math
import statistics
from collections.abc import Iterable

import msgspec

from bench.hardware import Hardware


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """p90: what nine of ten values do not exceed."""

    least: float
    median: float
    p90: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
        return cls(least=ordered[0], median=statistics.median(ordered), p90=p90, most=ordered[-1])


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """met: None when it was not measured."""

    rule: str
    met: bool | None
    figure: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known at the end of a benchmark. command: repeats it."""

    command: str
    hardware: Hardware
    goals: list[Goal]
