"""Strings in schemas and regular expressions: what is allowed validates, and everyday values are allowed, in schemas as pydantic
and zod write them.

A validator and Python's `re` judge. Strings of a given length hold every character that JSON can write, each counted once. No
text makes the counting of a grammar's limits slow.
"""

import importlib
import json
import re
from itertools import product
from random import Random
from typing import Any, Literal

import jsonschema_rs
import pytest

from common.errors import BadRequest
from common.sampling_params import Grammar
from engine.grammar.strings import (
    _LITERALS,
    _REPEAT,
    FORMATS,
    LENGTHS,
    PATTERNS,
    PATTERNS_FOR,
    SHORT_URI,
    SHORT_URI_LENGTH,
    check_size,
)
from tests.engine.grammar.judge import COMPILER, allowed, json_schema, random_answers, structural_tag


def in_tag(schema: object) -> Grammar:
    return structural_tag({"type": "json_schema", "json_schema": schema})


KINDS = {"json_schema": json_schema, "structural_tag": in_tag}
of_both_kinds = pytest.mark.parametrize("kind", KINDS)

URI = {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}
UUID = r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"
UNUSED = {"$defs": {"odd": {"not": {}}, "even": {"type": "integer"}}, "$ref": "#/$defs/even"}
NAMED = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}
NUMBERS = {"type": "array", "items": {"type": ["number", "null"]}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (URI, ["https://docs.example.com:8080/a/b%20c.html?q=1&r=%C3%A9#top"], ["no uri", ""]),
        ({"type": "string", "format": "date-time", "minLength": 1}, ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z"]),
        ({"type": "string", "format": "uuid", "pattern": UUID}, ["6ba7b810-9dad-41d1-80b4-00c04fd430c8"], ["6ba7b810"]),
        ({"type": "string", "format": "uuid4"}, ["6ba7b810-9dad-41d1-80b4-00c04fd430c8"], []),
        ({"type": "string", "format": "password", "minLength": 2, "contentEncoding": "base64", "example": 1}, ["ab"], ["a"]),
        ({"type": "integer", "format": "uint8", "minimum": 0, "maximum": 255}, [0, 255], [256, -1]),
        ({"type": "number", "format": "double"}, [1.5], ["1.5"]),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[1, 1]], [["a"]]),
        (NAMED, [{"a": 1}], [{"a": "b"}]),
        ({"type": "string", "enum": ["a", None]}, ["a"], [None, "b"]),
        ({"type": "string", "oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, ["a", "b"], ["c"]),
        (UNUSED, [3], ["a"]),
    ],
)
def test_what_restricts_nothing_more_is_accepted_and_the_rest_is_held(
    schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    COMPILER.compile(json_schema(schema))
    texts = [json.dumps(value, separators=(",", ":")) for value in good + bad]
    assert allowed(json_schema(schema), texts) == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "string", "format": form} for form in sorted(FORMATS - {"uri"})),  # its scheme has no end
        *({"type": "string", "pattern": pattern} | ({"format": form} if form else {}) for form, pattern in PATTERNS_FOR),
        URI,
    ],
)
def test_whatever_a_format_allows_or_stands_for_a_format_and_a_pattern_a_validator_accepts(schema: dict[str, Any]) -> None:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    answers = list(random_answers(COMPILER.compile(json_schema(schema)), Random(5), 15))
    assert len(answers) >= 5
    for text in answers:
        assert validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("name", ["hostname", "email"])
def test_a_host_or_an_address_in_daily_use_is_allowed_as_far_as_a_validator_accepts_it(name: str) -> None:
    schema = {"type": "string", "format": name}
    hosts = ["lh3.googleusercontent.com", "ec2-12-34-56-78.us-west-2.compute.amazonaws.com", "deploy-1--shop.netlify.app"]
    hosts += ["x", "ab", "a-b", "abcd", "a--b", "ab-c-", "ab--c.de", "-a.de", "a..b", f"{'a' * 63}.de", f"{'a' * 64}.de"]
    locals_ = ["anna.b.c.smith", "firstname.middle-name.verylonglastname", ".a", "a..b"]
    at = "a@" if name == "email" else ""
    texts = [at + (host if "." in host else f"{host}.de") for host in hosts] + [f"{each}@b.de" for each in locals_]
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert allowed(json_schema(schema), [json.dumps(text) for text in texts]) == list(map(validator.is_valid, texts))


