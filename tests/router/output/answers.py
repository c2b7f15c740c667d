"""Answers as models write them, and a plain reading of a whole answer to compare parsers with.

`call_text` writes a call as the chat template of the format's model does, without a look at the tables of the product.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from router.api.parsing.formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTIONGEMMA,
    GEMMA4,
    GLM45,
    HARMONY,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    PYTHONIC,
    QWEN3_CODER,
    THINK,
    AnswerFormat,
)
from router.api.parsing.parser import AnswerParser, ParsedAnswer, ParsedCall, parsed_answer
from router.api.parsing.readers import ToolFormat
from router.api.tools import Function

NAMES = st.sampled_from(["f", "get_weather", "a.b-c"])
WORDS = ["", "x y", 'q"\\', "</tool_call>", "{[", "é🙂", "a, b]", "it's", "\n two\nlines\n", "5", "null", "<tool_call>", "\\d"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b_c"]), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "n", "x"]), VALUES, max_size=3).flatmap(
    lambda value: st.sampled_from([json.dumps(value), json.dumps(value, indent=1), json.dumps(value, separators=(",", ":"))])
)
CALLS = st.lists(st.builds(ParsedCall, NAMES, ARGUMENTS), max_size=3)
TEXTS = st.sampled_from(
    ["", "Let me see.", "a < b, [1]: {x}", "two\n\nlines", "<tool", "<|python", "[TOOL", "<thi", "[f", "<｜tool"]
)
TYPED: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "flag": {"type": "boolean"},
        "x": {"anyOf": [{"$ref": "#/$defs/List"}, {"type": ["object", "null"]}]},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"List": {"type": "array"}},
}
"""What the arguments of every function are in formats whose values have no type of their own."""
TYPED_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": st.sampled_from(WORDS),
        "n": st.integers(-9, 10**20),
        "flag": st.booleans(),
        "x": VALUES.filter(lambda value: value is None or isinstance(value, list | dict)),
        "either": st.sampled_from([None, "", "nul", "5", "{}"]),
    },
)
TYPED_CALLS = st.lists(st.builds(ParsedCall, NAMES, TYPED_ARGUMENTS.map(json.dumps)), max_size=3)
FUNCTIONS = tuple(Function(name, parameters=dict(TYPED)) for name in ("f", "get_weather", "a.b-c"))


def written(format: ToolFormat, content: str, calls: list[ParsedCall], style: int) -> str:
    """The answer as a model would write it. style: which of the ways that the format has."""
    space = "\n" if style % 2 else ""
    if format is HARMONY:
        end = "<|end|>" if calls else "<|return|>" if style % 2 else ""
        messages = [f"<|channel|>{'commentary' if calls else 'final'}<|message|>{content}{end}"] if content else []
        return "<|start|>assistant".join([*messages, *(call_text(format, call, style) for call in calls)])
    if not calls:
        return content
    if format is HERMES:
        objects = [f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in calls]
        if style >= 2:
            objects = [f'{{ "arguments":{call.arguments} ,"name" : "{call.name}" }}' for call in calls]
        if style >= 4:
            objects = [f'{{"id": 1, "description": [{{}}, "}}"], {one[1:-1]}, "more": null}}' for one in objects]
        if style >= 6:
            objects = [(f",{space}" if style == 6 else "\n").join(objects)]
        return content + space.join(f"<tool_call>{space}{one}{space}</tool_call>" for one in objects)
    if format is LLAMA3:
        objects = [f'{{"name": "{call.name}", "parameters": {call.arguments}}}' for call in calls]
        if style >= 6:
            objects = [f"[{', '.join(objects)}]"]
        begin = f"{content}\n{space}" if style >= 4 else f"{content}<|python_tag|>" if content or style >= 2 else space
        return begin + (",;"[style < 4] + space).join(objects)
    if format is MISTRAL:
        if style >= 6:
            return content + "".join(f'[TOOL_CALLS]{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in calls)
        if style >= 4:
            return content + "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}" for call in calls)
        objects = [f'{{"name": "{call.name}", "arguments": {call.arguments}, "id": "abcdefghi"}}' for call in calls]
        return f"{content}[TOOL_CALLS] [{space}{', '.join(objects)}{space}]"
    texts = [call_text(format, call, style, number) for number, call in enumerate(calls)]
    if format is PYTHONIC:
        begin = content + ("\n" if style % 2 else "<|python_start|>") if content or style >= 4 else ""
        return f"{begin}[{', '.join(texts)}]" + ("<|python_end|>" if begin.endswith(">") else "")
    begin, end = {
        KIMI_K2.names: ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        DEEPSEEK_V3.names: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        DEEPSEEK_V31.names: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    }.get(format.names, ("", ""))
    if style >= 6 and format is not GLM45:  # the marks around all are left out
        begin = end = ""
    return content + begin + (space or "\n" * (format is DEEPSEEK_V3)).join(texts) + end


def call_text(format: ToolFormat, call: ParsedCall, style: int = 0, number: int = 0) -> str:
    """A call, without what stands around all of an answer's."""
    name, arguments = call.name, call.arguments
    values: dict[str, Any] = json.loads(arguments)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    if format is HARMONY:
        if style >= 4:
            return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    if format is KIMI_K2:
        return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    if format is DEEPSEEK_V3:
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    if format is DEEPSEEK_V31:
        return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
    if format is QWEN3_CODER:
        if style % 2:  # the template writes what is no list or object as Python does
            texts = {key: json.dumps(value) if isinstance(value, list | dict) else str(value) for key, value in values.items()}
        inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        begin = "" if style >= 6 else "<tool_call>\n"
        return f"{begin}<function={name}>\n{inner}</function>\n</tool_call>"
    if format is GLM45:
        space = "" if style >= 4 else "\n"  # GLM 4.7 writes none
        inner = "".join(f"<arg_key>{key}</arg_key>{space}<arg_value>{text}</arg_value>{space}" for key, text in texts.items())
        return f"<tool_call>{name}{space}{inner}</tool_call>"
    if format is PYTHONIC:
        write = repr if style % 2 else lambda value: json.dumps(value) if isinstance(value, str | list) else repr(value)
        return f"{name}({', '.join(f'{key}={write(value)}' for key, value in values.items())})"
    quote = "<escape>" if format is FUNCTIONGEMMA else '<|"|>'
    inner = ",".join(f"{key}:{gemma(value, quote)}" for key, value in values.items())
    if format is FUNCTIONGEMMA:
        return f"<start_function_call>call:{name}{{{inner}}}<end_function_call>"
    assert format is GEMMA4, "each format is written here"
    return f"<|tool_call>call:{name}{{{inner}}}<tool_call|>"


