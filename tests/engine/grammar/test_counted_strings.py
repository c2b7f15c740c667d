"""Strings of a given length hold every character that JSON can write, each counted once, as a validator counts them."""

import json
from itertools import product
from typing import Any

import jsonschema_rs
import pytest
from xgrammar import GrammarMatcher

from common.model_path import resolve_model_path
from common.sampling_params import Grammar
from engine.grammar.compiler import Compiler, vocabulary_of

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
