"""Which JSON schemas an answer can be held to: what xgrammar 0.2 enforces exactly, and no more.

Owns the allow-list, and what a schema says of the types and values that match it. xgrammar ignores what it does not know, or only
warns, so its answers would not validate. Such a schema is refused instead, with the place in it and the keyword. Pure; knows
nothing of xgrammar itself. The tests compare with a validator.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf
from typing import Any, TypeAlias

from common.errors import BadRequest
from engine.grammar.strings import FORMATS, PATTERNS, NamedPatterns, anywhere, check_size, plain_keywords
from engine.grammar.strings import KEYWORDS as STRING_KEYWORDS

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


_SAY_NOTHING = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
_SAY_NOTHING |= {"example", "contentEncoding", "contentMediaType", "contentSchema"}
_SAY_NOTHING |= {"$schema", "$id", "$comment", "$defs", "definitions"}
_CHOICES = ("anyOf", "oneOf", "allOf")
_NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_KEYWORDS: Mapping[str, set[str]] = {
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    },
    "array": {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _NUMBER,
    "number": _NUMBER,
    "boolean": set(),
    "null": set(),
}
_CLOSES_OBJECT = {"properties", "patternProperties", "unevaluatedProperties"}
"""Beside these, other properties come only if additionalProperties says so, as at OpenAI."""
_REFERENCE = re.compile("#(?:/[^/~%]+)*")
"""xgrammar reads the names as they are, and JSON schema with the escapes of pointers and of URIs."""
_PLAIN_NAME = re.compile(r'[^\x00-\x1f"\\\x7f-\U0010ffff]*')
"""xgrammar tells such names alone from the others of an object."""
_MAX_MULTIPLE = 1024
_MAX_SHOWN, _MAX_WHERE = 64, 512
"""So many characters of a client's text, and of a place, are in an error."""
_MAX_STEPS = 10_000
"""So many comparisons of two schemas, and of their parts. References can make a small schema ask for any number of them."""
_MAX_FOLLOWED = 64
"""So many references within each other while two schemas are compared."""

_Is: TypeAlias = tuple[str, Callable[[Any], bool]]
_COUNT: _Is = ("a whole number of at least 0", lambda value: type(value) is int and value >= 0)
_VALUE: _Is = ("a number", lambda value: type(value) in (int, float))
_TEXT: _Is = ("a string", lambda value: isinstance(value, str))
_TEXTS: _Is = (
    "a list of strings",
    lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
)
_NAMED: _Is = ("an object", lambda value: isinstance(value, dict))
_MANY: _Is = ("a list with at least one part", lambda value: isinstance(value, list) and bool(value))
_FORMS: Mapping[str, _Is] = {
    "type": ("a string, or a list of strings", lambda value: isinstance(value, str) or (_TEXTS[1](value) and bool(value))),
    "required": _TEXTS,
    "enum": _MANY,
    "prefixItems": ("a list", lambda value: isinstance(value, list)),
    **dict.fromkeys(_CHOICES, _MANY),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _NAMED),
    **dict.fromkeys(("$ref", "format", "pattern"), _TEXT),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(_NUMBER, _VALUE),
}

Refuse = Callable[[str], BadRequest]


def check_schema(schema: Any, name: str) -> None:
    """Raises BadRequest for a schema that answers could not be held to. name: of the field, for the message."""
    _Check(schema, name).all()


def name_patterns(schema: Any, name: str) -> NamedPatterns:
    """Put names in place of the schema's patterns, and of formats where xgrammar's own are too wide. Raises as `check_schema`."""
    check, patterns = _Check(schema, name), NamedPatterns(json.dumps(schema))
    check.all()
    for each, keywords in check.edits:
        for key, value in keywords.items():
            each[key] = value
            if value is None:
                del each[key]
    for each in check.patterned:
        if each.get("format") in PATTERNS:
            each["pattern"] = patterns.name(PATTERNS[each.pop("format")])
        elif "pattern" in each:
            each["pattern"] = patterns.name(anywhere(each["pattern"]))
        if each.get("patternProperties"):
            each["patternProperties"] = {patterns.name(anywhere(key)): value for key, value in each["patternProperties"].items()}
    return patterns


