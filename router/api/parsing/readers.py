"""Readers of tool calls: one for calls that are JSON objects, one for calls that marks and parameters make, one for channels.

Owns what a format is to a reader, and how arguments that are not JSON become JSON. What does not read as a call is content, as
it stands: no text is lost. Arguments in JSON are passed on as they were written, also when they are broken: clients expect text.
Does not know the formats themselves, nor requests.

A value that is not JSON has the type that its schema says. Where it is none of that type, it is a text.
"""

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from common.config import ToolParserName
from engine.grammar.json_schemas import as_object, kinds_of, types_of
from router.api.parsing.parser import AnswerSink, GrowingText, Marks, Reading, read_until

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by the names of the functions."""
NEW_LINE = "\n"
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
_SHORT_ID = string.ascii_letters + string.digits
_SHORT_ID_CHARS = 9
"""Mistral's templates refuse longer ids of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes calls. The forms are what it is held to; in what is read, white space in them is optional."""

    names: tuple[ToolParserName, ...]
    """What flags call it."""
    found_by: str
    """A regular expression that is found in the chat templates of models that write so."""
    read: "CallReader | None" = None
    """Reads calls, behind one of the marks that open them; None: `read_named`."""
    call: str
    """A call, with {name} and {arguments}, and with {number} where its number in the conversation is part of its id."""
    all: str = "{calls}"
    """All calls of an answer."""
    separator: str | None = ""
    """What stands between calls; None: an answer has one call at most."""
    argument: str = ""
    """An argument, with {key} and {value}; empty: the arguments are a JSON object. Without brackets a value stands there as it
    is."""
    brackets: str = ""
    """Those around the arguments, with a comma between two. Their values are literals."""
    comma: str = ""
    """What stands between two arguments."""
    quote: str = ""
    """What stands around texts in literals; empty: Python's quotation marks."""
    bare: tuple[str, str] = ("", "")
    """What may stand around all calls, which also begin without it at the beginning of an answer or of a line."""
    stands_alone: bool = False
    """Whether an answer that is held to a grammar is either calls or text."""
    has_short_ids: bool = False
    """Whether its calls need ids of nine letters and digits."""

    @property
    def opens(self) -> tuple[str, ...]:
        """The marks that open calls; free text cannot hold the first without a call behind it."""
        return (self.bare[0], NEW_LINE) if self.bare[0] else tuple(_MARK.findall(around(self.all)[0] + around(self.call)[0]))

    @property
    def closes(self) -> tuple[str, ...]:
        """The marks that close them, the last one last."""
        return tuple(_MARK.findall(around(self.call)[-1] + around(self.all)[-1] + self.bare[1]))

    @property
    def argument_begins(self) -> tuple[str, ...]:
        """What stands next where arguments begin, or where there are none."""
        if not self.argument:
            return ("{",)
        return (self.brackets[0],) if self.brackets else (around(self.argument)[0], *self.closes)

    @property
    def texts(self) -> tuple[str, ...]:
        """All that stands around calls. Where special tokens are in it, the detokenizer must show them."""
        return (*self.bare, self.all, self.call, self.argument, self.quote, CALL_ID, ARGS)

    def new_id(self, name: str, number: int) -> str:
        """number: how many calls came before, in the whole conversation."""
        if "{number}" in self.call:
            return f"functions.{name}:{number}"
        if self.has_short_ids:
            return "".join(secrets.choice(_SHORT_ID) for _ in range(_SHORT_ID_CHARS))
        return "call_" + secrets.token_hex(12)


def around(form: str) -> list[str]:
    """What stands around the parts of a form."""
    return _HOLE.split(form)


CallReader: TypeAlias = Callable[[GrowingText, AnswerSink, ToolFormat, Schemas], Reading[bool]]
"""Returns whether there was a call. What was read and is no call is not forgotten: the caller tells it as content."""


def read_tools(format: ToolFormat, schemas: Schemas, source: GrowingText, sink: AnswerSink) -> Reading[None]:
    """Read content and calls, to the end of the answer."""
    opening, either = _marks(*format.opens), _marks(*format.opens, *format.closes)
    mark = "" if format.bare[0] else (yield from read_until(source, sink.content, opening))
    while mark is not None:
        if mark in format.closes:
            sink.mark()
            marks = opening if mark == format.closes[-1] else either
        else:
            if mark in ("", NEW_LINE):
                source.forget()
                yield from source.skip_space()
                sink.content(mark + source.read())
                source.forget()
                mark = ""
            called = yield from (format.read or read_named)(source, sink, format, schemas)
            marks = either if called else opening
            sink.content(source.read() if called else mark + source.read())
        mark = yield from read_until(source, sink.content, marks)


