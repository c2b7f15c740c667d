"""What `launch bench control` measures: its flags and their limits.

Owns names, defaults and limits. Imports nothing heavy, starts nothing.
"""

from dataclasses import dataclass
from typing import Any

from common.options import option, parse_numbers, require, require_above_0


@dataclass(frozen=True, kw_only=True)
class ControlBench:
    """What is measured, and for how long."""

    instances: str = option("10,100,1000", "sizes of the fleet, one after the other: half prefill, half decode")
    seconds: float = option(10.0, "how long a fleet at rest is watched")
    patience_s: float = option(120.0, "how long a phase may take; a fleet that needs longer is reported as too large")
    json: str = option("", "write the figures to this file: a list with an object for each size")

    def __post_init__(self) -> None:
        require(min(self.sizes) >= 2, "instances", "at least 2 each", self.instances)
        require_above_0(self, "seconds", "patience_s")

    @property
    def sizes(self) -> tuple[int, ...]:
        return parse_numbers(self.instances, "instances", int)


QUICK: dict[str, Any] = {"instances": "6", "seconds": 1.0}
"""What `--quick` measures."""
