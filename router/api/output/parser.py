"""The parser of one answer: its text in, as it comes, and its parts out.

Owns the order thoughts, then content and calls. Does not know requests or HTTP.
"""

from collections.abc import Callable
from typing import TypeAlias

from router.api.output.parts import Part, PartSink
from router.api.output.source import GrowingText, Marks, Reading, read_until

THINK, THINK_END = "<think>", "</think>"
_NOTHING, _THINK_END = Marks(), Marks(THINK_END)
ToolReader: TypeAlias = Callable[[GrowingText, PartSink], Reading[None]]
"""Reads content and calls, to the end of the answer."""


class AnswerParser:
    """thinks: the answer may begin with thoughts. opened: the prompt opened them already. read_tools: None when calls are
    content."""

    def __init__(self, *, thinks: bool, opened: bool, read_tools: ToolReader | None) -> None:
        self._source, self._sink = GrowingText(), PartSink()
        self._thinks, self._opened, self._read_tools = thinks, opened, read_tools
        self._reading = self._read()
        self._at_content = False

    @property
    def is_plain(self) -> bool:
        """Whether all text from here on is content, as it is."""
        return self._at_content and self._sink.holds_nothing

    def push(self, text: str) -> list[Part]:
        """The parts that this text settles. Their joined texts do not depend on how the answer is cut into pieces."""
        self._source.push(text)
        next(self._reading, None)
        return self._sink.take()

    def finish(self) -> list[Part]:
        """The answer is over. Returns the last parts."""
        self._source.over = True
        next(self._reading, None)
        self._sink.finish()
        return self._sink.take()

    def _read(self) -> Reading[None]:
        if self._thinks:
            yield from _read_thoughts(self._source, self._sink, self._opened)
        if self._read_tools is not None:
            yield from self._read_tools(self._source, self._sink)
        self._at_content = True
        yield from read_until(self._source, self._sink.content, _NOTHING)


def _read_thoughts(source: GrowingText, sink: PartSink, opened: bool) -> Reading[None]:
    yield from source.skip_space()
    if not (yield from source.next_is(THINK)) and not opened:
        source.unread()
        return
    source.forget()
    sink.mark()
    if (yield from read_until(source, sink.reasoning, _THINK_END)):
        sink.mark()
