"""A text that grows while it is read: parsers are generators that yield when they need more of it.

Owns the unread text. A step waits only while what has come leaves open what it is: so a text gives the same, however it is cut.

    forgotten │ since `start`, read │ unread │ to come
                                    └ at
"""

import re
from collections.abc import Callable, Generator
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

    def first_of(self, marks: "Marks") -> tuple[str, str | None]:
        """Read up to the first of these marks, and the mark, as far as that has come. Returns the text before it, and the mark or
        None. A possible beginning of a mark stays unread, unless the text is over."""
        end, mark = marks.find(self.text, self.at, self.over)
        before, self.at = self.text[self.at : end], end + len(mark or "")
        return before, mark


class Marks:
    """Texts to look for, prepared once. A search costs about the same for one mark and for a thousand: it looks only at places
    where a mark's first character stands."""

    __slots__ = ("_beginnings", "_first", "_lengths", "_texts")

    def __init__(self, *texts: str) -> None:
        self._texts = frozenset(texts)
        self._lengths = sorted(set(map(len, texts)))
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        first = "".join(sorted({re.escape(text[0]) for text in texts}))
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def __bool__(self) -> bool:
        return bool(self._texts)

    def find(self, text: str, at: int, is_over: bool) -> tuple[int, str | None]:
        """Where the first mark behind `at` begins, and the mark. Without one: where what may become a mark begins, or the end of
        the text, and None. The shortest of several marks at one place is found: the longer ones have not come yet."""
        for place in self._first.finditer(text, at):
            begin = place.start()
            for length in self._lengths:
                if (mark := text[begin : begin + length]) in self._texts:
                    return begin, mark
            if not is_over and len(text) - begin < self._lengths[-1] and text[begin:] in self._beginnings:
                return begin, None
        return len(text), None


def read_until(source: GrowingText, tell: Callable[[str], None], marks: Marks) -> Reading[str | None]:
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
