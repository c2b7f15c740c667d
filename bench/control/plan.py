"""What `launch bench control` measures: its flags and their limits.

Owns names, defaults and limits. Imports nothing heavy, starts nothing.
"""

from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.options import option, parse_numbers


@dataclass(frozen=True, kw_only=True)
class ControlBench:
    """What is measured, and for how long."""

    instances: str = option("10,100,1000", "sizes of the fleet, one after the other: half prefill, half decode")
    seconds: float = option(10.0, "how long a fleet at rest is watched")
    patience_s: float = option(120.0, "how long a phase may take; a fleet that needs longer is reported as too large")
    json: str = option("", "write the figures to this file: a list with an object for each size")

    def __post_init__(self) -> None:
        if min(self.sizes) < 2:
            raise ConfigError(f"--instances must be at least 2, is {self.instances}")
        for flag in ("seconds", "patience_s"):
            if vars(self)[flag] <= 0:
                raise ConfigError(f"--{flag.replace('_', '-')} must be above 0, is {vars(self)[flag]}")

    @property
    def sizes(self) -> tuple[int, ...]:
        return parse_numbers(self.instances, "instances", int)


QUICK: dict[str, Any] = {"instances": "6", "seconds": 1.0}
"""What `--quick` measures."""
