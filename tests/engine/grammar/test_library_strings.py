"""Schemas as pydantic and zod write them are held: what is allowed validates, and everyday values are allowed."""

import importlib
import json
import re
from random import Random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from xgrammar import GrammarMatcher

from common.model_path import resolve_model_path
from common.sampling_params import Grammar
from engine.grammar.compiler import Compiler, vocabulary_of
from engine.grammar.strings import LENGTHS, PATTERNS, PATTERNS_FOR, SHORT_URI, SHORT_URI_LENGTH

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
