"""What clients of OpenAI, vLLM and SGLang send to say what an answer must match, and the grammar that it is read into."""

import json
from typing import Any

import pytest

from common.errors import BadRequest
from common.sampling_params import Grammar
from router.api.chat import read_chat
from router.api.completions import read_completion
from router.api.sglang import read_generate

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, ensure_ascii=False)
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
OLDER_TAG = {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]}
TAGS = [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"}]
TRIGGERED = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS}}


def grammar(**fields: Any) -> Grammar | None:
    return read_completion(json.dumps({"model": "demo", "prompt": "a", **fields}).encode()).grammar


ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        Grammar("json_schema", SCHEMA_TEXT),
    ),
    ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG))),
    ({"response_format": OLDER_TAG}, Grammar("structural_tag", json.dumps(TRIGGERED))),
    ({"guided_json": SCHEMA}, Grammar("json_schema", SCHEMA_TEXT)),
    ({"guided_json": SCHEMA_TEXT}, Grammar("json_schema", SCHEMA_TEXT)),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ['a"b', "é\n"]}, Grammar("ebnf", r'root ::= "a\"b" | "é\n"')),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", SCHEMA_TEXT)),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", '{"type":"object"}')),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, Grammar("structural_tag", json.dumps(TAG))),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"json_schema": SCHEMA_TEXT}, Grammar("json_schema", SCHEMA_TEXT)),
]


@pytest.mark.parametrize(("fields", "read"), ASKED, ids=[",".join(fields) or "nothing" for fields, _ in ASKED])
def test_each_way_to_ask_for_a_grammar_is_read(fields: dict[str, Any], read: Grammar | None) -> None:
    assert grammar(**fields) == read
    chat = read_chat(json.dumps({"model": "demo", "messages": [{"role": "user", "content": "a"}], **fields}).encode())
    assert chat.grammar == read


def test_sglangs_own_endpoint_takes_its_fields_in_the_sampling_parameters() -> None:
    def read(**parameters: Any) -> Grammar | None:
        return read_generate("demo", json.dumps({"text": "a", "sampling_params": parameters}).encode()).grammar

    assert read() is None and read(regex="a+") == Grammar("regex", "a+")
    assert read(structural_tag=json.dumps(TAG)) == Grammar("structural_tag", json.dumps(TAG))
    with pytest.raises(BadRequest, match=r"sampling_params.regex and sampling_params.ebnf both say"):
        read(regex="a", ebnf='root ::= "a"')


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a", "guided_choice": ["a"]}, "regex and guided_choice both say what the answer must match: send one of them"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json and structured_outputs.regex both say"),
        ({"structured_outputs": {}}, "structured_outputs is empty: send one of json"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern is not a known field"),
        ({"response_format": {"type": "xml"}}, "response_format.*type: invalid value 'xml'"),
        ({"response_format": {"type": "structural_tag"}}, "response_format of type structural_tag: send either"),
        ({"guided_choice": []}, "guided_choice must have at least 1 items"),
        ({"guided_json": "{"}, "guided_json is not JSON"),
        ({"guided_json": {"not": {}}}, r"guided_json: at \$: not is not supported: leave it out"),
        ({"regex": "x" * 70_000}, "regex has 70000 characters: send at most"),
        ({"ebnf": "(" * 40}, "ebnf has more than 16 brackets"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        grammar(**fields)
