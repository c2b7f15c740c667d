"""What the grammars let through is what the parsers read, and matches the schemas. xgrammar judges: it is what instances run."""

import json
from typing import Any

import pytest
from xgrammar import Grammar as Compiled
from xgrammar import get_model_structural_tag
from xgrammar.testing import _is_grammar_accept_string

from common.errors import BadRequest
from common.sampling_params import Grammar
from router.api.parsing.formats import (
    ANALYSIS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HARMONY,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHONIC,
    QWEN3_CODER,
    THINK,
    TOOL_FORMATS,
    AnswerFormat,
)
from router.api.parsing.grammars import answer_grammar
from router.api.parsing.parser import ParsedCall, Thoughts
from router.api.parsing.readers import ToolFormat
from router.api.tools import Function, ToolUse
from tests.router.output.answers import call_text, parser_of, pushed

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
F, G = Function("f", parameters=SCHEMA), Function("g", parameters=SCHEMA)
STRICT = Function("f", parameters=SCHEMA, strict=True)
GOOD, BAD = '{"city": "Oslo"}', '{"town": 1}'
JSON_CASES = (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)
CASES = pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.names[0] + "-args" * (format is MISTRAL_ARGS))


def calls(format: ToolFormat, *arguments: str, name: str = "f") -> str:
    if format in JSON_CASES:
        each = [format.call.replace("{name}", name).replace("{arguments}", one) for one in arguments]
    else:
        each = [call_text(format, ParsedCall(name, one), 0, number) for number, one in enumerate(arguments)]
        each = [one.removesuffix("<|call|>") for one in each]  # which ends the answer, so a grammar has none
    return format.all.replace("{calls}", (format.separator or "").join(each))


def accepts(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None and grammar.kind == "structural_tag"
    return bool(_is_grammar_accept_string(Compiled.from_structural_tag(grammar.text), text))


def grammar_of(
    use: ToolUse,
    format: ToolFormat | None,
    response: Grammar | None = None,
    *,
    thoughts: Thoughts | None = None,
    opened: bool = False,
) -> Grammar | None:
    return answer_grammar(use, AnswerFormat(format, thoughts), response, field="text", opened=opened)


@CASES
def test_a_required_answer_is_calls_whose_arguments_match(format: ToolFormat) -> None:
    one, two = calls(format, GOOD), calls(format, GOOD, GOOD)
    several = grammar_of(ToolUse(callable=(F, G), required=True), format)
    single = grammar_of(ToolUse(callable=(F,), required=True, parallel=False), format)
    is_many = format.separator is not None
    assert [accepts(several, text) for text in (one, two, calls(format, GOOD, name="g"))] == [True, is_many, True]
    assert [accepts(single, text) for text in (one, two, calls(format, GOOD, name="g"))] == [True, False, False]
    for text in ("Hello.", "", calls(format, BAD), calls(format, GOOD, name="h"), calls(format, GOOD, BAD), "x" + one):
        assert not accepts(several, text), text
    for text in (one, two) if is_many else (one,):
        read = pushed(parser_of(format, functions=(F, G)), [text])
        assert not read.content and {json.dumps(json.loads(call.arguments)) for call in read.calls} == {GOOD}
        assert len(read.calls) == (1 if text == one else 2)


@CASES
def test_strict_calls_match_their_schema_wherever_they_stand_in_free_text(format: ToolFormat) -> None:
    use = ToolUse(callable=(STRICT, G))
    grammar, once = grammar_of(use, format), grammar_of(ToolUse(callable=(F,), parallel=False), format)
    hello = AnswerFormat(format, None).before_content + "Hello. "
    good, loose = calls(format, GOOD), calls(format, BAD, name="g")
    for text in (hello, good, loose):
        assert accepts(grammar, text), text
    for text in (calls(format, BAD), *(() if format.brackets == "()" else (calls(format, GOOD, name="h"),))):
        assert not accepts(grammar, text), text  # what calls no function of the request is text in pythonic answers
    assert accepts(once, good) and not accepts(once, calls(format, GOOD, GOOD))
    if format.stands_alone:
        assert not accepts(grammar, hello + good)
        return
    tag = format.bare[0]
    assert accepts(grammar, hello + tag + good) and not accepts(grammar, hello + tag + calls(format, BAD))
    if format.bare[0]:
        assert accepts(grammar, tag + good)
        read = pushed(parser_of(format), ["Hello.\n" + good])
        assert accepts(grammar, "Hello.\n" + good) and read.content == "Hello." and len(read.calls) == 1
        for between in (".\n", f"{tag}{good}; ", f"{tag}{good}, ", f"{tag}{good}\n", "\n["):
            assert not accepts(grammar, "Hello" + between + calls(format, BAD)), between
        assert not accepts(grammar, f"[{calls(format, BAD)}]") and not accepts(once, f"Hello.\n{good}\n{good}")
        assert accepts(grammar, "Hello.\n{1, 2}, [3]")
    assert accepts(once, hello + tag + good)
    assert pushed(parser_of(format), [hello + tag + good]).calls == pushed(parser_of(format), [good]).calls


MANY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "n": {"type": "integer", "minimum": 0},
        "unit": {"enum": ["C", "F"]},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}},
    },
    "required": ["n", "flag"],
    "additionalProperties": False,
    "$defs": {"Tag": {"type": "string"}},
}
FLAT = {**MANY, "properties": {key: value for key, value in MANY["properties"].items() if key != "tags"}}


