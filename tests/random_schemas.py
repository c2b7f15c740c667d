"""JSON schemas drawn at random, of what answers can be held to, whose values are short.

Owns the draw. Knows no fleet.
"""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]
DEPTH = 3
NAMES = ("name", "age", "tags", "a b", "é", "note", "x1")


def random_schema(random: Random) -> Schema:
    """An object at the top, with a definition that is used by reference now and then."""
    schema = _object(random, DEPTH)
    if random.random() < 0.3:
        schema["$defs"] = {"part": random_value(random, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
    return schema


def random_value(random: Random, depth: int) -> Schema:
    flat: tuple[Callable[[Random], Schema], ...] = (_string, _integer, _number, _listed, _plain)
    deep: tuple[Callable[[Random, int], Schema], ...] = (_object, _array, _either)
    if depth and random.random() < 0.5:
        return random.choice(deep)(random, depth - 1)
    return random.choice(flat)(random)


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(NAMES, random.randint(1, 4))
    schema: Schema = {"type": "object", "properties": {name: random_value(random, depth) for name in names}}
    schema["required"] = random.sample(names, random.randint(0, len(names)))
    if random.random() < 0.5:
        schema["additionalProperties"] = False
    if random.random() < 0.2:
        schema["minProperties"] = random.randint(len(schema["required"]), len(names))
    return schema


def _array(random: Random, depth: int) -> Schema:
    if random.random() < 0.3:
        return {
            "type": "array",
            "prefixItems": [random_value(random, depth) for _ in range(random.randint(1, 3))],
            "items": False,
        }
    least = random.randint(0, 2)
    return {"type": "array", "items": random_value(random, depth), "minItems": least, "maxItems": least + random.randint(0, 2)}


def _either(random: Random, depth: int) -> Schema:
    if random.random() < 0.3:
        kinds = [{"type": "boolean"}, random.choice((_string, _integer))(random)]
        return {"oneOf": kinds}
    return {"anyOf": [random_value(random, depth) for _ in range(random.randint(1, 3))], "title": "either"}


def _string(random: Random) -> Schema:
    kind = random.choice(("length", "pattern", "format"))
    if kind == "length":
        least = random.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 8)}
    if kind == "pattern":
        return {"type": "string", "pattern": random.choice(("^[a-z]{1,5}$", "(ab|cd){1,3}", r"^\d{3}-\d{4}$", "^[^a-y]{2}$"))}
    return {"type": "string", "format": random.choice(("date", "time", "uuid", "ipv4"))}


def _integer(random: Random) -> Schema:
    if random.random() < 0.3:
        return {"type": "integer", "multipleOf": random.choice((2, 5, 12)), "description": "short enough"}
    low = random.randint(-500, 500)
    schema: Schema = {
        "type": random.choice(("integer", ["integer", "null"])),
        "minimum": low,
        "maximum": low + random.randint(1, 900),
    }
    if random.random() < 0.3:
        schema["exclusiveMinimum"] = schema.pop("minimum")
    return schema


def _number(random: Random) -> Schema:
    low = random.randint(-50, 50)
    return {"type": "number", "minimum": low / 2, "maximum": low / 2 + random.randint(1, 90)}


def _listed(random: Random) -> Schema:
    values: list[Any] = ["red", 'a"b\\', "é\n", 3, -1.5, True, None, [1], {"k": "v"}]
    return {"const": random.choice(values)} if random.random() < 0.3 else {"enum": random.sample(values, random.randint(1, 5))}


def _plain(random: Random) -> Schema:
    return {"type": random.choice(("boolean", "null", ["null", "boolean"]))}
