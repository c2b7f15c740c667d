"""A quick run of a measurement: small values for the flags that were left at their defaults.

Owns the replacement. Does not know what is measured.
"""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from common.flags import ConfigClass

C = TypeVar("C", bound=ConfigClass)


def shrink(config: C, small: Mapping[str, object]) -> C:
    """The config with these values, except in fields that do not have their default."""
    defaults = {known.name: known.default for known in dataclasses.fields(config)}
    left = {name: value for name, value in small.items() if vars(config)[name] == defaults[name]}
    return dataclasses.replace(config, **left)
