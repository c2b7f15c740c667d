"""Answers as models write them, and a plain reading of a whole answer to compare parsers with."""

import json
import re
from typing import Any

from hypothesis import strategies as st

from router.api.parsing.formats import HERMES, LLAMA3, MISTRAL, ToolFormat
from router.api.parsing.parser import AnswerParser, ParsedAnswer, ParsedCall, parsed_answer

NAMES = st.sampled_from(["f", "get_weather", "a.b-c"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.sampled_from(["", "x y", 'q"\\', "</tool_call>", "{[", "é🙂", "a, b]"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b c"]), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "n", "x"]), VALUES, max_size=3).flatmap(
    lambda value: st.sampled_from([json.dumps(value), json.dumps(value, indent=1), json.dumps(value, separators=(",", ":"))])
)
CALLS = st.lists(st.builds(ParsedCall, NAMES, ARGUMENTS), max_size=3)
TEXTS = st.sampled_from(["", "Let me see.", "a < b, [1]: {x}", "two\n\nlines", "<tool", "<|python", "[TOOL", "<thi"])


def written(format: ToolFormat, content: str, calls: list[ParsedCall], style: int) -> str:
    """The answer as a model would write it. style: which of the ways that the format has."""
    space = "\n" if style % 2 else ""
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
    if style >= 6:
        return content + "".join(f'[TOOL_CALLS]{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in calls)
    if style >= 4:
        return content + "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}" for call in calls)
    objects = [f'{{"name": "{call.name}", "arguments": {call.arguments}, "id": "abcdefghi"}}' for call in calls]
    return f"{content}[TOOL_CALLS] [{space}{', '.join(objects)}{space}]"


def parser_of(format: ToolFormat | None, *, thinks: bool = False, opened: bool = False) -> AnswerParser:
    return AnswerParser(thinks=thinks, opened=opened, read_tools=None if format is None else format.read)


def pushed(parser: AnswerParser, pieces: list[str]) -> ParsedAnswer:
    """What the parts of these pieces are together."""
    return parsed_answer([*(part for piece in pieces for part in parser.push(piece)), *parser.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


FORMATS = (HERMES, LLAMA3, MISTRAL)


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