_marks = lru_cache(maxsize=64)(Marks)
_MAX_REFERENCES, _MOST_SCHEMAS = 8, 64
"""So many references after each other, and schemas of one value, are looked at."""
_TYPES = {"string", "integer", "number", "boolean", "null", "array", "object"}


def read_objects(source: GrowingText, sink: AnswerSink, format: ToolFormat, _: Schemas) -> Reading[bool]:
    """Read calls in JSON, one behind the other or in an array."""
    called = False
    yield from source.skip_space()
    is_array = yield from source.next_is("[")
    while True:
        yield from source.skip_space()
        end_mark = (format.closes or format.opens)[0]
        if not (yield from read_call(source, sink, needs_arguments=bool(format.bare[0]), end_mark=end_mark)):
            return called
        called = True
        sink.mark()
        source.forget()
        yield from source.skip_space()
        if is_array and (yield from source.next_is("]")):
            source.forget()
            return True
        yield from source.next_is(",", ";")


def read_named(source: GrowingText, sink: AnswerSink, format: ToolFormat, schemas: Schemas) -> Reading[bool]:
    """Read a call whose name stands between marks, or several in brackets: name, perhaps a call's id, and arguments."""
    (before_all, after_all), (before_name, *_, after_name, end) = around(format.all), around(format.call)
    is_bare, separator, called = bool(format.bare[0]), (format.separator or "").strip(), False
    yield from source.skip_space()
    if is_bare and not (yield from source.next_is(before_all)):
        return False
    while True:
        if not is_bare:
            yield from _skip(source, before_all + before_name)
            yield from source.skip_space()
        name = yield from source.take(_NAME)
        if not is_bare:
            name = _NUMBER.sub("", name) if "{number}" in format.call else name
            if (yield from source.next_is(CALL_ID)):
                yield from source.take(_NAME)
            yield from _skip(source, ARGS + " " + after_name)
            yield from source.skip_space()
        if not name or (is_bare and name not in schemas) or not (yield from source.sees(*format.argument_begins)):
            return called
        sink.call(name)
        source.forget()
        if format.argument:
            yield from _read_arguments(source, sink, format, schemas.get(name, {}))
        else:
            yield from read_value(source, sink.arguments, (format.closes or format.opens)[0], forgets=True)
        yield from _skip(source, end, *format.closes)
        sink.mark()
        source.forget()
        called = True
        yield from source.skip_space()
        if not separator or not (yield from source.next_is(separator)):
            break
        yield from source.skip_space()
    if is_bare and (yield from source.next_is(after_all)):
        source.forget()
    return True


def read_either(source: GrowingText, sink: AnswerSink, format: ToolFormat, schemas: Schemas) -> Reading[bool]:
    """Read calls in JSON, or one whose name stands between marks."""
    yield from source.skip_space()
    read = read_objects if (yield from source.sees("[", "{")) else read_named
    return (yield from read(source, sink, format, schemas))


ARGUMENT_KEYS = ("arguments", "parameters")
_VALUE_BEGINS = frozenset('"{[-0123456789tfn')


def read_call(source: GrowingText, sink: AnswerSink, *, needs_arguments: bool = False, end_mark: str = "") -> Reading[bool]:
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


def read_value(
    source: GrowingText,
    tell: Callable[[str], object],
    end_mark: str = "",
    *,
    quotes: tuple[str, ...] = ('"',),
    brackets: str = "[]{}",
    stops: str = ", \t\r\n",
    forgets: bool = False,
) -> Reading[None]:
    """Read one value in JSON, or in a notation like it. tell: gets its text, as it comes. end_mark: ends it outside of texts too,
    and stays unread, as does what ends a number or a word (stops, a bracket that closes nothing). forgets: what was read is
    forgotten."""
    within = _marks(*quotes, *brackets, *end_mark[:1])
    outside = _marks(*quotes, *brackets, *stops, *end_mark[:1])
    depth, quote = 0, ""
    while True:
        marks = _marks(quote, *"\\"[: len(quote) == 1]) if quote else within if depth else outside
        mark = yield from read_until(source, tell, marks, forgets=forgets)
        if mark is None:
            return
        if not quote and mark == end_mark[:1]:
            source.at -= 1
            if (yield from source.sees(end_mark)):
                break
            source.at += 1
        if not quote and depth == 0 and mark in (*stops, *brackets[1::2]):
            source.at -= 1
            break
        tell(mark)
        if mark == "\\" and (yield from source.more()):
            tell(source.text[source.at])
            source.at += 1
        elif quote or mark in quotes:
            quote = ("" if mark == quote else quote) if quote else mark
        else:
            depth += (mark in brackets[::2]) - (mark in brackets[1::2])
        if not quote and depth == 0 and mark in (*quotes, *brackets):
            break
    if forgets:
        source.forget()


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


