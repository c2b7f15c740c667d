"""How models write tool calls: one reader for each format, and grammars that hold an answer to it.

Owns the marks and names of the formats, and which of them a model has: by flag, or by what its chat template writes. What does
not read as a call is content, as it stands: no text is lost. Arguments are passed on as they were written, also when they are no
JSON: clients expect text. Does not know requests.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other (Hermes 2, Qwen 2.5 and 3); some models
              write several objects into one <tool_call>
              https://github.com/NousResearch/Hermes-Function-Calling
    llama3    {"name": …, "parameters": {…}} at the beginning of a line or behind <|python_tag|>, several joined by ; or in an
              array
              https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …], the object alone, or [TOOL_CALLS]name[ARGS]{…}, one after the other
              https://github.com/mistralai/mistral-common

Grammars are structural tags (https://xgrammar.mlc.ai/docs/tutorials/structural_tag), built as plain data: the instances' xgrammar
reads them. What a grammar lets through, the reader of the same format reads as calls.
"""

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, assert_never

import msgspec

from common.config import ReasoningParserName, ToolParserName
from common.errors import BadRequest
from common.sampling_params import Grammar
from engine.grammar.grammars import check_text
from router.api.fields import Function, ToolUse
from router.api.parsing.parser import THINK, THINK_END, GrowingText, Marks, PartSink, Reading, ToolReader, read_until

ARGUMENT_KEYS = ("arguments", "parameters")
_VALUE_BEGINS = frozenset('"{[-0123456789tfn')


def read_call(source: GrowingText, sink: PartSink, *, needs_arguments: bool = False, end_mark: str = "") -> Reading[bool]:
    """Read a call, whose `{` is next. Returns whether it is one; if not, the sink got nothing. Other keys than name and arguments
    are left out of it, such as id, type and description. needs_arguments: an object with a name alone is none. end_mark: what
    ends the call even where its JSON is broken off, outside of strings.

    Reading stops where the object ends, or where it is no object any more.
    """
    name: str | None = None
    early: list[str] = []  # arguments that came before the name
    called = False
    if not (yield from source.next_is("{")):
        return False
    while True:
        yield from source.skip_space()
        key = yield from _read_string(source)
        if key is None:
            return called
        yield from source.skip_space()
        if not (yield from source.next_is(":")):
            return called
        yield from source.skip_space()
        if key == "name" and name is None:
            name = yield from _read_string(source)
            if not name:
                return False
            if early:
                sink.call(name, "".join(early))
                called = True
        elif key in ARGUMENT_KEYS and not called and not early:
            if name is not None:
                sink.call(name)
                called = True
            yield from read_value(source, sink.arguments if called else early.append, end_mark, forgets=called)
        else:
            if not (yield from source.more()) or source.text[source.at] not in _VALUE_BEGINS:
                return called
            yield from read_value(source, list[str]().append, end_mark)
        yield from source.skip_space()
        if (yield from source.next_is(",")):
            continue
        if (yield from source.next_is("}")) and name is not None and not called and not needs_arguments:
            sink.call(name, "{}")
            called = True
        return called


def read_value(source: GrowingText, tell: Callable[[str], object], end_mark: str = "", *, forgets: bool = False) -> Reading[None]:
    """Read one JSON value. tell: gets its text, as it comes. end_mark: ends it outside of strings too, and stays unread. forgets:
    what was read is forgotten."""
    value = _Value()
    while not value.ended and (yield from source.more()):
        begin = source.at
        maybe_mark = False
        while source.at < len(source.text) and not maybe_mark and value.takes(source.text[source.at]):
            maybe_mark = not value.quoted and source.text[source.at] == end_mark[:1]
            source.at += not maybe_mark
        tell(source.text[begin : source.at])
        if maybe_mark:
            if (yield from source.next_is(end_mark)):
                source.at -= len(end_mark)
                return
            tell(source.text[source.at])
            source.at += 1
        if forgets:
            source.forget()


class _Value:
    """How far one JSON value has come. ended: nothing belongs to it any more."""

    def __init__(self) -> None:
        self.ended = False
        self.quoted = False
        self._escaped = False
        self._depth = 0
        self._begun = False

    def takes(self, char: str) -> bool:
        """Take the next character, if it belongs to the value. A number or a word ends before what follows it."""
        if self.ended:
            return False
        outside = self._depth == 0 and not self.quoted
        if outside and (char in ",}]" or (self._begun and char.isspace())):
            self.ended = True
            return False
        self._begun = True
        if self._escaped:
            self._escaped = False
        elif self.quoted:
            self._escaped, self.quoted = char == "\\", char != '"'
        else:
            self.quoted = char == '"'
            self._depth += (char in "{[") - (char in "}]")
        self.ended = self._depth == 0 and not self.quoted and char in '"}]'
        return True


