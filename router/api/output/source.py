"""A text that grows while it is read: parsers are generators that yield when they need more of it.

Owns the unread text. A step waits only while what has come leaves open what it is: so a text gives the same, however it is cut.
Reading costs as much for each character in a long text as in a short one, whether it comes at once or in pieces: what is read
is not copied again when more comes, and to forget it copies nothing.

    forgotten │ read, not forgotten │ unread │ to come
              │   pieces   │ text ──────────►│
                           └ begin  └ at
"""

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

R = TypeVar("R")
_SPACE = re.compile(r"\s*")
Reading: TypeAlias = Generator[None, None, R]
"""A part of a parser. It yields when it needs more text, and returns what it read."""


class GrowingText:
    """text: what came last, with what was unread before it. at: how far it is read. over: nothing follows. A place in the text is
    good until the next yield."""

    __slots__ = ("_begin", "_pieces", "at", "over", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.over = False
        self._begin = 0
        """What was forgotten of `text`."""
        self._pieces: list[str] = []
        """What was read before `text` and is not forgotten."""

    def push(self, text: str) -> None:
        if self.at > self._begin:
            self._pieces.append(self.text[self._begin : self.at])
        self.text, self.at, self._begin = self.text[self.at :] + text, 0, 0

    def forget(self) -> None:
        """Nobody will look back behind `at`."""
        self._pieces.clear()
        self._begin = self.at

    def read(self) -> str:
        """What was read and is not forgotten."""
        return "".join(self._pieces) + self.text[self._begin : self.at]

    def unread(self) -> None:
        """Go back to the beginning of what is not forgotten."""
        if self._pieces:
            self.text, self.at = self.read() + self.text[self.at :], 0
            self.forget()
        self.at = self._begin

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
            left = len(self.text) - self.at
            if self.over or not any(left < len(option) and option.startswith(self.text[self.at :]) for option in options):
                return None
            yield

    def skip_space(self) -> Reading[None]:
        yield from self.take(_SPACE)

    def take(self, chars: re.Pattern[str]) -> Reading[str]:
        """Read and return what matches. chars: matches any number of certain characters."""
        taken: list[str] = []
        while (yield from self.more()):
            found = chars.match(self.text, self.at)
            assert found is not None, "the pattern matches nothing, too"
            taken.append(found[0])
            self.at = found.end()
            if self.at < len(self.text):
                break
        return "".join(taken)

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
    it comes. What was read is forgotten, also what was read before."""
    source.forget()
    while (yield from source.more()):
        before, mark = source.first_of(marks)
        source.forget()
        tell(before)
        if mark is not None:
            return mark
        if source.at < len(source.text):
            yield  # it may be the beginning of a mark
    return None