def _skip(source: GrowingText, text: str, *but: str) -> Reading[None]:
    """Read the marks and words of this text that are there, and white space before each. but: those that stay."""
    for piece in _PIECE.findall(text):
        if piece not in but:
            yield from source.skip_space()
            yield from source.next_is(piece)


def _read_arguments(source: GrowingText, sink: AnswerSink, format: ToolFormat, schema: Mapping[str, Any]) -> Reading[None]:
    """Read arguments, and tell them as a JSON object. What is none of them is left unread."""
    before, (before_key, after_key, _) = "{", around(format.argument)
    yield from source.next_is(format.brackets[:1])
    while True:
        yield from source.skip_space()
        source.forget()
        is_key = bool((yield from source.next_is(before_key))) or not before_key
        key = (yield from source.take(_KEY)) if is_key else ""
        for piece in _PIECE.findall(after_key):
            yield from source.skip_space()
            is_key = is_key and bool((yield from source.next_is(piece)))
        if not key or not is_key:
            source.unread()
            break
        sink.arguments(f"{before}{_text(key.strip())}: ")
        of_key = as_object(schema.get("properties")).get(key.strip(), schema.get("additionalProperties"))
        before, kinds = ", ", kinds_in(of_key, schema)
        read = _read_literal(source, sink, format, kinds) if format.brackets else _read_text(source, sink, format, kinds)
        if not (yield from read):
            return
    if (yield from source.more()):
        sink.arguments("}" if before == ", " else "{}")
    yield from source.next_is(format.brackets[1:])


def _read_literal(source: GrowingText, sink: AnswerSink, format: ToolFormat, kinds: frozenset[str]) -> Reading[bool]:
    """Read a literal, and the comma behind it. Returns whether it is whole; otherwise the text ends in it."""
    written, quotes = list[str](), (format.quote,) if format.quote else _QUOTES
    yield from source.skip_space()
    yield from read_value(source, written.append, quotes=quotes, brackets="()[]{}", stops=",", forgets=True)
    literal, is_whole = "".join(written), (yield from source.more())
    sink.arguments(_json_of(_unquoted(literal, format.quote, kinds), kinds) if is_whole else literal)
    yield from source.skip_space()
    yield from source.next_is(",")
    return is_whole


def _read_text(source: GrowingText, sink: AnswerSink, format: ToolFormat, kinds: frozenset[str]) -> Reading[bool]:
    """Read a value that stands there as it is, and what ends it. Returns whether it is whole; otherwise the text ends in it."""
    _, after_key, after_value = around(format.argument)
    ends = _marks(after_value.rstrip(), after_value.strip())
    if after_key.endswith(NEW_LINE):
        yield from source.next_is(NEW_LINE)
    if kinds == {"string"}:
        sink.arguments('"')
        end = yield from read_until(source, lambda text: sink.arguments(_text(text)[1:-1]), ends)
        sink.arguments('"' if end else "")
        return end is not None
    written = list[str]()
    if kinds and "string" not in kinds and (yield from source.sees("[", "{")):  # its texts may hold what ends it
        yield from read_value(source, written.append, quotes=_QUOTES, forgets=True)
    end = yield from read_until(source, written.append, ends)
    sink.arguments(_json_of("".join(written), kinds) if end else "".join(written))
    return end is not None


