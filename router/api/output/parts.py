"""The parts of an answer, and where a parser puts them.

Owns the rule for white space: around thoughts and calls it is nobody's; everywhere else it is kept. Does not know formats.
"""

from dataclasses import dataclass, field
from typing import TypeAlias, assert_never


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of the call that began last."""

    text: str


Part: TypeAlias = Content | Reasoning | CallBegins | Arguments


@dataclass(slots=True)
class WholeCall:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeAnswer:
    """All parts of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)

    def add(self, part: Part) -> None:
        match part:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegins(name):
                self.calls.append(WholeCall(name))
            case Arguments(text):
                self.calls[-1].arguments += text
            case _:
                assert_never(part)


class PartSink:
    """The parts that were found and not taken yet. Neighbours of one kind are joined."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._after_mark = False
        """Whether white space is nobody's, because nothing but white space came since a mark."""
        self._space = ""
        """White space that is content or a thought, unless a mark follows it."""
        self._kind: type[Content] | type[Reasoning] = Content

    def content(self, text: str) -> None:
        self._text(Content, text)

    def reasoning(self, text: str) -> None:
        self._text(Reasoning, text)

    def mark(self) -> None:
        """Here thoughts or a call begin or end."""
        self._after_mark, self._space = True, ""

    def call(self, name: str) -> None:
        self.mark()
        self._parts.append(CallBegins(name))

    def arguments(self, text: str) -> None:
        self._add(Arguments, text)

    @property
    def holds_nothing(self) -> bool:
        """Whether the next text is told as it is, all of it."""
        return not self._after_mark and not self._space

    def finish(self) -> None:
        """Nothing follows: the last white space was no mark's."""
        space, self._space = self._space, ""
        self._add(self._kind, space)

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _text(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if self._after_mark:
            text = text.lstrip()
        if not text:
            return
        self._kind = kind
        settled = (self._space + text).rstrip()
        if settled:
            self._after_mark = False
        self._space = (self._space + text)[len(settled) :]
        self._add(kind, settled)

    def _add(self, kind: type[Content] | type[Reasoning] | type[Arguments], text: str) -> None:
        if not text:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind):
            self._parts[-1] = kind(last.text + text)
        else:
            self._parts.append(kind(text))
