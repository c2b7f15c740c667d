"""The values of a checkpoint's config.json, each checked as it is read.

Owns what a number, a flag and a list must be, and the words of a refusal. Does not know what the values mean.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

_WHOLE_END = 2**31
"""More than any size of a model; a product of two of them is still a size that torch takes."""


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """Every method raises ConfigError that names the file, the key and what is wrong with it."""

    values: Mapping[str, Any]
    file: Path

    def number(self, name: str, null: float | None = None) -> float:
        """A positive number; `null` if the key is missing or null."""
        value = self.values.get(name)
        value = null if value is None else value
        if value is None:
            raise ConfigError(f"{self.file}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{self.file}: {name} must be a positive number; it is {value!r}")
        return value

    def whole(self, name: str, null: int | None = None) -> int:
        """A positive whole number below 2**31; `null` if the key is missing or null."""
        value = self.number(name, null)
        if value != int(value) or value >= _WHOLE_END:
            raise ConfigError(f"{self.file}: {name} must be a whole number below {_WHOLE_END}; it is {value!r}")
        return int(value)

    def flag(self, name: str) -> bool:
        """False if the key is missing or null."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise ConfigError(f"{self.file}: {name} must be true or false; it is {value!r}")
        return bool(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise ConfigError(f"{self.file}: {name} must be a list of {count} positive numbers; it is {value!r}")
        return tuple(ConfigValues({name: one}, self.file).number(name) for one in value)