@CASES
@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"n": 1, "flag": True}, True),
        ({"city": 'a "b" <c>\n, d]', "n": 20, "unit": "F", "flag": False, "maybe": "5"}, True),
        ({"n": 0, "unit": "C", "flag": True, "maybe": None}, True),
        ({"n": 1, "flag": True, "tags": ["a </tool_call>", "it's"]}, True),
        ({"city": "a", "flag": True}, False),
        ({"n": -1, "flag": True}, False),
        ({"n": 1, "unit": "K", "flag": True}, False),
        ({"n": 1, "flag": True, "other": 1}, False),
    ],
)
def test_typed_arguments_are_held_to_their_schema(format: ToolFormat, arguments: dict[str, Any], is_right: bool) -> None:
    if format.quote and "tags" in arguments:
        return  # what Gemma's formats cannot be held to: see below
    function = Function("f", parameters=FLAT if format.quote else MANY)
    text = calls(format, json.dumps(arguments))
    assert accepts(grammar_of(ToolUse(callable=(function,), required=True), format), text) is is_right
    if is_right:
        (call,) = pushed(parser_of(format, functions=(function,)), [text]).calls
        assert json.loads(call.arguments) == arguments


@CASES
def test_arguments_without_a_schema_are_any_and_those_of_an_empty_one_are_none(format: ToolFormat) -> None:
    anything, nothing = Function("f"), Function("f", parameters={"type": "object", "properties": {}})
    for function, accepted in ((anything, (True, True)), (nothing, (True, False))):
        grammar = grammar_of(ToolUse(callable=(function,), required=True), format)
        assert (accepts(grammar, calls(format, "{}")), accepts(grammar, calls(format, '{"a": "b", "c": "d"}'))) == accepted


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern beside texts"),
        ({"type": "string", "maxLength": 3}, "maxLength beside texts"),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, "a structure beside texts"),
    ],
)
def test_what_a_format_of_values_as_they_are_cannot_be_held_to_is_refused_by_name(schema: dict[str, Any], problem: str) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(BadRequest, match=rf"f\.a: .*qwen3_coder cannot be held to {problem}.*strict=false"):
        grammar_of(ToolUse(callable=(Function("f", parameters=parameters),), required=True), QWEN3_CODER)
    loose = Function("f", parameters=parameters, strict=False)
    assert accepts(grammar_of(ToolUse(callable=(loose,), required=True), QWEN3_CODER), calls(QWEN3_CODER, '{"a": "b"}'))


def test_what_would_make_a_grammar_far_larger_than_its_schema_is_refused() -> None:
    defs = {"T": {"enum": ["x" * 100] * 100}}
    for schema in (
        {"properties": {f"a{at}": {"type": "integer"} for at in range(17)}},
        {"properties": {f"a{at}": {"$ref": "#/$defs/T"} for at in range(20)}, "$defs": defs, "required": ["a1"]},
    ):
        with pytest.raises(BadRequest, match=r"cannot be held to (more than 16 arguments|so many arguments)"):
            grammar_of(ToolUse(callable=(Function("f", parameters={"type": "object", **schema}),), required=True), PYTHONIC)


def test_gpt_oss_answers_in_its_final_channel_what_the_response_format_says() -> None:
    answer = AnswerFormat(HARMONY, ANALYSIS)
    grammar = answer_grammar(ToolUse(), answer, Grammar("regex", "yes|no"), field="regex", opened=False)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert accepts(grammar, thought + "<|channel|>final<|message|>yes") and accepts(grammar, "<|channel|>final<|message|>no")
    assert not accepts(grammar, "yes") and not accepts(grammar, thought + "<|channel|>final<|message|>maybe")


