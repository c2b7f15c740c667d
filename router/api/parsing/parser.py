"""What a model wrote, as it comes: its text in, and its parts out, thoughts first, then content and calls.

Owns the unread text, and the rule for white space. Does not know the formats of calls, requests or HTTP.

Parsers are generators that yield when they need more text, and they wait only while what has come leaves open what it is. So a
text gives the same parts, however it is cut. Reading costs as much for each character in a long text as in a short one, whether
it comes at once or in pieces: what is read is not copied again when more comes, and to forget it copies nothing.

    forgotten │ read, not forgotten │ unread │ to come
              │   pieces   │ text ──────────►│
                           └ begin  └ at

White space around thoughts and calls is nobody's, with two exceptions: where content stands on both sides of calls, one side's
white space is kept, so that words do not join; and the first line of content or thoughts keeps its indentation. Everywhere else
white space is kept.
"""

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, TypeVar

from common.config import ReasoningParserName

R = TypeVar("R")
_SPACE = re.compile(r"\s*")
Reading: TypeAlias = Generator[None, None, R]
"""A part of a parser. It yields when it needs more text, and returns what it read."""


class GrowingText:
    """An answer's text that grows while it is read. A place in the text is good until the next yield."""

    __slots__ = ("_before", "_begin", "_pieces", "at", "over", "text")

    def __init__(self) -> None:
        self.text = ""
        """What came last, with what was unread before it."""
        self.at = 0
        """How far the text is read."""
        self.over = False
        """Whether nothing follows."""
        self._before = 0
        """How many characters of the answer stand before `text`."""
        self._begin = 0
        """How much of the text is forgotten."""
        self._pieces: list[str] = []
        """What was read before `text` and is not forgotten."""

    def push(self, text: str) -> None:
        if self.at > self._begin:
            self._pieces.append(self.text[self._begin : self.at])
        self._before += self.at
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
            self._before -= sum(map(len, self._pieces))
            self.text, self.at = self.read() + self.text[self.at :], 0
            self.forget()
        self.at = self._begin

    @property
    def place(self) -> int:
        """How many characters of the answer are read."""
        return self._before + self.at

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

    def sees(self, *options: str) -> Reading[str | None]:
        """Which of these is next, if one is. Nothing is read."""
        found = yield from self.next_is(*options)
        self.at -= len(found or "")
        return found

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


def read_until(source: GrowingText, tell: Callable[[str], object], marks: Marks, *, forgets: bool = True) -> Reading[str | None]:
    """Read up to the first of these marks, and the mark. Returns the mark, or None at the end. tell: gets the text before it, as
    it comes, while its end is the place in the source. forgets: what was read is forgotten, also what was read before."""
    if forgets:
        source.forget()
    while (yield from source.more()):
        end, mark = marks.find(source.text, source.at, source.over)
        before, source.at = source.text[source.at : end], end
        if forgets:
            source.forget()
        tell(before)
        if mark is not None:
            source.at += len(mark)
            if forgets:
                source.forget()
            return mark
        if source.at < len(source.text):
            yield  # it may be the beginning of a mark
    return None