def _read_string(source: GrowingText) -> Reading[str | None]:
    """Read a JSON string. Returns None when there is none."""
    written: list[str] = []
    if not (yield from source.more()) or source.text[source.at] != '"':
        return None
    yield from read_value(source, written.append)
    try:
        return msgspec.json.decode("".join(written), type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None


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
    yield from read_value(source, sink.arguments, TOOL_CALLS, forgets=True)
    sink.mark()
    source.forget()
    return True


THINK_MARKS = (THINK, THINK_END)
_SHORT_ID = string.ascii_letters + string.digits
_SHORT_ID_CHARS = 9
"""Mistral's templates refuse longer ids of calls."""
Format: TypeAlias = Mapping[str, Any]
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes calls, and how they are read."""

    name: ToolParserName
    read: ToolReader
    marks: tuple[str, ...]
    """What stands around calls. Where these are special tokens, the detokenizer must show them."""
    trigger: str
    """The mark that free text cannot hold without a call behind it."""
    before_name: str
    after_name: str
    """What stands between the name and the arguments."""
    end: str
    separator: str = ""
    """What stands between calls."""
    frame: tuple[str, str] = ("", "")
    """What stands around all calls."""
    starts_bare: bool = False
    """Whether an answer of nothing but calls begins without the trigger, which other text needs; a new line serves there too."""
    has_short_ids: bool = False
    """Whether its calls need ids of nine letters and digits."""

    def new_id(self) -> str:
        if self.has_short_ids:
            return "".join(secrets.choice(_SHORT_ID) for _ in range(_SHORT_ID_CHARS))
        return "call_" + secrets.token_hex(12)

    def calls(self, functions: Sequence[tuple[str, Format]], *, parallel: bool) -> dict[str, Any]:
        """One call of these functions or more, and nothing else. functions: names, and schemas of arguments."""
        many = {
            "type": "tags_with_separator",
            "tags": self._tags(functions),
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        return _tag(self.frame[0], many, self.frame[1]) if any(self.frame) else many

    def text_and_calls(self, functions: Sequence[tuple[str, Format]], *, parallel: bool) -> dict[str, Any]:
        """Any text, in which what begins as a call is one call of these functions or more."""
        calls = self.calls(functions, parallel=parallel)
        tags = [calls] if any(self.frame) else self._tags(functions)
        text = {"type": "triggered_tags", "triggers": [self.trigger], "tags": tags, "stop_after_first": not parallel}
        if not self.starts_bare:
            return text
        starts, bare = (self.trigger, "\n"), self.before_name.removesuffix(': "')
        text["triggers"] = [self.trigger, "\n" + bare]
        text["tags"] = [tag | {"begin": start + tag["begin"]} for tag in tags for start in starts]
        text["excludes"] = [between + bare for between in ("; ", ", ", "[")]  # what the reader would read as calls too
        first = {"type": "regex", "pattern": r"[^{<\[\s]"}
        return _either(calls, _one_after_other(first, text), text | {"at_least_one": True})

    def _tags(self, functions: Sequence[tuple[str, Format]]) -> list[dict[str, Any]]:
        return [
            _tag(f"{self.before_name}{name}{self.after_name}", {"type": "json_schema", "json_schema": schema}, self.end)
            for name, schema in functions
        ]


HERMES = ToolFormat(
    name="hermes",
    read=read_hermes,
    marks=(CALL, CALL_END),
    trigger=CALL,
    before_name=CALL + '\n{"name": "',
    after_name='", "arguments": ',
    end="}\n" + CALL_END,
    separator="\n",
)
LLAMA3 = ToolFormat(
    name="llama3",
    read=read_llama3,
    marks=(PYTHON_TAG,),
    trigger=PYTHON_TAG,
    before_name='{"name": "',
    after_name='", "parameters": ',
    end="}",
    separator="; ",
    starts_bare=True,
)
MISTRAL = ToolFormat(
    name="mistral",
    read=read_mistral,
    marks=(TOOL_CALLS, CALL_ID, ARGS),
    trigger=TOOL_CALLS,
    before_name='{"name": "',
    after_name='", "arguments": ',
    end="}",
    separator=", ",
    frame=(TOOL_CALLS + "[", "]"),
    has_short_ids=True,
)
MISTRAL_ARGS = replace(MISTRAL, before_name=TOOL_CALLS, after_name=ARGS, end="", separator="", frame=("", ""))
"""The format of newer models, whose templates write [ARGS]."""
TOOL_FORMATS = {format.name: format for format in (HERMES, LLAMA3, MISTRAL)}
_OTHER_FORMATS = ("<function=", "<arg_key>")
"""What models write in <tool_call> that is not Hermes' JSON: Qwen 3 Coder's and GLM's formats."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """tools: None when the model's calls cannot be read. thinks: its answers may begin with thoughts."""

    tools: ToolFormat | None
    thinks: bool


def answer_format(chat_template: str, tool_parser: ToolParserName, reasoning_parser: ReasoningParserName) -> AnswerFormat:
    """chat_template: its source."""
    tools = _format_in(chat_template) if tool_parser == "auto" else TOOL_FORMATS.get(tool_parser)
    if tools is MISTRAL and ARGS in chat_template:
        tools = MISTRAL_ARGS
    has_thoughts = any(mark in chat_template for mark in THINK_MARKS)
    return AnswerFormat(tools, has_thoughts if reasoning_parser == "auto" else reasoning_parser == "think")


def _format_in(chat_template: str) -> ToolFormat | None:
    if TOOL_CALLS in chat_template:
        return MISTRAL
    if CALL in chat_template and not any(mark in chat_template for mark in _OTHER_FORMATS):
        return HERMES
    if PYTHON_TAG in chat_template or ("<|start_header_id|>" in chat_template and '"parameters": ' in chat_template):
        return LLAMA3
    return None


def answer_grammar(
    use: ToolUse, format: ToolFormat | None, response: Grammar | None, *, thinks: bool, opened: bool
) -> Grammar | None:
    """What the answer must match; None: anything. format: None when it may hold no calls. response: what its content must match;
    where calls are required there is none. thinks: thoughts may come first; opened: they will. Raises BadRequest when `response`
    cannot be joined with the rest, or for a schema that no answer can be held to."""
    answer: Format | None = None if format is None else _calls(use, format, response)
    if answer is None:
        if response is None or not thinks:
            return response
        answer = _format_of(response)
    if thinks:
        thoughts = _tag("" if opened else THINK, {"type": "any_text", "excludes": [THINK, THINK_END]}, THINK_END)
        blank = {"type": "regex", "pattern": r"\n{0,2}"}
        before = _one_after_other(thoughts, blank)
        answer = _one_after_other(before if opened else {"type": "optional", "content": before}, answer)
    grammar = Grammar("structural_tag", msgspec.json.encode({"type": "structural_tag", "format": answer}).decode())
    check_text(grammar, "response_format" if format is None else "tools")
    return grammar


def _calls(use: ToolUse, format: ToolFormat, response: Grammar | None) -> dict[str, Any] | None:
    """The content with its calls; None when both may be anything."""
    if use.required or response is not None:
        calls = format.calls([(one.name, _schema(one, one.strict is not False)) for one in use.callable], parallel=use.parallel)
        return calls if use.required or response is None else _either(calls, _format_of(response))
    if use.parallel and not any(one.strict for one in use.callable):
        return None
    functions = [(one.name, _schema(one, one.strict is True)) for one in use.callable]
    return format.text_and_calls(functions, parallel=use.parallel)


def _schema(function: Function, is_strict: bool) -> Format:
    return function.parameters if is_strict and function.parameters is not None else _ANY_OBJECT


def _format_of(grammar: Grammar) -> Format:
    match grammar.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": msgspec.json.decode(grammar.text)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            tag = msgspec.json.decode(grammar.text)
            if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
                fix = 'send {"type": "structural_tag", "format": …}'
                raise BadRequest(f"with tools or thoughts, a structural tag must have a format: {fix}", field="response_format")
            return dict(tag["format"])
        case _:
            assert_never(grammar.kind)


def _tag(begin: str, content: Format, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _either(*options: Format) -> dict[str, Any]:
    return {"type": "or", "elements": options}


def _one_after_other(*parts: Format) -> dict[str, Any]:
    return {"type": "sequence", "elements": parts}