def followed(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema's reference leads to, or the schema. root: where references lead."""
    for _ in range(_MAX_REFERENCES):
        reference = as_object(schema).get("$ref")
        if not isinstance(reference, str):
            break
        schema = root
        for name in reference.split("/")[1:]:
            schema = as_object(schema).get(name)
    return as_object(schema)


def kinds_in(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types of the values that a schema allows, as far as that is seen; empty: any. root: where references lead."""
    kinds, left = set[str](), [schema]
    for _ in range(_MOST_SCHEMAS):
        if not left:
            return frozenset(kinds)
        schema = followed(left.pop(), root)
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        options = next((schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)), None)
        if options is not None and "type" not in schema:
            left += options
            continue
        found = {kind for each in listed for kind in kinds_of(each)} if isinstance(listed, list) else types_of(schema)
        if not found or not found <= _TYPES:
            break
        kinds |= found
    return frozenset()


def _unquoted(literal: str, quote: str, kinds: frozenset[str]) -> str:
    """The literal as JSON, or the text in it, if that may be another value too."""
    parts = literal.split(quote) if quote else []
    if len(parts) == 3 and not (parts[0] + parts[2]).strip():
        return _text(parts[1]) if kinds == {"string"} else parts[1]
    return "".join(_text(part) if at % 2 else _BARE.sub(_quoted_key, part) for at, part in enumerate(parts)) or literal


def _quoted_key(word: re.Match[str]) -> str:
    return f'"{word[1]}"{word[2]}' if word[2] else word[0]


def _json_of(written: str, kinds: frozenset[str]) -> str:
    """The JSON of a value in JSON or Python that is of these types, or of the text that it is otherwise."""
    literal = written.strip()
    try:
        value = msgspec.json.decode(literal)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        if literal.count(",") > _MOST_COMMAS:
            return _text(written)
        try:
            value = ast.literal_eval(_ESCAPE.sub(_known_escape, literal))
            literal = json.dumps(value, ensure_ascii=False, allow_nan=False)
            value = msgspec.json.decode(literal)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return _text(written)
    return literal if not kinds or kinds & kinds_of(value) or isinstance(value, str) else _text(written)


def _known_escape(escape: re.Match[str]) -> str:
    """Python warns of a backslash that escapes nothing, and keeps it."""
    return escape[0] if escape[1] in _ESCAPED else "\\" + escape[0]


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_NUMBER = re.compile(r":\d+$")
_KEY = re.compile(r"[^<>=:,(){}\[\]\n]*")
_BARE = re.compile(r"([^\s,{}\[\]:]+)(\s*:)?")
"""A word without quotation marks. It is a key with a colon behind it; a pattern that asked for the colon would read a long word
once for each of its characters."""
_QUOTES = ("'", '"')
_MARK = re.compile(r"<[^<>\s]+>?|\[[A-Z_]+\]")
_HOLE = re.compile(r"\{(?:calls|name|number|arguments|key|value)\}")
_PIECE = re.compile(r"<[^<>\s]*>?|[^\s<]+")
_MOST_COMMAS = 2048
"""A Python literal with more takes the loop too long, and is sent as a text."""
_ESCAPE, _ESCAPED = re.compile(r"\\(.)", re.DOTALL), frozenset("\\'\"abfnrtvxuUN01234567\n")


CHANNEL, START, MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
END, CALLED, RETURN = "<|end|>", "<|call|>", "<|return|>"
CHANNEL_MARKS = CHANNEL, START, MESSAGE, END, CALLED, RETURN
"""What the reader of channels looks for."""
_CHANNELS, _MESSAGE = Marks(CHANNEL, START, END, CALLED, RETURN), Marks(MESSAGE)
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.:/-]+)")


def read_channels(source: GrowingText, sink: AnswerSink, *, thinks: bool, calls: bool) -> Reading[None]:
    """Read an answer of messages, each with a header that says its channel, and to whom it is. thinks, calls: whether thoughts
    and calls are told apart; otherwise they are content, with their marks."""
    mark = (yield from source.next_is(" to=")) or (yield from read_until(source, sink.content, _CHANNELS))
    while mark is not None:
        tell, closed = sink.content, ""
        sink.mark()
        if mark not in (END, CALLED, RETURN):
            pieces = [mark]
            found = yield from read_until(source, pieces.append, _MESSAGE)
            header = "".join(pieces)
            if calls and found and (function := _RECIPIENT.search(header)):
                sink.call(function[1])
                tell = sink.arguments
                if (yield from source.sees("{")):
                    yield from read_value(source, tell, CALLED, forgets=True)
            elif thinks and found and "analysis" in header and "to=" not in header:
                tell = sink.reasoning
                tell("")  # the header is read
            elif not found or "analysis" in header or "to=" in header:
                sink.content(header + (found or ""))
                closed = END
            else:
                tell("")
        mark = yield from read_until(source, tell, _CHANNELS)
        if mark is not None and mark == closed:
            sink.content(mark)
