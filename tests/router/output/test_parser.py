"""What a model writes becomes the same parts however its text is cut, and nothing of it is lost."""

import json
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common.config import ReasoningParserName, ToolParserName
from router.api.parsing.formats import (
    ANALYSIS,
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTIONGEMMA,
    GEMMA4,
    GEMMA4_THOUGHT,
    GLM45,
    HARMONY,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_THINK,
    PYTHONIC,
    QWEN3_CODER,
    THINK,
    THOUGHTS,
    TOOL_FORMATS,
    AnswerFormat,
    answer_format,
)
from router.api.parsing.parser import AnswerPart, ParsedAnswer, ParsedCall, Thoughts
from router.api.parsing.readers import ToolFormat, kinds_in
from tests.router.output.answers import (
    CALLS,
    FORMATS,
    FUNCTIONS,
    TEXTS,
    TYPED_CALLS,
    TYPED_FORMATS,
    call_text,
    cut,
    meant,
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
OBJECTS = ('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', '{"name": ', '{"id": [{')
PIECES = [
    *(*OBJECTS, "f", "city", "x", "word", "True", "to=", "[ARGS]", "; ", "\n", " "),
    *("[", "]", "(", ")", "=", ":", "'", '"', ",", "{", "}", "\\"),
]
EACH = pytest.mark.parametrize("format", [*FORMATS, *TYPED_FORMATS], ids=lambda format: format.names[0])


def soup_of(format: ToolFormat) -> st.SearchStrategy[str]:
    """Texts of a format's marks, parts of its calls and other text, in any order."""
    call = written(format, "", [ParsedCall("f", '{"city": "a", "x": [1, {}]}')], 0)
    parts = [*(text for text in format.texts if text), *(call[:end] for end in range(5, len(call), 9)), "<think>", "</think>"]
    return st.lists(st.sampled_from(parts) | st.sampled_from(PIECES), max_size=10).map("".join)


def check_written(format: ToolFormat, content: str, calls: list[ParsedCall], style: int, places: list[int]) -> None:
    text, sent = written(format, content, calls, style), ParsedAnswer(content, "", calls)
    read = pushed(parser_of(format), cut(text, places))
    assert meant(read) == meant(sent), text
    assert pushed(parser_of(format), list(text)) == read, "streamed as whole"


def check_soup(format: ToolFormat, text: str, thinks: bool, opened: bool, places: list[int]) -> None:
    whole = pushed(parser_of(format, thinks=thinks, opened=opened), [text])
    assert pushed(parser_of(format, thinks=thinks, opened=opened), cut(text, places)) == whole
    assert pushed(parser_of(format, thinks=thinks, opened=opened), list(text)) == whole
    if format is HARMONY:
        return
    if not whole.calls and not thinks:
        assert whole.content == text, "what is no call is content, as it stands"
    told = whole.content + whole.reasoning + "".join(call.name + call.arguments for call in whole.calls)
    assert told.count("word") == text.count("word"), "no text is lost"


@EACH
@settings(max_examples=25, deadline=None)
@given(TEXTS, TYPED_CALLS, st.integers(0, 7), CUTS)
def test_arguments_have_the_types_of_their_schema(
    format: ToolFormat, content: str, calls: list[ParsedCall], style: int, places: list[int]
) -> None:
    check_written(format, content, calls, style, places)


@EACH
@settings(max_examples=25, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), CUTS)
def test_hostile_texts_raise_nothing_and_lose_nothing(
    format: ToolFormat, data: st.DataObject, thinks: bool, opened: bool, places: list[int]
) -> None:
    check_soup(format, data.draw(soup_of(format)), thinks, opened, places)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@EACH
@settings(max_examples=10_000, deadline=None, phases=[Phase.generate])
@given(st.data(), TEXTS, TYPED_CALLS, st.integers(0, 7), st.booleans(), st.booleans(), CUTS)
def test_ten_thousand_answers_and_hostile_texts_of_each_format(
    format: ToolFormat,
    data: st.DataObject,
    content: str,
    calls: list[ParsedCall],
    style: int,
    thinks: bool,
    opened: bool,
    places: list[int],
) -> None:
    check_written(format, content, calls, style, places)
    check_soup(format, data.draw(soup_of(format)), thinks, opened, places)


