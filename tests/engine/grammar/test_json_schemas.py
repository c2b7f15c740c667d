"""Schemas that answers could not be held to are refused, with the place and the keyword.

Structural tags that answers could not be held to are refused, with the place.
"""

import json
from functools import partial
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from xgrammar import GrammarCompiler, GrammarMatcher

from common.errors import BadRequest
from common.sampling_params import Grammar
from engine.grammar.grammars import check_structural_tag, check_text
from engine.grammar.json_schemas import _FORMS, check_regex, check_schema
from router.api.structured import one_of
from tests.engine.grammar.judge import COMPILER, TOKENS, allowed, json_schema, structural_tag

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
NESTED = {"type": "array", "items": INTEGER, "$defs": {"b": STRING}}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
XGRAMMAR = GrammarCompiler(TOKENS.info, cache_enabled=False)
IGNORED: list[tuple[dict[str, Any], str, object]] = [
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems", [1, 1]),
    ({"not": INTEGER}, "not", 1),
    ({"if": INTEGER, "then": {"minimum": 5}}, "if", 1),
    ({"type": "array", "items": INTEGER, "contains": {"const": 5}}, "contains", [1]),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf", 7.3),
    ({"type": "integer", "multipleOf": 3, "minimum": 5}, "multipleOf", 7),
    ({"type": "string", "pattern": "a+", "maxLength": 2}, "pattern", "aaa"),
    ({"type": "string", "format": "date", "maxLength": 2}, "format", "2020-01-01"),
    ({"type": "object", "required": ["b"]}, "required", {}),
    ({"properties": {"é": INTEGER}, "additionalProperties": STRING}, "the name", {"é": "x"}),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, "dependentRequired", {"a": 1}),
    ({"anyOf": [{"minimum": 5}, STRING], "type": "string"}, "type beside anyOf", None),
    ({"allOf": [INTEGER, {"type": "integer", "minimum": 5}]}, "allOf", 1),
    ({"enum": [1, 2], "minimum": 2}, "minimum beside enum", 1),
    ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "minimum": 5}, "minimum beside \\$ref", 1),
    ({"minimum": 5}, "minimum is for type", 4),
    ({"maxItems": 1}, "maxItems is for type", [1, 2]),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf", 1),
    ({"oneOf": [STRING, {"properties": {"a": INTEGER}}]}, "oneOf", "a"),
    ({"oneOf": [{"items": INTEGER}, {"required": ["a"], "properties": {"a": INTEGER}}]}, "oneOf", {"a": 1}),
    ({"type": "string", "pattern": "(?=a)b"}, "lookahead", "b"),
    ({"$ref": "#/x-a", "x-a": {"type": "array", "items": INTEGER, "uniqueItems": True}}, "leads to no schema", [1, 1]),
    ({"$ref": "#/default/b", "default": {"b": {"$ref": "#/x-c"}}, "x-c": {"not": INTEGER}}, "leads to no schema", 1),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a~1b": INTEGER, "a/b": STRING}}, "leads nowhere", 1),
    ({"$ref": "#/$defs/a%20b", "$defs": {"a%20b": INTEGER, "a b": STRING}}, "leads nowhere", 1),
    (
        {"items": {"$id": "http://a/b", "items": {"$ref": "#/$defs/q"}, "$defs": {"q": INTEGER}}, "$defs": {"q": STRING}},
        "id",
        [["a"]],
    ),
]


@pytest.mark.parametrize(("schema", "named", "slipped"), IGNORED, ids=[named for _, named, _ in IGNORED])
def test_what_xgrammar_would_ignore_is_refused_by_name(schema: dict[str, Any], named: str, slipped: object) -> None:
    with pytest.raises(BadRequest, match=named):
        check_schema(schema, "response_format")
    if slipped is not None:  # or the refusal would be of something that xgrammar holds
        matcher = GrammarMatcher(XGRAMMAR.compile_json_schema(json.dumps(schema)))
        assert matcher.accept_string(json.dumps(slipped)) and not jsonschema_rs.is_valid(schema, slipped)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"title": "T", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"anyOf": [INTEGER, {"type": "null"}], "default": None},
        {"oneOf": [INTEGER, STRING]},
        {"oneOf": [CAT, DOG], "discriminator": {"propertyName": "kind"}},
        {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
        {"type": ["integer", "null"], "minimum": 3},
        {"type": "string", "pattern": "^[a-z]+(?:-[a-z]+)*$"},
        {"type": "array", "prefixItems": [INTEGER], "items": False},
        {"items": {"$ref": "#/$defs/a/$defs/b"}, "prefixItems": [{"$ref": "#/$defs/a"}], "$defs": {"a": NESTED}},
        {"$ref": "#/$defs/0", "$defs": {str(at): {"items": {"$ref": f"#/$defs/{(at + 1) % 1500}"}} for at in range(1500)}},
    ],
)
def test_what_xgrammar_holds_is_accepted(schema: object) -> None:
    check_schema(schema, "response_format")


