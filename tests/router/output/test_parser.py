"""What a model writes becomes the same parts however its text is cut, and nothing of it is lost."""

import json
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.parsing.formats import HERMES, LLAMA3, MISTRAL, ToolFormat, answer_format
from router.api.parsing.parser import AnswerPart, ParsedAnswer, ParsedCall
from tests.router.output.answers import (
    CALLS,
    FORMATS,
    TEXTS,
    cut,
    parser_of,
    pushed,
    reference_hermes,
    written,
)

Arguments = partial(AnswerPart, "arguments")
CallBegins = partial(AnswerPart, "call")
Content = partial(AnswerPart, "content")
Reasoning = partial(AnswerPart, "reasoning")
CUTS = st.lists(st.integers(0, 500), max_size=12)
MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
OBJECTS = ('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', '{"name": ')
SOUP = st.lists(
    st.sampled_from([*MARKS, *OBJECTS, '{"id": [{', "f", "[", "]", "; ", "\n", " ", "{", "}", '"', ",", "junk"]), max_size=10
).map("".join)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(FORMATS), TEXTS, CALLS, st.integers(0, 7), CUTS)
def test_an_answer_has_the_content_and_calls_that_its_model_wrote(
    format: ToolFormat, content: str, calls: list[ParsedCall], style: int, places: list[int]
) -> None:
    text = written(format, content, calls, style)
    assert pushed(parser_of(format), cut(text, places)) == ParsedAnswer(content, "", calls)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from([*FORMATS, None]), st.booleans(), st.booleans(), SOUP, CUTS)
def test_parts_do_not_depend_on_how_the_text_is_cut(
    format: ToolFormat | None, thinks: bool, opened: bool, text: str, places: list[int]
) -> None:
    whole = pushed(parser_of(format, thinks=thinks, opened=opened), [text])
    assert pushed(parser_of(format, thinks=thinks, opened=opened), cut(text, places)) == whole
    assert pushed(parser_of(format, thinks=thinks, opened=opened), list(text)) == whole
    if not whole.calls and not thinks:
        assert whole.content == text, "what is no call is content, as it stands"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            (
                *("<tool_call>", "</tool_call>", '{"id": 1, "name": "f", "arguments": {"a": [1, "}"]}}', '{"name": "g"}'),
                *('{"x": {}}', "junk", "\n", " ", ","),
            )
        ),
        max_size=8,
    ).map("".join)
)
def test_calls_and_content_are_those_of_a_plain_reading_of_the_whole_text(text: str) -> None:
    answer = pushed(parser_of(HERMES), list(text))
    calls = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    assert ("".join(answer.content.split()), calls) == reference_hermes(text)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "xyz", "b": [1, 2]}}\n</tool_call>'),
        (LLAMA3, '{"name": "f", "parameters": {"a": "xyz", "b": [1, 2]}}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "xyz", "b": [1, 2]}}]'),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": "xyz", "b": [1, 2]}'),
    ],
)
def test_the_name_comes_first_and_arguments_come_as_they_are_written(format: ToolFormat, text: str) -> None:
    parser = parser_of(format)
    steps = [parser.push(char) for char in text]
    parts = [part for step in steps for part in step]
    assert parts[0] == CallBegins("f")
    fragments = parts[1:]
    texts = [part.text for part in fragments if part.kind == "arguments"]
    assert "".join(texts) == '{"a": "xyz", "b": [1, 2]}'
    assert max(map(len, texts)) <= 2, "a bracket waits for the character that tells it from a mark; nothing else waits"
    assert parser.finish() == []


def test_thoughts_are_told_apart_with_and_without_the_mark_in_the_prompt() -> None:
    text = "<think>\nhm, <b>\n</think>\n\nYes.\n"
    for opened in (False, True):
        assert pushed(parser_of(None, thinks=True, opened=opened), list(text)) == ParsedAnswer("Yes.\n", "hm, <b>")
    bare = "\nhm</think>Yes."
    assert pushed(parser_of(None, thinks=True, opened=True), list(bare)) == ParsedAnswer("Yes.", "hm")
    assert pushed(parser_of(None, thinks=True), list(bare)) == ParsedAnswer(bare)
    assert pushed(parser_of(None, thinks=True), ["<think>cut ", "off "]) == ParsedAnswer("", "cut off ")


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(FORMATS), CALLS.filter(bool), st.integers(0, 5), *[st.text(" \n", max_size=4)] * 2, CUTS)
def test_content_on_both_sides_of_calls_keeps_the_white_space_of_one_side(
    format: ToolFormat, calls: list[ParsedCall], style: int, before: str, after: str, places: list[int]
) -> None:
    text = written(format, "say" + before, calls, style) + after + "so"
    if format is LLAMA3 and style >= 4:
        before += "\n" * (1 + style % 2)
    answer = pushed(parser_of(format), cut(text, places))
    kept = answer.content.removeprefix("say").removesuffix("so")
    assert answer.calls == calls and kept in {before, after} and bool(kept) == bool(before + after)


def test_the_first_line_after_thoughts_keeps_its_indentation() -> None:
    text = "<think>\n  if so:\n</think> \n\n    return 1"
    assert pushed(parser_of(None, thinks=True), list(text)) == ParsedAnswer("    return 1", "  if so:")