EXAMPLES: list[tuple[ToolFormat, str, str, list[tuple[str, Any]]]] = [
    (
        QWEN3_CODER,
        "Running it.\n\n<tool_call>\n<function=f>\n<parameter=city>\nfor x in y:\n    if a < b:\n\n</parameter>\n<parameter=x>\n"
        "{'a': True, 'b': \"it's\"}\n</parameter>\n<parameter=flag>\ntrue\n</parameter>\n</function>\n</tool_call>",
        "Running it.",
        [("f", {"city": "for x in y:\n    if a < b:\n", "x": {"a": True, "b": "it's"}, "flag": True})],
    ),
    (QWEN3_CODER, "<function=f>\n</function>\n", "", [("f", {})]),
    (QWEN3_CODER, "<function=f>\n<parameter=n>soon</parameter></function>", "", [("f", {"n": "soon"})]),
    (QWEN3_CODER, "<function=g>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\nfive", "", [("g", None)]),
    (QWEN3_CODER, "use <tool_call> or <function=f> as you like", "use <tool_call> or <function=f> as you like", []),
    (
        GLM45,
        "Two.\n<tool_call>f\n</tool_call>\n<tool_call>a.b-c<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>",
        "Two.",
        [("f", {}), ("a.b-c", {"n": 3})],
    ),
    (
        GLM45,
        "<tool_call>f\n<arg_key>other</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>",
        "",
        [("f", {"other": [1, 2]})],
    ),
    (GLM45, "<tool_call>hello world</tool_call>", "<tool_call>hello world</tool_call>", []),
    (
        DEEPSEEK_V3,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"city": "```"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "",
        [("f", {"city": "```"})],
    ),
    (
        DEEPSEEK_V31,
        "Both: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>"
        '{"a": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Both:",
        [("f", {}), ("g", {"a": "<｜tool▁call▁end｜>"})],
    ),
    (
        KIMI_K2,
        "<|tool_calls_section_begin|> <|tool_call_begin|> functions.f:12 <|tool_call_argument_begin|> "
        '{"n": 1} <|tool_call_end|>'
        "<|tool_call_begin|>g:0<|tool_call_argument_begin|>{}<|tool_call_end|> <|tool_calls_section_end|>",
        "",
        [("f", {"n": 1}), ("g", {})],
    ),
    (
        KIMI_K2,
        "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>",
        [],
    ),
    (HARMONY, ' to=functions.f<|channel|>commentary json<|message|>{"n":1}<|call|>', "", [("f", {"n": 1})]),
    (
        HARMONY,
        "<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "I look.",
        [("f", {})],
    ),
    (
        HARMONY,
        "<|channel|>commentary to=browser.open code<|message|>x<|call|>",
        "<|channel|>commentary to=browser.open code<|message|>x",
        [],
    ),
    (HARMONY, "<|channel|>final<|message|>Hi.<|return|>", "Hi.", []),
    (HARMONY, "no marks", "no marks", []),
    (
        PYTHONIC,
        "[f(city='it\\'s', n=-1, flag=True, x=[1, (2, None), {'a': False}], either=None), get_weather()]",
        "",
        [("f", {"city": "it's", "n": -1, "flag": True, "x": [1, [2, None], {"a": False}], "either": None}), ("get_weather", {})],
    ),
    (
        PYTHONIC,
        '<|python_start|>[f(city="a\\nb, [c)", flag=true)]<|python_end|>',
        "",
        [("f", {"city": "a\nb, [c)", "flag": True})],
    ),
    (PYTHONIC, "[unknown(n=1)] [f] f(n=1)", "[unknown(n=1)] [f] f(n=1)", []),
    (PYTHONIC, "[f(n=soon)]", "", [("f", {"n": "soon"})]),
    (PYTHONIC, "[f(1)]", "1)]", [("f", {})]),
    (
        FUNCTIONGEMMA,
        "Wait. <start_function_call>call:f{city:<escape>São, {P}<escape>,n:<escape>42<escape>,"
        "flag:<escape>true<escape>}"
        "<end_function_call><start_function_call>call:g{}<end_function_call>",
        "Wait.",
        [("f", {"city": "São, {P}", "n": 42, "flag": True}), ("g", {})],
    ),
    (
        FUNCTIONGEMMA,
        "<start_function_call>call:f{city:<escape>42<escape>either:<escape>42<escape>}",
        "",
        [("f", {"city": "42", "either": "42"})],
    ),
    (
        GEMMA4,
        '<|tool_call>call:f{city:<|"|>a<|"|>,x:{a:[<|"|>b:{<|"|>,1.5,true]}}<tool_call|>',
        "",
        [("f", {"city": "a", "x": {"a": ["b:{", 1.5, True]}})],
    ),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), EXAMPLES)