SHAPELESS: list[dict[str, Any]] = [
    {"type": "array"},
    {"type": "array", "maxItems": 3},
    {"type": "array", "minItems": 1},
    {"type": "array", "minItems": 0},
    {"type": ["array", "null"], "minItems": 1, "maxItems": 2, "x-note": "both sizes, and nothing of items"},
    {"type": "array", "prefixItems": [INTEGER], "minItems": 2},
    {"type": "array", "prefixItems": [INTEGER], "maxItems": 3},
    {"type": "object"},
    {"type": "object", "required": []},
    {"type": "object", "maxProperties": 2},
    {"type": "object", "minProperties": 1},
    {"type": ["object", "array"], "maxProperties": 1, "maxItems": 1},
]
LISTS_AND_OBJECTS = [
    [],
    [1],
    [1, "a"],
    [1, [2], {"b": 3}],
    [1, 2, 3, 4],
    ["a"],
    {},
    {"a": 1},
    {"a": [1], "b": 2},
    {"a": 1, "b": 2, "c": 3},
]


@pytest.mark.parametrize("schema", SHAPELESS, ids=json.dumps)
def test_a_schema_of_a_size_and_no_shape_lets_every_value_of_that_size_through(schema: dict[str, Any]) -> None:
    inside = {"type": "object", "properties": {"part": schema}, "required": ["part"]}
    for asked, values in ((schema, LISTS_AND_OBJECTS), (inside, [{"part": value} for value in LISTS_AND_OBJECTS])):
        valid = [jsonschema_rs.is_valid(asked, value) for value in values]
        texts = [json.dumps(value) for value in values]
        assert allowed(json_schema(asked), texts) == valid and sum(valid) > 1
        assert allowed(structural_tag({"type": "json_schema", "json_schema": asked}), texts) == valid


def test_other_properties_come_only_where_the_schema_says_so_once_it_names_some() -> None:
    assert allowed(json_schema({"type": "object", "properties": {}, "maxProperties": 2}), ["{}", '{"a": 1}']) == [True, False]
    with pytest.raises(BadRequest, match="minProperties is 2, but properties has 1"):
        check_schema({"type": "object", "properties": {"a": INTEGER}, "minProperties": 2}, "response_format")


@pytest.mark.parametrize(
    ("limits", "number"),
    [
        ({"minimum": 3.14159265, "maximum": 3.14159266}, None),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, None),
        ({"exclusiveMinimum": 0, "maximum": 1e-6}, "0.000001"),
        ({"minimum": -1e-7, "maximum": 1e-7}, "0"),
        ({"minimum": 1e-7}, "0.5"),
    ],
)
def test_limits_between_which_no_number_can_be_written_are_refused(limits: dict[str, float], number: str | None) -> None:
    grammar = json_schema({"type": ["number", "null"], **limits})
    if number is None:
        with pytest.raises(BadRequest, match=r"at \$: no number of at most 6 decimals"):
            check_text(grammar)
    else:
        check_text(grammar)
        assert GrammarMatcher(COMPILER.compile_unchecked(grammar)).accept_string(number)


def test_a_refusal_says_where() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": [INTEGER, {"not": {}}]}}}}
    with pytest.raises(BadRequest, match=r"at \$\.properties\.a\.items\.anyOf\[1\]: not is not supported"):
        check_schema(schema, "response_format")


@pytest.mark.parametrize(
    "regex", ["(?!a)b", "a^b", "(a$)b", "(?i)a", r"\Aa\Z", r"a\z", r"[\h]", r"\Qa\E", r"\R", "[a", r"\[[^]]*\]", "[]a]"]
)
def test_a_regular_expression_of_which_a_part_would_be_ignored_is_refused(regex: str) -> None:
    with pytest.raises(BadRequest, match=r"not supported|supported at the ends"):
        check_regex(regex, "regex")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"type":"array","items":' * 60 + "{}" + "}" * 60),
        Grammar("regex", "(" * 30 + "a" + ")*" * 30),
        Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"),
        Grammar("ebnf", "root ::= " + "[a-z]* " * 1000),
        Grammar("ebnf", "root ::= " + "x" * 70_000),
        Grammar("json_schema", "{"),
    ],
)
def test_what_would_take_long_to_compile_is_refused_before(grammar: Grammar) -> None:
    with pytest.raises(BadRequest, match=f"^{grammar.kind}"):
        check_text(grammar)


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    5.5,
    1e300,
    10**30,
    "",
    "(",
    "#/$defs/a",
    "#",
    [],
    [[1]],
    [None],
    {},
    {"": []},
    {"$ref": "#"},
]
KEYWORDS = [*sorted(_FORMS), "const", "items", "additionalProperties", "unevaluatedItems", "$id", "not", "x-y"]


