"""Structural tags that answers could not be held to are refused, with the place."""

from typing import Any

import pytest

from common.errors import BadRequest
from engine.grammar.structural_tags import check_structural_tag

UNIQUE = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
FINE = {"type": "json_schema", "json_schema": {"type": "object"}}
TEXT = {"type": "any_text"}


def check(form: Any) -> None:
    check_structural_tag({"type": "structural_tag", "format": form}, "response_format")


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
        check(form)


def test_a_tag_of_another_shape_is_refused() -> None:
    with pytest.raises(BadRequest, match="must be"):
        check_structural_tag({"structures": [], "triggers": []}, "response_format")


def test_marks_may_be_texts_or_tokens() -> None:
    check({"type": "tag", "begin": {"token": 1}, "content": FINE | {"max_whitespace_cnt": None}, "end": ["a", "b"]})