def test_the_lengths_of_formats_are_those_of_their_patterns() -> None:
    parser = importlib.import_module("re._parser")
    for form, (shortest, longest) in LENGTHS.items():
        if form in PATTERNS:
            low, high = parser.parse(PATTERNS[form]).getwidth()
            assert shortest <= low and (longest is None or longest >= high), form
    assert parser.parse(SHORT_URI).getwidth()[1] <= SHORT_URI_LENGTH
    assert re.fullmatch(SHORT_URI, "https://a.b")


# --- lengths ---------------------------------------------------------------------------------------------------------------

BARE = ["", "a", "\u00e9", "\U0001f600", "\n", "\x01", '"']
ESCAPED = [r"\"", r"\\", r"\/", r"\n", r"\u0041", r"\u000a", r"\ud83d\ude00", r"\uD83D", r"\ude00", r"\ud83da"]
PAIRS = ["".join(parts) for parts in product(BARE + ESCAPED, repeat=2)] + ["abc", "abcd", r"a\n\n\""]


def valid(schema: dict[str, Any], texts: list[str]) -> list[bool]:
    """What a validator says of each text. A text with half of a surrogate pair is none."""
    validator, verdicts = jsonschema_rs.validator_for(schema), []
    for text in texts:
        try:
            value = json.loads(text)
            json.dumps(value, ensure_ascii=False).encode()
            verdicts.append(validator.is_valid(value))
        except ValueError:
            verdicts.append(False)
    return verdicts


@of_both_kinds
@pytest.mark.parametrize(("least", "most"), [(1, None), (None, 2), (2, 3), (None, 0), (None, 1), (1, 1)])
def test_a_string_with_a_length_holds_any_character(least: int | None, most: int | None, kind: str) -> None:
    limits = {"minLength": least, "maxLength": most}
    schema = {"type": "string"} | {name: limit for name, limit in limits.items() if limit is not None}
    texts = [f'"{text}"' for text in PAIRS]
    assert allowed(KINDS[kind](schema), texts) == valid(schema, texts)