def test_an_example_reads_the_same_at_each_cut(format: ToolFormat, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    whole = pushed(parser_of(format), [text])
    assert whole.content == content and [call.name for call in whole.calls] == [name for name, _ in calls]
    for call, (_, arguments) in zip(whole.calls, calls, strict=True):
        assert (json.loads(call.arguments) if arguments is not None else None) == arguments
    for place in range(len(text)):
        assert pushed(parser_of(format), [text[:place], text[place:]]) == whole, place


@pytest.mark.parametrize("thoughts", THOUGHTS, ids=lambda thoughts: thoughts.names[0])
@pytest.mark.parametrize("format", [*TYPED_FORMATS, HERMES], ids=lambda format: format.names[0])
def test_calls_follow_thoughts_of_each_kind(format: ToolFormat, thoughts: Thoughts) -> None:
    if (format is HARMONY) != (thoughts is ANALYSIS):
        return
    call = [ParsedCall("f", '{"n": 1}')]
    text = f"{thoughts.begin}\nOne, <b>\n{thoughts.end}" + (thoughts.then or "\n\n") + written(format, "", call, 0)
    new_parser = AnswerFormat(format, thoughts).new_parser(FUNCTIONS, separates=True, opened=thoughts.always)
    assert new_parser is not None
    for place in range(len(text)):
        assert meant(pushed(new_parser(), [text[:place], text[place:]])) == ("", "One, <b>", [("f", {"n": 1})])


@settings(max_examples=50, deadline=None)
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


@settings(max_examples=50, deadline=None)
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


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('a <tool_call>{"name": "f", "arguments": {"x": 1', [Content("a"), CallBegins("f"), Arguments('{"x": 1')]),
        (
            '<tool_call>{"name": "f", "arguments": {"x": [1}</tool_call> b',
            [CallBegins("f"), Arguments('{"x": [1}'), Content("b")],
        ),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', [Content('<tool_call>{"name": 3, "arguments": {}}</tool_call>')]),
        ('<tool_call>{"name": "f"', [Content('<tool_call>{"name": "f"')]),
        ('<tool_call>{"name": "f"}</tool_call>', [CallBegins("f"), Arguments("{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>x', [CallBegins("f"), Arguments("{}"), Content("}x")]),
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
    assert seen == [([Reasoning("x")], False), ([], False), ([Content("yes")], True), ([Content(" no")], True)]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("template", "tools", "thoughts"),
    [
        ("{{ messages }}", None, None),
        ("{% if tools %}<tool_call>{{ '\\n</think>' }}", HERMES, THINK),
        ("<|python_tag|>", LLAMA3, None),
        ("<|start_header_id|>{{- '\"parameters\": ' }}", LLAMA3, None),
        ("[TOOL_CALLS]", MISTRAL, None),
        ("'<tool_call>\\n<function=' + name + '>' '<parameter=' + key", QWEN3_CODER, None),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key> '</think>'", GLM45, THINK),
        ("'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json\\n'", DEEPSEEK_V3, None),
        ("```json '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments + '<｜tool▁call▁end｜>'", DEEPSEEK_V31, None),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", KIMI_K2, None),
        ("<|start|>assistant<|channel|>analysis<|message|> + '<|channel|>commentary '", HARMONY, ANALYSIS),
        ("<|header_start|> [func_name1(params_name1=params_value1)]", PYTHONIC, None),
        ("<|header_start|> {{- '\"parameters\": ' }}", LLAMA3, None),
        ("<start_function_call>call:", FUNCTIONGEMMA, None),
        ("'<|tool_call>call:' '<|channel>thought\\n'", GEMMA4, GEMMA4_THOUGHT),
        ("[TOOL_CALLS] [ARGS] [THINK]", MISTRAL_ARGS, MISTRAL_THINK),
        ("<|user|> <|end|> <|assistant|>", None, None),
    ],
)
def test_the_format_is_what_the_chat_template_writes_unless_a_flag_names_it(
    template: str, tools: ToolFormat | None, thoughts: Thoughts | None
) -> None:
    assert answer_format(template, "auto", "auto") == AnswerFormat(tools, thoughts)
    named = answer_format(template, "mistral", "think")
    assert named == AnswerFormat(MISTRAL_ARGS if "[ARGS]" in template else MISTRAL, THINK)
    assert answer_format(template, "none", "none") == AnswerFormat(None, None)


def test_each_name_of_a_flag_is_one_formats_but_for_those_that_the_template_tells_apart() -> None:
    assert {name for format in TOOL_FORMATS for name in format.names} == {*get_args(ToolParserName)} - {"auto", "none"}
    assert {name for each in THOUGHTS for name in each.names} == {*get_args(ReasoningParserName)} - {"auto", "none"}
    for format in TOOL_FORMATS:
        for name in format.names:
            assert answer_format("", name, "none").tools is (MISTRAL if name == "mistral" else format)
    assert answer_format("", "none", "deepseek-r1").thoughts is DEEPSEEK_R1


def test_types_are_seen_through_references_and_choices_in_few_steps() -> None:
    refs = [{"$ref": f"#/$defs/T{at % 9}"} for at in range(900)]
    root = {"$defs": {f"T{at}": {"anyOf": [*refs, {"type": "integer"}]} for at in range(9)} | {"E": {"enum": ["5", None]}}}
    assert kinds_in(refs[0], root) == set()
    assert kinds_in({"oneOf": [{"$ref": "#/$defs/E"}, {"type": ["array", "string"]}]}, root) == {"string", "null", "array"}
    for anything in ({}, None, True, {"$ref": "#/nowhere"}, {"type": "float"}, {"anyOf": [{"type": "string"}, {}]}):
        assert kinds_in(anything, root) == set(), anything


def test_mistrals_calls_have_ids_that_its_templates_take() -> None:
    assert all(len(MISTRAL.new_id("f", 0)) == 9 and MISTRAL.new_id("f", 0).isalnum() for _ in range(20))
    ids = [HERMES.new_id("f", 0) for _ in range(3)]
    assert all(one != other and one.startswith("call_") for one, other in pairwise(ids))
    assert KIMI_K2.new_id("get_weather", 3) == "functions.get_weather:3"


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
        (QWEN3_CODER, "<function=f>\n<parameter=city>\n", "a\n"),
        (QWEN3_CODER, "<function=f>\n<parameter=x>\n[", "[1], "),
        (GLM45, "", "<tool_call>f\n<arg_key>n</arg_key>1"),
        (KIMI_K2, "<|tool_call_begin|>f<|tool_call_argument_begin|>", '{"a": 1}'),
        (PYTHONIC, "[f(x=[", "'a', "),
        (GEMMA4, "<|tool_call>call:f{x:[", '<|"|>a<|"|>,'),
        (HARMONY, "<|channel|>", "<|mess"),
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


@pytest.mark.parametrize("format", [FUNCTIONGEMMA, GEMMA4], ids=lambda format: format.names[0])
def test_a_long_word_without_quotation_marks_is_read_once(format: ToolFormat) -> None:
    """Patterns do not count in `Counted`. Read once for each character, this word would take hours."""
    word = "a" * 1_000_000
    read = pushed(parser_of(format), [call_text(format, ParsedCall("f", "{}")).replace("{}", f"{{city:{word},x:{{a:1,b : 2}}}}")])
    assert meant(read) == ("", "", [("f", {"city": word, "x": {"a": 1, "b": 2}})])