TextKind: TypeAlias = Literal["content", "reasoning"]
PartKind: TypeAlias = Literal["content", "reasoning", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of content, of thoughts, or of the arguments of the call that began last; or a call's beginning, with the name of
    its function."""

    kind: PartKind
    text: str


@dataclass(slots=True)
class ParsedCall:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """All parts of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def parsed_answer(parts: Iterable[AnswerPart]) -> ParsedAnswer:
    """The answer that has these parts."""
    texts: dict[TextKind, list[str]] = {"content": [], "reasoning": []}
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        match part.kind:
            case "call":
                calls.append((part.text, []))
            case "arguments":
                calls[-1][1].append(part.text)
            case kind:
                texts[kind].append(part.text)
    content, reasoning = map("".join, texts.values())
    return ParsedAnswer(content, reasoning, [ParsedCall(name, "".join(pieces)) for name, pieces in calls])


class AnswerSink(Protocol):
    """What is told of an answer as it is read. Behind each text that is told, the source is at its end."""

    def content(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None: ...

    def mark(self) -> None:
        """Here thoughts or a call begin or end."""

    def call(self, name: str, arguments: str = "") -> None:
        """Here a call begins."""

    def arguments(self, text: str) -> None: ...


class PartSink:
    """The parts that were found and not taken yet. Neighbours of one kind are joined when they are
    taken, so that no text is copied once for each that follows it. Implements `AnswerSink`."""

    def __init__(self) -> None:
        self._parts: list[tuple[PartKind, list[str]]] = []
        self._after_mark = False
        """Whether nothing but white space came since a mark."""
        self._before_mark = ""
        """White space between content and the mark."""
        self._space: list[str] = []
        """White space that came last, in pieces: it waits for what follows it."""
        self._kind: TextKind = "content"
        self._has_content = False

    def content(self, text: str) -> None:
        self._text("content", text)

    def reasoning(self, text: str) -> None:
        self._text("reasoning", text)

    def mark(self) -> None:
        """Here thoughts or a call begin or end."""
        if not self._after_mark:
            self._before_mark = "".join(self._space)
        self._after_mark, self._space = True, []

    def call(self, name: str, arguments: str = "") -> None:
        self.mark()
        self._parts.append(("call", [name]))
        self.arguments(arguments)

    def arguments(self, text: str) -> None:
        self._add("arguments", text)

    @property
    def holds_nothing(self) -> bool:
        """Whether the next text is told as it is, all of it."""
        return not self._after_mark and not self._space

    def finish(self) -> None:
        """Nothing follows: the last white space was no mark's."""
        space, self._space = "".join(self._space), []
        self._add(self._kind, "" if self._after_mark else space)

    def take(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return [AnswerPart(kind, "".join(texts)) for kind, texts in parts]

    def _text(self, kind: TextKind, text: str) -> None:
        if not text:
            return
        self._kind = kind
        settled = text.rstrip()
        before, self._space = self._space, [] if settled else self._space
        if settled != text:
            self._space.append(text[len(settled) :])
        if not settled:
            return
        space = "".join(before)
        if self._after_mark:
            body = settled.lstrip()
            space = self._space_between(kind, space + settled[: len(settled) - len(body)])
            settled, self._after_mark = body, False
        self._has_content = self._has_content or kind == "content"
        self._add(kind, space)
        self._add(kind, settled)

    def _space_between(self, kind: TextKind, after_mark: str) -> str:
        """What stays of the white space on the two sides of the last marks, when text of this kind follows."""
        if kind == "content" and self._has_content:
            return after_mark if "\n" in after_mark or not self._before_mark else self._before_mark
        return after_mark[after_mark.rfind("\n") + 1 :] if "\n" in after_mark else ""

    def _add(self, kind: PartKind, text: str) -> None:
        if not text:
            return
        if self._parts and self._parts[-1][0] == kind:
            self._parts[-1][1].append(text)
        else:
            self._parts.append((kind, [text]))


_NOTHING = Marks()
ToolReader: TypeAlias = Callable[[GrowingText, AnswerSink], Reading[None]]
"""Reads content and calls, to the end of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """How a model writes what it thinks before it answers."""

    names: tuple[ReasoningParserName, ...]
    """What flags call it."""
    found_by: str
    """A regular expression that is found in the chat templates of models that think so."""
    begin: str
    end: str
    then: str = ""
    """What follows before calls; empty: up to two new lines."""
    always: bool = False
    """Whether answers begin within thoughts, whatever the prompt ends with."""


class AnswerParser:
    """The parser of one answer. thoughts: it may begin with them. opened: the prompt opened them already. read_tools: None when
    calls are content."""

    def __init__(self, *, thoughts: Thoughts | None, opened: bool, read_tools: ToolReader | None) -> None:
        self._source, self._sink = GrowingText(), PartSink()
        self._reading = self._read(thoughts, opened, read_tools)
        self._at_content = False

    @property
    def is_plain(self) -> bool:
        """Whether all text from here on is content, as it is."""
        return self._at_content and self._sink.holds_nothing

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that this text settles. Their joined texts do not depend on how the answer is cut into pieces."""
        self._source.push(text)
        next(self._reading, None)
        return self._sink.take()

    def finish(self) -> list[AnswerPart]:
        """The answer is over. Returns the last parts."""
        self._source.over = True
        next(self._reading, None)
        self._sink.finish()
        return self._sink.take()

    def _read(self, thoughts: Thoughts | None, opened: bool, read_tools: ToolReader | None) -> Reading[None]:
        yield from read_parts(self._source, self._sink, thoughts, opened, read_tools)
        self._at_content = True
        yield from read_content(self._source, self._sink)


def read_parts(
    source: GrowingText, sink: AnswerSink, thoughts: Thoughts | None, opened: bool, read_tools: ToolReader | None
) -> Reading[None]:
    """Read thoughts, content and calls. Behind them all text is content."""
    if thoughts is not None:
        yield from _read_thoughts(source, sink, thoughts, opened)
    if read_tools is not None:
        yield from read_tools(source, sink)


def read_content(source: GrowingText, sink: AnswerSink) -> Reading[None]:
    """Read text that is content, to the end of the answer."""
    yield from read_until(source, sink.content, _NOTHING)


def _read_thoughts(source: GrowingText, sink: AnswerSink, thoughts: Thoughts, opened: bool) -> Reading[None]:
    yield from source.skip_space()
    if not (yield from source.next_is(thoughts.begin)) and not opened:
        source.unread()
        return
    source.forget()
    sink.mark()
    if (yield from read_until(source, sink.reasoning, Marks(thoughts.end))):
        sink.mark()


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the answers to a request are read."""

    new_parser: Callable[[], AnswerParser] | None = None
    """Makes the parser of a choice; None: all text is content."""
    new_id: Callable[[str, int], str] = "{}:{}".format
    """Makes the id of a call, from its name and how many came before it in its choice."""

    def whole(self, text: str) -> ParsedAnswer:
        """The parts of a whole answer."""
        if self.new_parser is None:
            return ParsedAnswer(text)
        parser = self.new_parser()
        return parsed_answer([*parser.push(text), *parser.finish()])


PLAIN_TEXT = AnswerReading()