def _odd_schema(random: Random, depth: int) -> Any:
    """Any JSON value in any keyword's place, and references anywhere."""
    if depth == 0 or random.random() < 0.15:
        return random.choice(ODD)
    sub = partial(_odd_schema, random, depth - 1)
    schema: dict[str, Any] = {"type": random.choice(["object", "array", "string", "integer", ["null", "number"]])}
    for key in random.sample(KEYWORDS, random.choice([1, 1, 2, 5])):
        schema[key] = random.choice([sub(), [sub(), sub()], {"a": sub(), "b": sub()}, ["a"]])
    if random.random() < 0.6:
        schema.pop("type")
    return schema | {"$defs": {"a": sub()}} if random.random() < 0.2 else schema


def test_an_odd_schema_is_refused_or_accepted_and_nothing_else_happens() -> None:
    random, refused = Random(3), 0
    for _ in range(1000):
        text = json.dumps(_odd_schema(random, 2))
        try:
            check_text(Grammar("json_schema", text))
        except BadRequest:
            refused += 1
    assert 500 < refused < 1000


def _chain(tag: str, length: int) -> dict[str, Any]:
    """Schemas of which each asks for the next under two keys."""
    both = {f"{tag}{at}": {"$ref": f"#/$defs/{tag}{at + 1}"} for at in range(length)}
    return {f"{tag}{length}": CAT} | {
        name: {"type": "object", "properties": {"l": ref, "r": ref}, "required": ["l", "r"]} for name, ref in both.items()
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": _chain("a", 30) | _chain("b", 30), "oneOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}]},
        {"$defs": _chain("a", 300) | _chain("b", 300), "oneOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}]},
        {"oneOf": [{"const": each} for each in range(3000)]},
        {"oneOf": [{"type": "object", "properties": {"k": {"$ref": "#"}}, "required": ["k"]}] * 2},
        {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
    ],
    ids=["each pair once", "deep", "many", "a circle", "a pattern"],
)
def test_a_schema_that_asks_for_endless_work_is_refused_soon(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        check_schema(schema, "response_format")


@pytest.mark.parametrize(
    "text", ['{"const":NaN}', '{"properties":{"\\ud800":{}}}', '{"title":"]]]]","items":' * 60 + "{}" + "}" * 60]
)
def test_text_that_is_no_json_or_hides_its_depth_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match=r"not JSON|brackets within each other"):
        check_text(Grammar("json_schema", text))


@pytest.mark.parametrize("text", ["(" * 18, "*" * 300, '"' + "[(" * 20, "{1000000}(a){1000000}"])
def test_a_choice_may_hold_any_signs(text: str) -> None:
    check_text(one_of([text, "b"]))


UNIQUE = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
FINE = {"type": "json_schema", "json_schema": {"type": "object"}}
TEXT = {"type": "any_text"}


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (UNIQUE, "uniqueItems"),
        ({"type": "sequence", "elements": [UNIQUE], "json_schema": {}}, "format: json_schema is not supported"),
        ({"type": "or", "elements": [TEXT, UNIQUE]}, "uniqueItems"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<", "content": UNIQUE, "end": ""}]}, "uniqueItems"),
        ({"type": "dispatch", "rules": [["<", UNIQUE]]}, "uniqueItems"),
        ({"type": "tag", "begin": "", "content": TEXT, "end": "", "x": 1}, "format: x is not supported"),
        ({"type": "optional", "content": {"type": "regex", "pattern": "(?=a)"}}, "lookahead"),
        ({"type": "plus", "content": {"type": "grammar", "grammar": "x" * 70_000}}, "characters"),
        ({"type": "tag", "begin": {"type": "token", "token": 1, "y": 1}, "content": TEXT, "end": ""}, "begin: y is not"),
        (FINE | {"style": "qwen_xml"}, "style is supported as 'json'"),
        (FINE | {"any_order": True}, "any_order is supported as False"),
        (FINE | {"excludes": ["a"]}, "excludes is not supported"),
        *((FINE | {"max_whitespace_cnt": count}, "max_whitespace_cnt must be") for count in (0, 10**6)),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "'qwen_xml_parameter' is not supported"),
        ({"type": "star", "content": None}, "at format.content: a format must be an object"),
    ],
)
def test_what_would_be_ignored_or_has_no_end_is_refused_where_it_stands(form: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        check_structural_tag({"type": "structural_tag", "format": form}, "response_format")


def test_a_tag_of_another_shape_is_refused_and_marks_may_be_texts_or_tokens() -> None:
    with pytest.raises(BadRequest, match="must be"):
        check_structural_tag({"structures": [], "triggers": []}, "response_format")
    tag = {"type": "tag", "begin": {"token": 1}, "content": FINE | {"max_whitespace_cnt": None}, "end": ["a", "b"]}
    check_structural_tag({"type": "structural_tag", "format": tag}, "response_format")