def test_calls_follow_thoughts() -> None:
    text = '<think>call it</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert pushed(parser_of(HERMES, thinks=True), list(text)) == ParsedAnswer("", "call it", [ParsedCall("f", "{}")])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            'a <tool_call>{"name": "f", "arguments": {"x": 1',
            [Content("a"), CallBegins("f"), Arguments('{"x": 1')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": [1}</tool_call> b',
            [CallBegins("f"), Arguments('{"x": [1}'), Content("b")],
        ),
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            [Content('<tool_call>{"name": 3, "arguments": {}}</tool_call>')],
        ),
        ('<tool_call>{"name": "f"', [Content('<tool_call>{"name": "f"')]),
        ('<tool_call>{"name": "f"}</tool_call>', [CallBegins("f"), Arguments("{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {}}}</tool_call>x',
            [CallBegins("f"), Arguments("{}"), Content("}x")],
        ),
    ],
)
def test_a_broken_call_loses_no_text(text: str, parts: list[object]) -> None:
    parser = parser_of(HERMES)
    assert [*parser.push(text), *parser.finish()] == parts


def test_an_answer_in_json_that_is_no_call_is_content_for_llama() -> None:
    for text in (
        '{"name": "Bob", "age": 3}',
        '{"answer": 1}',
        ' {"name": "f"} ',
        'see\n{"name": "Bob", "x": [1]}, [\n',
        "<|python_tag|>f.call(x=1)",
    ):
        assert pushed(parser_of(LLAMA3), list(text)) == ParsedAnswer(text)


def test_a_parser_says_when_all_that_follows_is_content_as_it_is() -> None:
    parser = parser_of(None, thinks=True)
    seen = [(parser.push(text), parser.is_plain) for text in ("<think>x", "</think>", "\nyes", " no")]
    assert seen == [
        ([Reasoning("x")], False),
        ([], False),
        ([Content("yes")], True),
        ([Content(" no")], True),
    ]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("template", "tools", "thinks"),
    [
        ("{{ messages }}", None, False),
        ("{% if tools %}<tool_call>{{ '\\n</think>' }}", HERMES, True),
        ("<tool_call><function=", None, False),
        ("<tool_call><arg_key>", None, False),
        ("<|python_tag|>", LLAMA3, False),
        ("<|start_header_id|>{{- '\"parameters\": ' }}", LLAMA3, False),
        ("[TOOL_CALLS]", MISTRAL, False),
    ],
)
def test_the_format_is_what_the_chat_template_writes_unless_a_flag_names_it(
    template: str, tools: ToolFormat | None, thinks: bool
) -> None:
    found = answer_format(template, "auto", "auto")
    assert (found.tools, found.thinks) == (tools, thinks)
    named = answer_format(template, "mistral", "think")
    assert (named.tools, named.thinks) == (MISTRAL, True)
    none = answer_format(template, "none", "none")
    assert (none.tools, none.thinks) == (None, False)


def test_mistrals_calls_have_ids_that_its_templates_take() -> None:
    assert all(len(MISTRAL.new_id()) == 9 and MISTRAL.new_id().isalnum() for _ in range(20))
    ids = [HERMES.new_id() for _ in range(3)]
    assert all(one != other and one.startswith("call_") for one, other in pairwise(ids))


class Counted(str):
    """A text that counts its characters whenever it, or a part of it, is copied or stripped."""

    touched = 0

    def __getitem__(self, place: Any) -> "Counted":
        return self._counted(str.__getitem__(self, place))

    def __add__(self, other: str) -> "Counted":
        return self._counted(str.__add__(self, other))

    def __radd__(self, other: str) -> "Counted":
        return self._counted(other + str(self))

    def rstrip(self, chars: str | None = None) -> "Counted":
        Counted.touched += len(self)
        return self._counted(str.rstrip(self, chars))

    def lstrip(self, chars: str | None = None) -> "Counted":
        Counted.touched += len(self)
        return self._counted(str.lstrip(self, chars))

    @staticmethod
    def _counted(text: str) -> "Counted":
        Counted.touched += len(text)
        return Counted(text)


@pytest.mark.parametrize("piece_chars", [3, 10**6])
@pytest.mark.parametrize(
    ("format", "first", "repeated"),
    [
        (HERMES, "", "<tool_call>a"),
        (HERMES, "", '<tool_call>{"name": "f"}</tool_call>b'),
        (HERMES, '<tool_call>{"arguments": "', "long"),
        (LLAMA3, "", "x = 1\n"),
        (MISTRAL, "[TOOL_CALLS]", "name"),
        (MISTRAL, "[TOOL_CALLS]", "    "),
        (HERMES, "x", "    "),
    ],
)
def test_each_character_costs_as_much_in_a_long_answer_as_in_a_short_one(
    format: ToolFormat, first: str, repeated: str, piece_chars: int
) -> None:
    def touched(times: int) -> int:
        Counted.touched, parser, text = 0, parser_of(format), first + repeated * times
        for begin in range(0, len(text), piece_chars):
            parser.push(Counted(text[begin : begin + piece_chars]))
        parser.finish()
        return Counted.touched

    assert touched(400) < 2.2 * touched(200)