def test_free_calls_need_no_grammar() -> None:
    assert grammar_of(ToolUse(callable=(F, G)), HERMES) is None
    assert grammar_of(ToolUse(), None, thoughts=THINK, opened=True) is None
    plain = Grammar("regex", "yes|no")
    assert grammar_of(ToolUse(), None, plain) is plain


def test_a_tool_that_says_it_is_not_strict_gets_any_object_also_where_its_call_is_required() -> None:
    loose = Function("f", parameters=SCHEMA, strict=False)
    grammar = grammar_of(ToolUse(callable=(loose,), required=True), HERMES)
    assert accepts(grammar, calls(HERMES, BAD)) and not accepts(grammar, calls(HERMES, "[1]"))


@pytest.mark.parametrize("opened", [False, True])
def test_thoughts_may_come_first(opened: bool) -> None:
    grammar = grammar_of(ToolUse(callable=(F,), required=True), HERMES, thoughts=THINK, opened=opened)
    call = calls(HERMES, GOOD)
    for space in ("", "\n", "\n\n"):
        assert accepts(grammar, ("" if opened else "<think>") + f"\nhm <tool_call>\n</think>{space}{call}")
    assert accepts(grammar, call) is not opened


@pytest.mark.parametrize(
    ("response", "good", "bad"),
    [
        (Grammar("json_schema", json.dumps(SCHEMA)), GOOD, BAD),
        (Grammar("json_schema", "{}"), BAD, "x"),
        (Grammar("regex", "yes|no"), "yes", "maybe"),
        (Grammar("ebnf", 'root ::= "yes" | "no"'), "no", "maybe"),
        (
            Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}'),
            "yes",
            "no",
        ),
    ],
)
def test_an_answer_is_a_call_or_what_the_response_format_says_after_its_thoughts(response: Grammar, good: str, bad: str) -> None:
    grammar = grammar_of(ToolUse(callable=(F,)), HERMES, response, thoughts=THINK)
    call = calls(HERMES, GOOD)
    for text in (good, call, f"<think>x</think>\n{good}", f"<think>x</think>{call}"):
        assert accepts(grammar, text), text
    assert not accepts(grammar, bad) and not accepts(grammar, f"<think>x</think>{bad}")
    without_tools = grammar_of(ToolUse(), None, response, thoughts=THINK, opened=True)
    assert accepts(without_tools, f"x</think>{good}") and not accepts(without_tools, good)


def test_where_calls_are_required_a_response_format_has_no_text_to_hold() -> None:
    """instructor's RESPONSES_TOOLS sends the schema both ways."""
    schema = Grammar("json_schema", json.dumps(SCHEMA))
    for use in (ToolUse(callable=(F, G), required=True), ToolUse(callable=(F,), required=True, parallel=False)):
        assert grammar_of(use, HERMES, schema) == grammar_of(use, HERMES)


def test_a_schema_that_calls_cannot_be_held_to_is_refused_by_field() -> None:
    endless = Function("f", parameters={"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, strict=True)
    with pytest.raises(BadRequest) as refused:
        grammar_of(ToolUse(callable=(endless,)), HERMES)
    assert refused.value.field == "tools"


@pytest.mark.parametrize(
    ("model", "format"),
    [
        ("qwen_3", HERMES),
        ("llama", LLAMA3),
        ("qwen_3_coder", QWEN3_CODER),
        ("deepseek_r1", DEEPSEEK_V3),
        ("deepseek_v3_1", DEEPSEEK_V31),
        ("kimi", KIMI_K2),
    ],
)
def test_a_named_call_is_written_as_xgrammar_knows_the_model_to_write_it(model: str, format: ToolFormat) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    choice = {"type": "function", "function": {"name": "f"}}
    theirs = Compiled.from_structural_tag(get_model_structural_tag(model, tools, choice, reasoning="disabled"))
    ours = grammar_of(ToolUse(callable=(F,), required=True, parallel=False), format)
    for text in (calls(format, GOOD), calls(format, BAD), calls(format, GOOD, name="g"), calls(format, GOOD, GOOD), "Hello."):
        assert accepts(ours, text) == bool(_is_grammar_accept_string(theirs, text)), text
