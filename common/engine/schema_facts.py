"""What a JSON schema says of the types and values that match it, read without following references.

Pure. Takes schemas that nobody has checked yet; knows nothing of what is supported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf
from typing import Any

DECIMALS = 6


@dataclass(frozen=True, slots=True)
class Facts:
    """What a schema says, read once. values: those that can match, if they are listed; of lists and objects, their type alone.
    reach: the types of the values that can match; empty: any. required: of an object, else empty."""

    values: frozenset[Any] | None
    reach: frozenset[str]
    required: frozenset[str]
    properties: Mapping[str, Any]


def facts_of(schema: dict[str, Any]) -> Facts:
    types = types_of(schema)
    is_object = types == {"object"}
    required = frozenset(each for each in as_list(schema.get("required")) if isinstance(each, str)) if is_object else frozenset()
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list):
        reach = types if "type" in schema else set()  # what says of objects or arrays alone lets all others pass
        reach = reach | {"integer"} if "number" in reach else reach
        return Facts(None, frozenset(reach), required, as_object(schema.get("properties")))
    values = frozenset((type(each),) if isinstance(each, list | dict) else each for each in listed)
    reach = {kind for value in listed for kind in kinds_of(value)}
    return Facts(values, frozenset(reach), frozenset(), {})


def is_within(schema: dict[str, Any], types: set[str]) -> bool:
    """Whether each value that matches has one of the types, as far as that is seen."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        return all(kinds_of(each) & types for each in listed)
    return bool(types_of(schema)) and types_of(schema) <= types and isinstance(schema.get("type"), str | list)


def has_number(schema: dict[str, Any]) -> bool:
    """Whether a number of so many DECIMALS at most is within the schema's limits, which are numbers."""
    minimum, above, maximum, below = (
        None if (limit := schema.get(key)) is None else Fraction(str(limit)) * 10**DECIMALS
        for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    )
    least = max(-inf if minimum is None else ceil(minimum), -inf if above is None else floor(above) + 1)
    most = min(inf if maximum is None else floor(maximum), inf if below is None else ceil(below) - 1)
    return least <= most


def as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def types_of(schema: dict[str, Any]) -> set[str]:
    """The types that the schema names. One with properties or items means an object or an array."""
    named = schema.get("type")
    if named is None:
        return {"object"} if "properties" in schema else {"array"} if {"items", "prefixItems"} & schema.keys() else set()
    return {str(each) for each in named} if isinstance(named, list) else {str(named)}


def kinds_of(value: Any) -> set[str]:
    """The types that a value has."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"integer", "number"} if isinstance(value, int) or value.is_integer() else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}
