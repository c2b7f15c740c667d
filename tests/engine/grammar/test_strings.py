"""Strings in schemas: what is allowed validates, and everyday values are allowed, in schemas as pydantic and zod write them.

Strings of a given length hold every character that JSON can write, each counted once, as a validator counts them. No text makes
the counting of a grammar's limits slow.
"""

import importlib
import json
import re
from itertools import product
from random import Random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from xgrammar import GrammarMatcher

from common.errors import BadRequest
from common.model_path import resolve_model_path
from common.sampling_params import Grammar
from engine.grammar.compiler import Compiler, vocabulary_of
from engine.grammar.strings import _LITERALS, _REPEAT, LENGTHS, PATTERNS, PATTERNS_FOR, SHORT_URI, SHORT_URI_LENGTH, check_size

VOCAB, EOS, QUOTE = 2683, 2, 4
VOCABULARY = vocabulary_of(resolve_model_path("demo"), VOCAB, (EOS,))
TOKENS = VOCABULARY.decoded_vocab
URI = {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}
UUID = r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"
UNUSED = {"$defs": {"odd": {"not": {}}, "even": {"type": "integer"}}, "$ref": "#/$defs/even"}
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (URI, ["https://docs.example.com:8080/a/b%20c.html?q=1&r=%C3%A9#top"], ["no uri", ""]),
    ({"type": "string", "format": "date-time", "minLength": 1}, ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z"]),
    ({"type": "string", "format": "uuid", "pattern": UUID}, ["6ba7b810-9dad-41d1-80b4-00c04fd430c8"], ["6ba7b810"]),
    ({"type": "string", "format": "uuid4"}, ["6ba7b810-9dad-41d1-80b4-00c04fd430c8"], []),
    ({"type": "string", "format": "password", "minLength": 2, "contentEncoding": "base64", "example": 1}, ["ab"], ["a"]),
    ({"type": "integer", "format": "uint8", "minimum": 0, "maximum": 255}, [0, 255], [256, -1]),
    ({"type": "number", "format": "double"}, [1.5], ["1.5"]),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[1, 1]], [["a"]]),
    (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        [{"a": 1}],
        [{"a": "b"}],
    ),
    ({"type": "string", "enum": ["a", None]}, ["a"], [None, "b"]),
    ({"type": "string", "oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    ({"type": "number", "anyOf": [{"type": "integer"}, {"type": "null"}, {"const": 2.5}]}, [], []),
    (UNUSED, [3], ["a"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), [case for case in CASES if case[1]])
def test_what_restricts_nothing_more_is_accepted_and_the_rest_is_held(
    schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    compiled = Compiler(VOCABULARY).compile(Grammar("json_schema", json.dumps(schema)))
    for value in good + bad:
        matcher = GrammarMatcher(compiled, terminate_without_stop_token=True)
        text = json.dumps(value, separators=(",", ":"))
        assert (matcher.accept_string(text) and matcher.is_completed()) == (value in good), value


@pytest.mark.parametrize(
    "schema",
    [URI, *({"type": "string", "pattern": pattern} | ({"format": form} if form else {}) for form, pattern in PATTERNS_FOR)],
)
def test_whatever_stands_for_both_is_accepted_by_a_validator(schema: dict[str, Any]) -> None:
    random = Random(5)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    compiled = Compiler(VOCABULARY).compile(Grammar("json_schema", json.dumps(schema)))
    mask, ended = np.zeros((1, (VOCAB + 31) // 32), dtype=np.int32), 0
    for _ in range(30):
        matcher, text = GrammarMatcher(compiled), b""
        for written in range(60):
            matcher.fill_next_token_bitmask(mask)
            tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB])
            if EOS in tokens:
                assert validator.is_valid(json.loads(text)), text
                ended += 1
                break
            token = QUOTE if QUOTE in tokens and written > 8 else int(random.choice(tokens))
            matcher.accept_token(token)
            text += TOKENS[token]
    assert ended >= 10


def test_the_lengths_of_formats_are_those_of_their_patterns() -> None:
    parser = importlib.import_module("re._parser")
    for form, (shortest, longest) in LENGTHS.items():
        if form in PATTERNS:
            low, high = parser.parse(PATTERNS[form]).getwidth()
            assert shortest <= low and (longest is None or longest >= high), form
    assert parser.parse(SHORT_URI).getwidth()[1] <= SHORT_URI_LENGTH
    assert re.fullmatch(SHORT_URI, "https://a.b")


COMPILER = Compiler(vocabulary_of(resolve_model_path("demo"), 2683, (2,)))
BARE = ["", "a", "\u00e9", "\U0001f600", "\n", "\x01", '"']
ESCAPED = [r"\"", r"\\", r"\/", r"\n", r"\u0041", r"\u000a", r"\ud83d\ude00", r"\uD83D", r"\ude00", r"\ud83da"]


def _judged(schema: dict[str, Any], texts: list[str]) -> tuple[list[bool], list[bool]]:
    """What the grammar says of each text, and what a validator says. A text with half of a surrogate pair is none."""
    compiled, validator = COMPILER.compile(Grammar("json_schema", json.dumps(schema))), jsonschema_rs.validator_for(schema)
    allowed, valid = [], []
    for text in texts:
        matcher = GrammarMatcher(compiled, terminate_without_stop_token=True)
        allowed.append(matcher.accept_string(text) and matcher.is_completed())
        try:
            value = json.loads(text)
            json.dumps(value, ensure_ascii=False).encode()
            valid.append(validator.is_valid(value))
        except ValueError:
            valid.append(False)
    return allowed, valid


@pytest.mark.parametrize(
    "limits",
    [
        {"minLength": 1},
        {"maxLength": 2},
        {"minLength": 2, "maxLength": 3},
        {"maxLength": 0},
        {"maxLength": 1},
        {"minLength": 1, "maxLength": 1},
    ],
)
def test_a_string_with_a_length_holds_any_character(limits: dict[str, int]) -> None:
    texts = [f'"{"".join(parts)}"' for parts in product(BARE + ESCAPED, repeat=2)] + ['"abc"', '"abcd"', r'"a\n\n\""']
    allowed, valid = _judged({"type": "string", **limits}, texts)
    assert allowed == valid


@pytest.mark.parametrize(("least", "most"), [(0, 127), (0, 128), (0, 129), (0, 400), (8, 9), (9, 10), (128, 128), (300, 700)])
def test_long_strings_are_counted_to_the_character(least: int, most: int) -> None:
    lengths = sorted({max(least - 1, 0), least, least + 1, (least + most) // 2, most - 1, most, most + 1})
    texts = [f'"{part * length}"' for length in lengths for part in ("a", r"\n")]
    allowed, valid = _judged({"type": "string", "minLength": least, "maxLength": most}, texts)
    assert allowed == valid


@pytest.mark.parametrize("others", [True, {"type": "string"}])
def test_an_escaped_name_of_a_property_is_no_other_name(others: object) -> None:
    properties = {"a": {"type": "integer"}, "a/b": {"type": "integer"}}
    names = ["b", "a", "ab", "a/b", r"\u0061", r"a\/b", r"a\u002fb", r"\u0061/b", r"a\n", r"\"", r"\u000a", r"b\u0061", "\u00e9"]
    texts = [f'{{"{name}":{value}}}' for name in names for value in ('"x"', "1")]
    allowed, valid = _judged({"type": "object", "properties": properties, "additionalProperties": others}, texts)
    assert not [text for text, one, other in zip(texts, allowed, valid, strict=True) if one and not other]
    for name in ("b", "ab", r"a\n", r"\"", r"\u000a", r"b\u0061", "\u00e9"):
        assert allowed[texts.index(f'{{"{name}":"x"}}')]


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