@pytest.mark.parametrize(
    ("least", "most"), [(0, 127), (0, 128), (0, 129), (0, 400), (8, 9), (9, 10), (10, 100), (128, 128), (300, 700)]
)
def test_long_strings_are_counted_to_the_character(least: int, most: int) -> None:
    lengths = sorted({max(least - 1, 0), least, least + 1, (least + most) // 2, most - 1, most, most + 1})
    texts = [f'"{part * length}"' for length in lengths for part in ("a", r"\n")]
    schema = {"type": "string", "minLength": least, "maxLength": most}
    assert allowed(json_schema(schema), texts) == valid(schema, texts)


def test_strings_of_many_lengths_are_counted_to_the_character() -> None:
    """They share the rules of what must come and of what may."""
    limits = [(9 + 10 * number, 20 + 17 * number) for number in range(12)]
    strings = [{"type": "string", "minLength": least, "maxLength": most} for least, most in limits]
    schema = {"type": "array", "prefixItems": strings, "minItems": 12, "items": False}
    right = [least + number % 2 for number, (least, _) in enumerate(limits)]
    answers = [right] + [
        [*right[:at], length, *right[at + 1 :]] for at, pair in enumerate(limits) for length in (pair[0] - 1, *pair, pair[1] + 1)
    ]
    texts = [json.dumps(["a" * length for length in lengths]) for lengths in answers]
    assert allowed(json_schema(schema), texts) == valid(schema, texts)


@of_both_kinds
def test_names_and_patterns_that_look_like_rules_with_white_space_are_texts(kind: str) -> None:
    names = ["whitespace{0, 16} a", 'whitespace_2{0, 16} "b"', "(=([ ] a", '"', "[", "]"]
    properties = {name: {"type": "integer"} for name in names} | {"p": {"type": "string", "pattern": r"^\(=\([\]\[x]$"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    right: dict[str, object] = dict.fromkeys(names, 1) | {"p": "(=(]"}
    texts = [json.dumps(right, indent=indent) for indent in (None, 1, 15, 16)]
    texts += [json.dumps(right | {"p": part}) for part in ("(=([", "(=(x", "(=(", "x")]
    texts += [json.dumps({name.replace("whitespace", ""): value for name, value in right.items()})]
    assert allowed(KINDS[kind](schema), texts) == [True, True, True, False, True, True, False, False, False]


@pytest.mark.parametrize("others", [True, {"type": "string"}])
def test_an_escaped_name_of_a_property_is_no_other_name(others: object) -> None:
    properties = {"a": {"type": "integer"}, "a/b": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "additionalProperties": others}
    names = ["b", "a", "ab", "a/b", r"\u0061", r"a\/b", r"a\u002fb", r"\u0061/b", r"a\n", r"\"", r"\u000a", r"b\u0061", "\u00e9"]
    texts = [f'{{"{name}":{value}}}' for name in names for value in ('"x"', "1")]
    verdicts = dict(zip(texts, allowed(json_schema(schema), texts), strict=True))
    assert not [text for text, is_valid in zip(texts, valid(schema, texts), strict=True) if verdicts[text] and not is_valid]
    assert all(verdicts[f'{{"{name}":"x"}}'] for name in ("b", "ab", r"a\n", r"\"", r"\u000a", r"b\u0061", "\u00e9"))


# --- patterns --------------------------------------------------------------------------------------------------------------

TEXTS = ["".join(text) for length in range(5) for text in product("ab", repeat=length)]
CHARACTERS = [chr(code) for code in [*range(0x100), 0x20AC, 0x3000, 0xFEFF, 0x1F600, 0x10FFFF]]


def pattern(random: Random, depth: int) -> str:
    if depth == 0 or random.random() < 0.3:
        return random.choice(["a", "b", "[ab]", "[^a]", "."])
    if random.random() < 0.3:
        return pattern(random, depth - 1) + pattern(random, depth - 1)
    if random.random() < 0.3:
        return f"(?:{pattern(random, depth - 1)}|{random.choice(['', pattern(random, depth - 1)])})"
    return f"({pattern(random, depth - 1)}){random.choice(['?', '*', '+', '{0,2}', '{1,2}', '{2}', '{1,}'])}"


def test_a_pattern_allows_the_texts_that_the_expression_matches() -> None:
    random = Random(7)
    whole = ["(ba+)?", "a(bb*)?b", *(pattern(random, 3) for _ in range(40))]
    for one in [*(f"^({each})$" for each in whole), "ab", "^a", "b$", "^$", "aba|^b|aa$|^ab$", "(a|b)b[|(]?a"]:
        expected = [bool(re.search(one, text)) for text in TEXTS]
        assert allowed(json_schema({"type": "string", "pattern": one}), [f'"{text}"' for text in TEXTS]) == expected, one


SETS = [r"\w", r"\W", r"\D", r"\s", r"\S", "[^a]", ".", r"[\w-]", r"[^\s\d]", r"[\x41-\u0043]", "[ -~]", r"[\-\]]", "[a^]"]


@pytest.mark.parametrize("one", [*SETS, r"[\^]", "[^^]", r"[\^-a]"])
def test_a_set_of_a_pattern_holds_what_a_validator_takes_for_it_but_for_what_json_escapes(one: str) -> None:
    schema = {"type": "string", "pattern": f"^{one}$"}
    expected = [ord(each) > 0x1F and each not in '"\\' and jsonschema_rs.is_valid(schema, each) for each in CHARACTERS]
    assert allowed(json_schema(schema), [f'"{each}"' for each in CHARACTERS]) == expected


CARETS = [r"[\^a]", r"[\^\^]{1}", r"[\^-a]|b", r"[\x5ea]", "[a^]", r"[^\^a]"]
CODES = [r"\x61b", r"[\x61b]", r"[\u00e9-\xff1a]", r"[^\x7fA]", r"[\x00-\x1fA]|\xe9a"]


@pytest.mark.parametrize("one", [*CARETS, *CODES, "a.b"])
@pytest.mark.parametrize("kind", ["regex", "structural_tag"])
def test_a_caret_a_code_and_a_point_are_what_python_takes_them_for(one: str, kind: Literal["regex", "structural_tag"]) -> None:
    grammar = Grammar("regex", one) if kind == "regex" else structural_tag({"type": "regex", "pattern": one})
    texts = [*CHARACTERS, "ab", "\u061b", "\u00e9a", "\u0e9a", "a b", "a\u00e9b", "a\nb"]
    assert allowed(grammar, texts) == [bool(re.fullmatch(one, each)) for each in texts]
    assert not any(allowed(grammar, ["a\rb"])), "no end of a line, as ECMA-262 has it"


@of_both_kinds
def test_a_letter_of_latin_1_before_a_hexadecimal_digit_stays_as_it_is_where_rules_are_mended(kind: str) -> None:
    names = ["Gr\u00f6\u00dfe", "caf\u00e9", "R\u00e9daction", "\u00ff\u00e01"]
    values = {"anyOf": [{"enum": names}, {"type": "string", "pattern": "^\u00e9a[\u00ff0]\\x61b$"}]}
    grammar = KINDS[kind]({"type": "object", "properties": dict.fromkeys(names, values), "additionalProperties": False})
    texts = [json.dumps({name: value}, ensure_ascii=False) for name in names for value in [*names, "\u00e9a0ab"]]
    assert all(allowed(grammar, texts)) and allowed(grammar, ['{"caf\u00e9":"\u0e9a0ab"}']) == [False]


@of_both_kinds
@pytest.mark.parametrize("schema", [{}, NUMBERS])
def test_a_number_is_one_that_readers_of_json_know(schema: object, kind: str) -> None:
    numbers = ["1", "-0.5", "1.25e-99", "9E+99", "1e100", "1e999"]
    assert allowed(KINDS[kind](schema), [f"[{number}]" for number in numbers]) == [True, True, True, True, False, False]


@of_both_kinds
def test_patterns_hold_wherever_they_stand(kind: str) -> None:
    named = {"type": "object", "patternProperties": {"^a(ba+)?$": {"type": ["string", "null"], "pattern": "^x$|^(yx*)?$"}}}
    texts = ['[{"a":"x"}]', '[{"aba":null}]', '[{"aa":null}]', '[{"a":"yx"}]', '[{"a":"xx"}]']
    assert allowed(KINDS[kind]({"type": "array", "items": named}), texts) == [True, True, False, True, False]


@pytest.mark.parametrize("one", ["^https?://", r"\.pdf$", r"\d", "@", "^(cat|dog)", "^x$|e"])
def test_a_pattern_without_an_anchor_is_found_anywhere_as_a_validator_finds_it(one: str) -> None:
    schema = {"type": "string", "pattern": one}
    texts = ["https://example.com", "see https://a", "a.pdf", ".pdf.", "room 12", "a@b", "dogs", "x", "xx", "é d", ""]
    quoted = [json.dumps(each, ensure_ascii=False) for each in texts]
    assert allowed(json_schema(schema), quoted) == [jsonschema_rs.is_valid(schema, each) for each in texts]


def test_a_text_of_the_schema_is_no_name_of_a_pattern() -> None:
    named = {"type": "string", "pattern": "^ab?$"}
    schema = {"anyOf": [{"enum": [f"tandem{at}_pattern_0" for at in range(3)]}, {"const": "tandem_pattern_0"}, named]}
    texts = ['"tandem0_pattern_0"', '"tandem_pattern_0"', '"ab"', '"b"']
    assert allowed(json_schema(schema), texts) == [True, True, True, False]


# --- limits ----------------------------------------------------------------------------------------------------------------

FILLERS = (" ", "0", "a", ",", "\\\\", "\\a", '"', "[", "{", "(", "#", "\\u{", "{5,")
CLOSERS = ("}", "]", '"', "\n", ",", "5}")
FAR = 12
"""So many characters a pattern may look at and not take."""


@pytest.mark.parametrize("pattern", dict.fromkeys((*_LITERALS.values(), _REPEAT)))
def test_a_pattern_takes_what_it_reads_so_that_hostile_repetitions_are_read_once(pattern: re.Pattern[str]) -> None:
    def taken(text: str) -> int:
        match = pattern.match(text)
        return 0 if match is None else match.end()

    for opening, filler, closer in product(FILLERS, FILLERS, CLOSERS):
        text = opening + filler * 3 * FAR
        end = taken(text)
        if end < len(text):
            assert taken(text[: end + FAR] + closer) == end, f"{opening} and {filler!r}: {closer!r} is far away, but it matters"


@pytest.mark.parametrize("repeat", ["{20000}", "{ 20000 }", "{1,20000}", "{1 , 20000 }", "{  0020000, }", "{150}b{150}"])
def test_numbers_of_repetition_multiply_however_they_are_written(repeat: str) -> None:
    with pytest.raises(BadRequest, match="multiply"):
        check_size("regex", "regex", f"(a{repeat})")
    check_size("regex", "regex", f"(a{repeat.replace('0', '')}|\\u{{20000}}[{repeat}])")