def gemma(value: Any, quote: str) -> str:
    """A value as Gemma's templates write it."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(each, quote)}" for key, each in value.items()) + "}"
    return "[" + ",".join(gemma(each, quote) for each in value) + "]" if isinstance(value, list) else json.dumps(value)


def parser_of(
    format: ToolFormat | None, *, thinks: bool = False, opened: bool = False, functions: tuple[Function, ...] = FUNCTIONS
) -> AnswerParser:
    answer = AnswerFormat(format, THINK if thinks else None)
    new_parser = answer.new_parser(functions, separates=True, opened=opened)
    return AnswerParser(thoughts=None, opened=False, read_tools=None) if new_parser is None else new_parser()


def pushed(parser: AnswerParser, pieces: list[str]) -> ParsedAnswer:
    """What the parts of these pieces are together."""
    return parsed_answer([*(part for piece in pieces for part in parser.push(piece)), *parser.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def meant(answer: ParsedAnswer) -> tuple[str, str, list[tuple[str, Any]]]:
    """An answer's parts, with the arguments as values."""
    return answer.content, answer.reasoning, [(call.name, json.loads(call.arguments)) for call in answer.calls]


FORMATS = (HERMES, LLAMA3, MISTRAL)
TYPED_FORMATS = (*(QWEN3_CODER, GLM45, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, HARMONY, PYTHONIC, FUNCTIONGEMMA, GEMMA4),)


def reference_hermes(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content without white space, and calls, of a text in which each object is whole: by json's own decoder."""
    content, calls, at = "", [], 0
    for mark in re.finditer(r"<tool_call>\s*", text):
        if mark.start() < at:
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(text, mark.end())
            name = value["name"]
        except (ValueError, KeyError, TypeError):
            continue
        content += text[at : mark.start()]
        calls.append((name, value.get("arguments", {})))
        while following := re.compile(r"\s*[,;]?\s*(?={)").match(text, end):
            value, behind = json.JSONDecoder().raw_decode(text, following.end())
            if "name" not in value:
                break
            calls.append((value["name"], value.get("arguments", {})))
            end = behind
        closing = text.find("</tool_call>", end)
        opening = text.find("<tool_call>", end)
        at = end
        if closing >= 0 and (opening < 0 or closing < opening):
            content += text[end:closing]
            at = closing + len("</tool_call>")
    return "".join((content + text[at:]).split()), calls
