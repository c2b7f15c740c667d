"""A call written as a JSON object: {"name": …, "arguments": {…}}, read as it comes.

Owns what makes an object a call. Does not know what stands around it. The arguments are passed on as they were written, also when
they are no JSON: clients expect text.
"""

import msgspec

from router.api.output.parts import PartSink
from router.api.output.source import GrowingText, Reading

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
                called = _begin(sink, name, "".join(early))
        elif key in ARGUMENT_KEYS and not called and not early:
            if name is not None:
                called = _begin(sink, name, "")
            yield from read_value(source, sink if called else None, early, end_mark)
        else:
            if not (yield from source.more()) or source.text[source.at] not in _VALUE_BEGINS:
                return called
            yield from read_value(source, None, [], end_mark)
        yield from source.skip_space()
        if (yield from source.next_is(",")):
            continue
        if (yield from source.next_is("}")) and name is not None and not called and not needs_arguments:
            called = _begin(sink, name, "{}")
        return called


def read_value(source: GrowingText, sink: PartSink | None, kept: list[str], end_mark: str = "") -> Reading[None]:
    """Read one JSON value. Its text goes to the sink as arguments, as it comes; without a sink it is kept. end_mark: ends it
    outside of strings too, and stays unread."""
    value = _Value()
    while not value.ended and (yield from source.more()):
        begin = source.at
        maybe_mark = False
        while source.at < len(source.text) and not maybe_mark and value.takes(source.text[source.at]):
            maybe_mark = not value.quoted and source.text[source.at] == end_mark[:1]
            source.at += not maybe_mark
        _keep(source.text[begin : source.at], sink, kept)
        if maybe_mark:
            if (yield from source.next_is(end_mark)):
                source.at -= len(end_mark)
                return
            _keep(source.text[source.at], sink, kept)
            source.at += 1
        if sink is not None:
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


def _keep(text: str, sink: PartSink | None, kept: list[str]) -> None:
    if sink is None:
        kept.append(text)
    else:
        sink.arguments(text)


def _begin(sink: PartSink, name: str, arguments: str) -> bool:
    sink.call(name)
    sink.arguments(arguments)
    return True


def _read_string(source: GrowingText) -> Reading[str | None]:
    """Read a JSON string. Returns None when there is none."""
    written: list[str] = []
    if not (yield from source.more()) or source.text[source.at] != '"':
        return None
    yield from read_value(source, None, written)
    try:
        return msgspec.json.decode("".join(written), type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
