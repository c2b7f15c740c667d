"""How models write tool calls: one reader for each format.

Owns the formats' marks. What does not read as a call is content, as it stands: no text is lost.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other (Hermes 2, Qwen 2.5 and 3); some models
              write several objects into one <tool_call>
              https://github.com/NousResearch/Hermes-Function-Calling
    llama3    {"name": …, "parameters": {…}} at the beginning of a line or behind <|python_tag|>, several joined by ; or in an
              array
              https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …], the object alone, or [TOOL_CALLS]name[ARGS]{…}, one after the other
              https://github.com/mistralai/mistral-common
"""

import re

from router.api.output.json_call import read_call, read_value
from router.api.output.parts import PartSink
from router.api.output.source import GrowingText, Marks, Reading, read_until

CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
NEW_LINE = "\n"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_OPEN, _OPEN_OR_CLOSED = Marks(CALL), Marks(CALL, CALL_END)
_PYTHON_TAG_OR_LINE, _TOOL_CALLS = Marks(PYTHON_TAG, NEW_LINE), Marks(TOOL_CALLS)
_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")


def read_hermes(source: GrowingText, sink: PartSink) -> Reading[None]:
    marks = _OPEN  # with the end mark, while a call misses it
    while mark := (yield from read_until(source, sink.content, marks)):
        if mark == CALL_END:
            sink.mark()
            marks = _OPEN
            continue
        called = yield from _read_calls(source, sink, end_mark=CALL_END)
        marks = _OPEN_OR_CLOSED if called else _OPEN
        sink.content(source.read() if called else mark + source.read())


def read_llama3(source: GrowingText, sink: PartSink) -> Reading[None]:
    mark: str | None = ""
    while mark is not None:
        source.forget()
        yield from source.skip_space()
        if mark != PYTHON_TAG:
            sink.content(mark + source.read())
            source.forget()
            mark = ""
        called = yield from _read_calls(source, sink, end_mark=PYTHON_TAG, needs_arguments=True)
        sink.content(source.read() if called else mark + source.read())
        mark = yield from read_until(source, sink.content, _PYTHON_TAG_OR_LINE)


def read_mistral(source: GrowingText, sink: PartSink) -> Reading[None]:
    while mark := (yield from read_until(source, sink.content, _TOOL_CALLS)):
        yield from source.skip_space()
        is_json = (yield from source.more()) and source.text[source.at] in "[{"
        called = yield from _read_calls(source, sink, end_mark=TOOL_CALLS) if is_json else _read_named(source, sink)
        sink.content(source.read() if called else mark + source.read())


def _read_calls(source: GrowingText, sink: PartSink, *, end_mark: str, needs_arguments: bool = False) -> Reading[bool]:
    """Read calls in JSON, one behind the other or in an array. Returns whether there was one. What was read and is no call is not
    forgotten: the caller tells it as content."""
    called = False
    yield from source.skip_space()
    is_array = yield from source.next_is("[")
    while True:
        yield from source.skip_space()
        if not (yield from read_call(source, sink, needs_arguments=needs_arguments, end_mark=end_mark)):
            return called
        called = True
        sink.mark()
        source.forget()
        yield from source.skip_space()
        if is_array and (yield from source.next_is("]")):
            source.forget()
            return True
        yield from source.next_is(",", ";")


def _read_named(source: GrowingText, sink: PartSink) -> Reading[bool]:
    """Read name, perhaps a call's id, and arguments. Returns whether it was a call."""
    name = yield from source.take(_NAME)
    if (yield from source.next_is(CALL_ID)):
        yield from source.take(_NAME)
    yield from source.next_is(ARGS)
    yield from source.skip_space()
    if not name or not (yield from source.more()) or source.text[source.at] != "{":
        return False
    sink.call(name)
    yield from read_value(source, sink, [], TOOL_CALLS)
    sink.mark()
    source.forget()
    return True
