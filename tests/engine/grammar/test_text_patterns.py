"""The patterns of a JSON schema allow what the regular expressions say, as a validator and Python's `re` read them."""

import json
import re
from itertools import product
from random import Random
from typing import Literal

import jsonschema_rs
import pytest
from xgrammar import GrammarMatcher

from common.model_path import resolve_model_path
from common.sampling_params import Grammar
from engine.grammar.compiler import Compiler, vocabulary_of

COMPILER = Compiler(vocabulary_of(resolve_model_path("demo"), 2683, (2,)))
TEXTS = ["".join(text) for length in range(5) for text in product("ab", repeat=length)]
CHARACTERS = [chr(code) for code in [*range(0x100), 0x20AC, 0x3000, 0xFEFF, 0x1F600, 0x10FFFF]]


def allowed(schema: object, texts: list[str], kind: str = "json_schema") -> list[bool]:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    text = json.dumps(schema if kind == "json_schema" else tag)
    return matched(Grammar("json_schema" if kind == "json_schema" else "structural_tag", text), texts)


def matched(grammar: Grammar, texts: list[str]) -> list[bool]:
    compiled = COMPILER.compile_unchecked(grammar)
    matchers = [(text, GrammarMatcher(compiled, terminate_without_stop_token=True)) for text in texts]
    return [matcher.accept_string(text) and matcher.is_completed() for text, matcher in matchers]


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
        assert allowed({"type": "string", "pattern": one}, [f'"{text}"' for text in TEXTS]) == expected, one


@pytest.mark.parametrize(
    "one",
    [
        r"\w",
        r"\W",
        r"\D",
        r"\s",
        r"\S",
        "[^a]",
        ".",
        r"[\w-]",
        r"[^\s\d]",
        r"[\x41-\u0043]",
        "[ -~]",
        r"[\-\]]",
        "[a^]",
        r"[\^]",
        "[^^]",
        "[\\^-a]",
    ],
)
def test_a_set_of_a_pattern_holds_what_a_validator_takes_for_it_but_for_what_json_escapes(one: str) -> None:
    schema = {"type": "string", "pattern": f"^{one}$"}
    expected = [ord(each) > 0x1F and each not in '"\\' and jsonschema_rs.is_valid(schema, each) for each in CHARACTERS]
    assert allowed(schema, [f'"{each}"' for each in CHARACTERS]) == expected


CARETS = [r"[\^a]", r"[\^\^]{1}", r"[\^-a]|b", r"[\x5ea]", "[a^]", r"[^\^a]"]
CODES = [r"\x61b", r"[\x61b]", r"[\u00e9-\xff1a]", r"[^\x7fA]", r"[\x00-\x1fA]|\xe9a"]


@pytest.mark.parametrize("one", CARETS + CODES)
@pytest.mark.parametrize("kind", ["regex", "structural_tag"])
def test_a_caret_and_a_code_are_what_python_takes_them_for(one: str, kind: Literal["regex", "structural_tag"]) -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": one}}
    grammar = Grammar(kind, one if kind == "regex" else json.dumps(tag))
    texts = [*CHARACTERS, "ab", "\u061b", "\u00e9a", "\u0e9a"]
    assert matched(grammar, texts) == [bool(re.fullmatch(one, each)) for each in texts]


def test_a_point_is_no_end_of_a_line() -> None:
    assert matched(Grammar("regex", "a.b"), ["a b", "a\u00e9b", "a\nb", "a\rb"]) == [True, True, False, False]


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_a_letter_of_latin_1_before_a_hexadecimal_digit_stays_as_it_is_where_rules_are_mended(kind: str) -> None:
    names = ["Gr\u00f6\u00dfe", "caf\u00e9", "R\u00e9daction", "\u00ff\u00e01"]
    values = {"anyOf": [{"enum": names}, {"type": "string", "pattern": "^\u00e9a[\u00ff0]\\x61b$"}]}
    schema = {"type": "object", "properties": dict.fromkeys(names, values), "additionalProperties": False}
    texts = [json.dumps({name: value}, ensure_ascii=False) for name in names for value in [*names, "\u00e9a0ab"]]
    assert all(allowed(schema, texts, kind)) and allowed(schema, ['{"caf\u00e9":"\u0e9a0ab"}'], kind) == [False]


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
@pytest.mark.parametrize("schema", [{}, {"type": "array", "items": {"type": ["number", "null"]}}])
def test_a_number_is_one_that_readers_of_json_know(schema: object, kind: str) -> None:
    numbers = ["1", "-0.5", "1.25e-99", "9E+99", "1e100", "1e999"]
    readable = [True, True, True, True, False, False]
    assert allowed(schema, [f"[{number}]" for number in numbers], kind) == readable


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_patterns_hold_wherever_they_stand(kind: str) -> None:
    named = {"type": "object", "patternProperties": {"^a(ba+)?$": {"type": ["string", "null"], "pattern": "^x$|^(yx*)?$"}}}
    texts = ['{"a":"x"}', '{"aba":null}', '{"aa":null}', '{"a":"yx"}', '{"a":"xx"}']
    assert allowed({"type": "array", "items": named}, [f"[{text}]" for text in texts], kind) == [True, True, False, True, False]


@pytest.mark.parametrize("one", ["^https?://", r"\.pdf$", r"\d", "@", "^(cat|dog)", "^x$|e"])
def test_a_pattern_without_an_anchor_is_found_anywhere_as_a_validator_finds_it(one: str) -> None:
    schema = {"type": "string", "pattern": one}
    texts = ["https://example.com", "see https://a", "a.pdf", ".pdf.", "room 12", "a@b", "dogs", "x", "xx", "é d", ""]
    assert allowed(schema, [json.dumps(each, ensure_ascii=False) for each in texts]) == [
        jsonschema_rs.is_valid(schema, each) for each in texts
    ]


def test_a_text_of_the_schema_is_no_name_of_a_pattern() -> None:
    named = {"type": "string", "pattern": "^ab?$"}
    schema = {"anyOf": [{"enum": [f"tandem{at}_pattern_0" for at in range(3)]}, {"const": "tandem_pattern_0"}, named]}
    texts = ['"tandem0_pattern_0"', '"tandem_pattern_0"', '"ab"', '"b"']
    assert allowed(schema, texts) == [True, True, True, False]
