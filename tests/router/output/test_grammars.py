"""What the grammars let through is what the parsers read, and matches the schemas. xgrammar judges: it is what instances run."""

import json
from typing import Any

import pytest
from xgrammar import Grammar as Compiled
from xgrammar import get_model_structural_tag
from xgrammar.testing import _is_grammar_accept_string

from common.errors import BadRequest
from common.sampling_params import Grammar
from router.api.fields import Function, ToolUse
from router.api.parsing.formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    ToolFormat,
    answer_grammar,
)
from tests.router.output.answers import parser_of, pushed

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
F, G = Function("f", parameters=SCHEMA), Function("g", parameters=SCHEMA)
STRICT = Function("f", parameters=SCHEMA, strict=True)
GOOD, BAD = '{"city": "Oslo"}', '{"town": 1}'
CASES = (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)


def calls(format: ToolFormat, *arguments: str, name: str = "f") -> str:
    each = (f"{format.before_name}{name}{format.after_name}{one}{format.end}" for one in arguments)
    return format.frame[0] + format.separator.join(each) + format.frame[1]


def accepts(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None and grammar.kind == "structural_tag"
    return bool(_is_grammar_accept_string(Compiled.from_structural_tag(grammar.text), text))


def grammar_of(use: ToolUse, format: ToolFormat, response: Grammar | None = None, **thoughts: bool) -> Grammar | None:
    return answer_grammar(use, format, response, **({"thinks": False, "opened": False} | thoughts))


@pytest.mark.parametrize("format", CASES)
def test_a_required_answer_is_calls_whose_arguments_match(format: ToolFormat) -> None:
    one, two = calls(format, GOOD), calls(format, GOOD, GOOD)
    several = grammar_of(ToolUse(callable=(F, G), required=True), format)
    single = grammar_of(ToolUse(callable=(F,), required=True, parallel=False), format)
    assert [accepts(several, text) for text in (one, two, calls(format, GOOD, name="g"))] == [True] * 3
    assert [accepts(single, text) for text in (one, two, calls(format, GOOD, name="g"))] == [True, False, False]
    for text in ("Hello.", "", calls(format, BAD), calls(format, GOOD, name="h"), calls(format, GOOD, BAD), "x" + one):
        assert not accepts(several, text), text
    for text in (one, two):
        read = pushed(parser_of(format), [text])
        assert not read.content and {call.arguments for call in read.calls} == {GOOD}
        assert len(read.calls) == (1 if text == one else 2)


@pytest.mark.parametrize("format", CASES)
def test_strict_calls_match_their_schema_wherever_they_stand_in_free_text(format: ToolFormat) -> None:
    use = ToolUse(callable=(STRICT, G))
    grammar, once = grammar_of(use, format), grammar_of(ToolUse(callable=(F,), parallel=False), format)
    tag = format.trigger if format.starts_bare else ""
    good, loose = calls(format, GOOD), calls(format, BAD, name="g")
    for text in ("Hello.", "Hello. " + tag + good, good, tag + good, loose):
        assert accepts(grammar, text), text
    for text in (calls(format, BAD), "Hello. " + tag + calls(format, BAD), calls(format, GOOD, name="h")):
        assert not accepts(grammar, text), text
    if format.starts_bare:
        read = pushed(parser_of(format), ["Hello.\n" + good])
        assert accepts(grammar, "Hello.\n" + good) and read.content == "Hello." and len(read.calls) == 1
        for between in (".\n", f"{tag}{good}; ", f"{tag}{good}, ", f"{tag}{good}\n", "\n["):
            assert not accepts(grammar, "Hello" + between + calls(format, BAD)), between
        assert not accepts(grammar, f"[{calls(format, BAD)}]") and not accepts(once, f"Hello.\n{good}\n{good}")
        assert accepts(grammar, "Hello.\n{1, 2}, [3]")
    assert accepts(once, "Hello. " + tag + good) and not accepts(once, calls(format, GOOD, GOOD))
    assert pushed(parser_of(format), ["Hello. " + tag + good]).calls == pushed(parser_of(format), [good]).calls


def test_free_calls_need_no_grammar() -> None:
    assert grammar_of(ToolUse(callable=(F, G)), HERMES) is None
    assert answer_grammar(ToolUse(), None, None, thinks=True, opened=True) is None
    plain = Grammar("regex", "yes|no")
    assert answer_grammar(ToolUse(), None, plain, thinks=False, opened=False) is plain


def test_a_tool_that_says_it_is_not_strict_gets_any_object_also_where_its_call_is_required() -> None:
    loose = Function("f", parameters=SCHEMA, strict=False)
    grammar = grammar_of(ToolUse(callable=(loose,), required=True), HERMES)
    assert accepts(grammar, calls(HERMES, BAD)) and not accepts(grammar, calls(HERMES, "[1]"))


@pytest.mark.parametrize("opened", [False, True])
def test_thoughts_may_come_first(opened: bool) -> None:
    grammar = grammar_of(ToolUse(callable=(F,), required=True), HERMES, thinks=True, opened=opened)
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
    grammar = grammar_of(ToolUse(callable=(F,)), HERMES, response, thinks=True)
    call = calls(HERMES, GOOD)
    for text in (good, call, f"<think>x</think>\n{good}", f"<think>x</think>{call}"):
        assert accepts(grammar, text), text
    assert not accepts(grammar, bad) and not accepts(grammar, f"<think>x</think>{bad}")
    without_tools = answer_grammar(ToolUse(), None, response, thinks=True, opened=True)
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


def test_an_older_structural_tag_cannot_be_joined() -> None:
    older = Grammar("structural_tag", '{"structures": [], "triggers": []}')
    with pytest.raises(BadRequest, match="must have a format"):
        answer_grammar(ToolUse(), None, older, thinks=True, opened=False)


@pytest.mark.parametrize(("model", "format"), [("qwen_3", HERMES), ("llama", LLAMA3)])
def test_a_named_call_is_written_as_xgrammar_knows_the_model_to_write_it(model: str, format: ToolFormat) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    choice = {"type": "function", "function": {"name": "f"}}
    theirs = Compiled.from_structural_tag(get_model_structural_tag(model, tools, choice, reasoning="disabled"))
    ours = grammar_of(ToolUse(callable=(F,), required=True, parallel=False), format)
    for text in (calls(format, GOOD), calls(format, BAD), calls(format, GOOD, name="g"), calls(format, GOOD, GOOD), "Hello."):
        assert accepts(ours, text) == bool(_is_grammar_accept_string(theirs, text)), text