def check_regex(pattern: str, name: str) -> None:
    """Raises BadRequest for what xgrammar ignores in a regular expression, and for one that is too large."""
    check_size(name, "regex", pattern)
    problem = _regex_problem(pattern)
    if problem is not None:
        raise BadRequest(f"{name}: {problem}", field=name)


class _Check:
    """root: where references lead."""

    def __init__(self, root: Any, name: str) -> None:
        self._root = root
        self._name = name
        self._steps = 0
        self._led: dict[str, Any] = {}
        """What each reference leads to."""
        self.patterned: list[dict[str, Any]] = []
        """Schemas with patterns or formats."""
        self.edits: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Schemas, and keywords to write into them; None is to leave one out. The answers that match stay valid."""
        self._defined: dict[int, str] = {}
        """Where the schemas in $defs are, by their ids. Those that no reference leads to are not checked."""
        self._sought: set[int] = set()
        """Ids of what references lead to."""
        self._to_check: list[Any] = []
        """What is in $defs, and references lead there."""
        self._checked: set[int] = set()
        """Ids of schemas."""
        self._facts: dict[int, Facts] = {}
        self._exclude: dict[tuple[int, int], bool] = {}
        """By the ids of two schemas. A pair that is being compared does not exclude each other: a proof cannot rest on itself."""

    def refusal(self, where: str, problem: str) -> BadRequest:
        where = where if len(where) <= _MAX_WHERE else f"…{where[-_MAX_WHERE:]}"
        return BadRequest(f"{self._name}: at {where}: {problem}", field=self._name)

    def require(self, holds: bool, where: str, problem: str) -> None:
        """Raises BadRequest with this problem, unless it holds."""
        if not holds:
            raise self.refusal(where, problem)

    def all(self) -> None:
        """The whole schema. References may lead to its schemas alone, which are checked, and not into a default or an example."""
        self.schema(self._root, "$")
        while self._to_check:
            schema = self._to_check.pop()
            if id(schema) not in self._checked:
                self.schema(schema, self._defined[id(schema)])
        for ref, schema in self._led.items():
            problem = "it leads to no schema: put that into $defs"
            self.require(id(schema) in self._checked, f"$ref {ref[:_MAX_SHOWN]!r}", problem)

    def schema(self, schema: Any, where: str) -> None:
        self._checked.add(id(schema))
        if isinstance(schema, dict) and schema.keys() & {"pattern", "format", "patternProperties"}:
            self.patterned.append(schema)
        if schema is True:
            return
        self.require(schema is not False, where, "false allows no value")
        self.require(isinstance(schema, dict), where, "a schema must be an object")
        if "$id" in schema and schema is not self._root and _has_reference(schema):
            raise self.refusal(where, "$id is supported at the root alone: it changes where references lead")
        for key in sorted(schema.keys() & _FORMS.keys()):
            form, holds = _FORMS[key]
            self.require(holds(schema[key]), where, f"{key} must be {form}")
        for defs in ("$defs", "definitions"):
            for key, each in as_object(schema.get(defs)).items():
                self._defined[id(each)] = f"{where}.{defs}.{key}"
                if id(each) in self._sought:
                    self._to_check.append(each)
        said = {key for key in schema if key not in _SAY_NOTHING and not key.startswith("x-")}
        idle = {key for key in said if _restricts_nothing(key, schema)}
        said -= idle
        self.edits.append((schema, dict.fromkeys(idle)))
        for whole in ("$ref", "enum", "const", *_CHOICES):
            if whole in said:
                allowed = {whole, "type"} if whole in ("enum", "const") or self._is_typed(schema, whole) else {whole}
                if said - allowed:
                    other = sorted(said - allowed)[0]
                    raise self.refusal(where, f"{other} beside {whole} is not supported: write them into one schema")
                self._whole(whole, schema, where)
                return
        self._typed(schema, said, where)

    def _whole(self, keyword: str, schema: dict[str, Any], where: str) -> None:
        """A keyword that says everything about a value."""
        value = schema[keyword]
        if keyword == "$ref":
            problem = "leads nowhere in this schema: other documents, and names with ~ or %, are not supported"
            self.require(self._followed(schema) is not None, where, f"$ref {value[:_MAX_SHOWN]!r} {problem}")
        elif keyword in ("enum", "const"):
            values = value if keyword == "enum" else [value]
            types = types_of(schema)
            fitting = [each for each in values if not types or kinds_of(each) & types]
            self.require(bool(fitting), where, f"no value of {keyword} is of the given type")
            if keyword == "enum":
                self.edits.append((schema, {"enum": fitting}))
        else:
            if "type" in schema:  # xgrammar would look at it alone
                self.edits.append((schema, {"type": None}))
            is_one = keyword != "allOf" or len(value) == 1
            self.require(is_one, where, "allOf of several schemas is not supported: write them into one")
            for index, each in enumerate(value):
                self.schema(each, f"{where}.{keyword}[{index}]")
            if keyword == "oneOf" and not all(
                self._excludes(one, other, 0) for at, one in enumerate(value) for other in value[at + 1 :]
            ):
                raise self.refusal(where, "oneOf of schemas that may both hold is not supported: use anyOf")

    def _is_typed(self, schema: dict[str, Any], keyword: str) -> bool:
        """Whether the type beside a choice says what each of its schemas says already."""
        types = types_of(schema)
        types |= {"integer"} if "number" in types else set()
        if keyword not in _CHOICES or not types:
            return False
        followed = [self._followed(each) for each in schema[keyword]]
        return all(isinstance(each, dict) and is_within(each, types) for each in followed)

    def _typed(self, schema: dict[str, Any], said: set[str], where: str) -> None:
        types = types_of(schema)
        known = {keyword for kind in types for keyword in _KEYWORDS.get(kind, ())}
        for key in sorted(said - {"type"} - known):
            if not any(key in keywords for keywords in _KEYWORDS.values()):
                raise self.refusal(where, f"{key} is not supported: leave it out")
            fits = " or ".join(kind for kind, keywords in _KEYWORDS.items() if key in keywords)
            raise self.refusal(where, f"{key} is for type {fits}: give the type, or leave {key} out")
        for kind in types:
            self.require(kind in _KEYWORDS, where, f"type {kind[:_MAX_SHOWN]!r} is not known")
        if "object" in types:
            self._object(schema, where)
        if "array" in types:
            self._array(schema, where)
        if "string" in types:
            self._string(schema, where)
        multiple = schema.get("multipleOf")
        if multiple is not None:
            is_held = "number" not in types and type(multiple) is int and 1 <= multiple <= _MAX_MULTIPLE
            problem = f"multipleOf is supported for type integer, with whole numbers of 1 to {_MAX_MULTIPLE}"
            self.require(is_held, where, problem)
            is_alone = not said & (_NUMBER - {"multipleOf"})
            self.require(is_alone, where, "multipleOf beside a minimum or maximum is not supported")
        if "number" in types and not has_number(schema):
            raise self.refusal(where, f"no number of at most {DECIMALS} decimals is within these limits: widen them")

    def _object(self, schema: dict[str, Any], where: str) -> None:
        properties, patterns = as_object(schema.get("properties")), as_object(schema.get("patternProperties"))
        for key, each in properties.items():
            self.schema(each, f"{where}.properties.{key}")
        # xgrammar reads a missing additionalProperties as false, also beside nothing but a size.
        others = schema.get("additionalProperties", not schema.keys() & _CLOSES_OBJECT)
        if others is True:
            self.edits.append((schema, {"additionalProperties": True}))
        if not isinstance(others, bool):
            self.schema(others, f"{where}.additionalProperties")
        required = schema.get("required", [])
        for key in required:
            self.require(key in properties, where, f"required names {key[:_MAX_SHOWN]!r}, which properties lacks")
        if patterns and (len(patterns) > 1 or properties or others is not False):
            raise self.refusal(where, "patternProperties is supported with one pattern, and without other properties")
        odd = next((key for key in properties if not _PLAIN_NAME.fullmatch(key)), None)
        if odd is not None and others is not False:
            problem = (
                "beside additionalProperties, names of properties have ASCII letters, digits and signs without quotation marks"
            )
            raise self.refusal(
                where, f"the name {odd[:_MAX_SHOWN]!r}: {problem} and backslashes: set additionalProperties to false"
            )
        for pattern, each in patterns.items():
            self._pattern(pattern, f"{where}.patternProperties")
            self.schema(each, f"{where}.patternProperties.{pattern}")
        least = schema.get("minProperties", 0)
        is_open = bool(patterns) or others is not False
        if is_open and least > max(1, len(required)):
            raise self.refusal(where, "minProperties above 1 is supported for named properties alone")
        problem = f"minProperties is {least}, but properties has {len(properties)}: name more, or lower it"
        self.require(is_open or least <= len(properties), where, problem)
        self.require(schema.get("unevaluatedProperties", False) is False, where, "unevaluatedProperties is supported as false")

    def _array(self, schema: dict[str, Any], where: str) -> None:
        first = schema.get("prefixItems", [])
        has_room = not first or max(schema.get("minItems", 0), schema.get("maxItems", 0)) > len(first)
        items = schema.get("items", has_room and "unevaluatedItems" not in schema)
        if items is True:  # xgrammar reads a missing one as false
            self.edits.append((schema, {"items": True}))
        if not isinstance(items, bool):
            self.schema(items, f"{where}.items")
        for index, each in enumerate(first):
            self.schema(each, f"{where}.prefixItems[{index}]")
        self.require(schema.get("unevaluatedItems", False) is False, where, "unevaluatedItems is supported as false")

    def _string(self, schema: dict[str, Any], where: str) -> None:
        plain = plain_keywords(schema)
        self.edits.append((schema, dict.fromkeys(STRING_KEYWORDS & schema.keys()) | plain))
        if len(plain.keys() & {"pattern", "format"}) + bool(plain.keys() & {"minLength", "maxLength"}) > 1:
            raise self.refusal(where, "of pattern, format and lengths, one is supported at a time")
        form = plain.get("format")
        if form is not None and form not in FORMATS:
            raise self.refusal(
                where, f"format {form[:_MAX_SHOWN]!r} is not supported: leave it out, or use one of {', '.join(sorted(FORMATS))}"
            )
        if "pattern" in plain and plain["pattern"] == schema.get("pattern"):
            self._pattern(schema["pattern"], where)

    def _pattern(self, pattern: str, where: str) -> None:
        check_size(self._name, "regex", pattern)
        problem = _regex_problem(pattern) or _text_problem(pattern)
        if problem is not None:
            raise self.refusal(where, f"pattern: {problem}")

    # --- oneOf -------------------------------------------------------------------------------------------------------------

    def _followed(self, schema: Any) -> Any:
        """What the schema's references lead to. None: nowhere, or in a circle."""
        for _ in range(16):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            ref = schema["$ref"]
            if not isinstance(ref, str) or not _REFERENCE.fullmatch(ref):
                return None
            if ref not in self._led:
                self._led[ref] = found = self._at(ref)
                self._sought.add(id(found))
                if id(found) in self._defined:
                    self._to_check.append(found)
            schema = self._led[ref]
        return None

    def _at(self, ref: str) -> Any:
        found = self._root
        for part in ref.split("/")[1:]:
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def _excludes(self, one: Any, other: Any, depth: int) -> bool:
        """Whether no value can match both, as far as that is seen. depth: of pairs within pairs."""
        self._step(1)
        one, other = self._followed(one), self._followed(other)
        if not (isinstance(one, dict) and isinstance(other, dict)) or depth > _MAX_FOLLOWED:
            return False
        pair = (id(one), id(other))
        if pair not in self._exclude:
            self._exclude[pair] = False
            self._exclude[pair] = self._compared(self._facts_of(one), self._facts_of(other), depth)
        return self._exclude[pair]

    def _compared(self, one: Facts, other: Facts, depth: int) -> bool:
        if one.values is not None and other.values is not None:
            self._step(min(len(one.values), len(other.values)) // 32)
            return one.values.isdisjoint(other.values)
        if one.reach and other.reach and not one.reach & other.reach:
            return True
        self._step(min(len(one.required), len(other.required)) // 32)
        shared = sorted(one.required & other.required)
        return any(self._excludes(one.properties.get(key), other.properties.get(key), depth + 1) for key in shared)

    def _facts_of(self, schema: dict[str, Any]) -> Facts:
        """What a schema says that may not be checked yet, as a reference can lead anywhere."""
        if id(schema) not in self._facts:
            self._facts[id(schema)] = facts_of(schema)
        return self._facts[id(schema)]

    def _step(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MAX_STEPS:
            problem = "oneOf asks to compare too many schemas with each other: use anyOf"
            raise BadRequest(f"{self._name}: {problem}", field=self._name)


def _restricts_nothing(key: str, schema: dict[str, Any]) -> bool:
    value = schema[key]
    match key:
        case "uniqueItems":
            return value is False
        case "propertyNames":
            plain = (
                isinstance(value, dict) and value.get("type", "string") == "string" and not value.keys() - _SAY_NOTHING - {"type"}
            )
            return value is True or plain
        case "format":
            return bool(types_of(schema)) and "string" not in types_of(schema)
        case _:
            return False


def _has_reference(value: Any) -> bool:
    if isinstance(value, dict):
        return "$ref" in value or any(map(_has_reference, value.values()))
    return isinstance(value, list) and any(map(_has_reference, value))


_REGEX_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|\(\?[:<P]?[=!<]?|.", re.DOTALL)
_CLOSED_SET = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPES = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = frozenset("dDwWsSnrtfv0xuc")
"""xgrammar reads others as the letters themselves."""
_GROUPS = ("(?:", "(?<", "(?P<")


def _regex_problem(pattern: str) -> str | None:
    """What of a regular expression would be ignored. Anchors are fine where they change nothing, as all of a text must match."""
    parts = _REGEX_PARTS.findall(pattern)
    depth = 0
    for at, part in enumerate(parts):
        if part.startswith("(?") and part not in _GROUPS:
            return f"{part!r} is not supported: no lookahead, lookbehind or flags"
        if part in ("[]", "[^]"):
            return f"{part!r} is not supported: for some the set ends there, for others it holds the bracket: write \\] in it"
        if part[0] == "[" and not _CLOSED_SET.fullmatch(part):
            return "a set of characters without an end is not supported: close it with ]"
        for escape in _ESCAPES.findall(part if part[0] in "[\\" else ""):
            if escape.isalnum() and escape not in _KNOWN_ESCAPES:
                return f"'\\{escape}' is not supported"
        depth += part.startswith("(")
        depth -= part == ")"
        begins = at == 0 or (parts[at - 1] == "|" and depth == 0)
        ends = at == len(parts) - 1 or (parts[at + 1] == "|" and depth == 0)
        if (part == "^" and not begins) or (part == "$" and not ends):
            return f"{part!r} is supported at the ends of the whole expression alone"
    return None


_ESCAPED_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]+)\})")


def _text_problem(pattern: str) -> str | None:
    """A string's pattern holds for its JSON text, in which some characters would be escaped."""
    codes = [int(next(filter(None, match.groups())), 16) for match in _ESCAPED_CODE.finditer(pattern)]
    literal = any(ord(each) < 0x20 or each == '"' for each in pattern) or any(
        code < 0x20 or code in (0x22, 0x5C) for code in codes
    )
    if literal or re.search(r"\\[\\\"ntrfv0cb]", pattern):
        return "quotation marks, backslashes and control characters are not supported"
    return None
