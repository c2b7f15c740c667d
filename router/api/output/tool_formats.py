"""How models write tool calls: one reader for each format.

Owns the formats' marks. What does not read as a call is content, as it stands: no text is lost.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other (Hermes 2, Qwen 2.5 and 3)
              https://github.com/NousResearch/Hermes-Function-Calling
    llama3    {"name": …, "parameters": {…}} at the beginning or behind <|python_tag|>, several joined by ;
              https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…}, one after the other
              https://github.com/mistralai/mistral-common
"""

import re

from router.api.output.json_call import read_call, read_value
from router.api.output.parts import PartSink
from router.api.output.source import GrowingText, Marks, Reading, read_until

CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_OPEN, _OPEN_OR_CLOSED = Marks(CALL), Marks(CALL, CALL_END)
_PYTHON_TAG, _TOOL_CALLS = Marks(PYTHON_TAG), Marks(TOOL_CALLS)
_NAME = re.compile(r"[A-Za-z0-9_.:/-]")


def read_hermes(source: GrowingText, sink: PartSink) -> Reading[None]:
    marks = _OPEN  # with the end mark, while a call misses it
    while mark := (yield from read_until(source, sink.content, marks)):
        marks = _OPEN
        if mark == CALL_END:
            sink.mark()
            continue
        yield from source.skip_space()
        if (yield from read_call(source, sink, end_mark=CALL_END)):
            sink.mark()
            marks = _OPEN_OR_CLOSED
        else:
            sink.content(mark + source.text[: source.at])


def read_llama3(source: GrowingText, sink: PartSink) -> Reading[None]:
    mark: str | None = ""
    called = False
    while mark is not None:
        source.forget()
        yield from source.skip_space()
        if called and (yield from source.next_is(";")):
            yield from source.skip_space()
        called = yield from read_call(source, sink, needs_arguments=True)
        if called:
            sink.mark()
            mark = ""
        else:
            sink.content(mark + source.text[: source.at])
            mark = yield from read_until(source, sink.content, _PYTHON_TAG)


def read_mistral(source: GrowingText, sink: PartSink) -> Reading[None]:
    while mark := (yield from read_until(source, sink.content, _TOOL_CALLS)):
        yield from source.skip_space()
        is_array = yield from source.next_is("[")
        called = yield from _read_array(source, sink) if is_array else _read_named(source, sink)
        if not called:
            sink.content(mark + source.text[: source.at])


def _read_array(source: GrowingText, sink: PartSink) -> Reading[bool]:
    """Read calls behind `[`, and `]`. Returns whether there was a call; what stands behind the last one is content."""
    called = False
    while True:
        yield from source.skip_space()
        if not (yield from read_call(source, sink, end_mark=TOOL_CALLS)):
            if called:
                sink.content(source.text[: source.at])
            return called
        called = True
        sink.mark()
        yield from source.skip_space()
        source.forget()
        if not (yield from source.next_is(",")):
            yield from source.next_is("]")
            return True


def _read_named(source: GrowingText, sink: PartSink) -> Reading[bool]:
    """Read name, perhaps a call's id, and arguments. Returns whether it was a call."""
    begin = source.at
    yield from _skip(source, _NAME)
    name = source.text[begin : source.at]
    if (yield from source.next_is(CALL_ID)):
        yield from _skip(source, _NAME)
    yield from source.next_is(ARGS)
    yield from source.skip_space()
    if not name or not (yield from source.more()) or source.text[source.at] != "{":
        return False
    sink.call(name)
    yield from read_value(source, sink, [], TOOL_CALLS)
    sink.mark()
    return True


def _skip(source: GrowingText, chars: re.Pattern[str]) -> Reading[None]:
    while (yield from source.more()) and chars.match(source.text, source.at):
        source.at += 1
