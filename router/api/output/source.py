"""A text that grows while it is read: parsers are generators that yield when they need more of it.

Owns the unread text. A step waits only while what has come leaves open what it is: so a text gives the same, however it is cut.

    forgotten │ since `start`, read │ unread │ to come
                                    └ at
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

R = TypeVar("R")
Reading: TypeAlias = Generator[None, None, R]
"""A part of a parser. It yields when it needs more text, and returns what it read."""


class GrowingText:
    """text: what came and is not forgotten. at: how far it is read. over: nothing follows."""

    __slots__ = ("at", "over", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.over = False

    def push(self, text: str) -> None:
        self.text += text

    def forget(self) -> None:
        """Nobody will look back behind `at`."""
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Reading[bool]:
        """Wait until something is unread. Returns whether something is, or False at the end."""
        while self.at == len(self.text):
            if self.over:
                return False
            yield
        return True

    def next_is(self, *options: str) -> Reading[str | None]:
        """Read one of these. Returns which, or None when the text goes on otherwise: then nothing is read."""
        while True:
            for option in options:
                if self.text.startswith(option, self.at):
                    self.at += len(option)
                    return option
            rest = self.text[self.at :]
            if self.over or not any(option.startswith(rest) for option in options):
                return None
            yield

    def skip_space(self) -> Reading[None]:
        while (yield from self.more()) and self.text[self.at].isspace():
            self.at += 1

    def first_of(self, marks: Sequence[str]) -> tuple[str, str | None]:
        """Read up to the first of these marks, and the mark, as far as that has come. Returns the text before it, and the mark or
        None. A possible beginning of a mark stays unread, unless the text is over."""
        found = [(begin, mark) for mark in marks if (begin := self.text.find(mark, self.at)) >= 0]
        if found:
            begin, mark = min(found)
            before, self.at = self.text[self.at : begin], begin + len(mark)
            return before, mark
        end = len(self.text)
        if not self.over:
            longest = max(map(len, marks), default=1) - 1
            for begin in range(max(self.at, end - longest), end):
                tail = self.text[begin:]
                if any(mark.startswith(tail) for mark in marks):
                    end = begin
                    break
        before, self.at = self.text[self.at : end], end
        return before, None


def read_until(source: GrowingText, tell: Callable[[str], None], *marks: str) -> Reading[str | None]:
    """Read up to the first of these marks, and the mark. Returns the mark, or None at the end. tell: gets the text before it, as
    it comes. What was read is forgotten."""
    while (yield from source.more()):
        before, mark = source.first_of(marks)
        source.forget()
        tell(before)
        if mark is not None:
            return mark
        if source.text:
            yield  # it may be the beginning of a mark
    return None
