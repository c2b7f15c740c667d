"""The parts of an answer, and where a parser puts them.

Owns the rule for white space. Around thoughts and calls it is nobody's, with two exceptions: where content stands on both sides
of calls, one side's white space is kept, so that words do not join; and the first line of content or thoughts keeps its
indentation. Everywhere else white space is kept. Does not know formats.
"""

from collections.abc import Iterable
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


def whole_answer(parts: Iterable[Part]) -> WholeAnswer:
    """The answer that has these parts."""
    content, reasoning = list[str](), list[str]()
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegins(name):
                calls.append((name, []))
            case Arguments(text):
                calls[-1][1].append(text)
            case _:
                assert_never(part)
    return WholeAnswer("".join(content), "".join(reasoning), [WholeCall(name, "".join(texts)) for name, texts in calls])


class PartSink:
    """The parts that were found and not taken yet. Neighbours of one kind are joined when they are taken, so that no text is
    copied once for each that follows it."""

    def __init__(self) -> None:
        self._parts: list[tuple[type[Part], list[str]]] = []
        self._after_mark = False
        """Whether nothing but white space came since a mark."""
        self._before_mark = ""
        """White space between content and the mark."""
        self._space: list[str] = []
        """White space that came last, in pieces: it waits for what follows it."""
        self._kind: type[Content] | type[Reasoning] = Content
        self._has_content = False

    def content(self, text: str) -> None:
        self._text(Content, text)

    def reasoning(self, text: str) -> None:
        self._text(Reasoning, text)

    def mark(self) -> None:
        """Here thoughts or a call begin or end."""
        if not self._after_mark:
            self._before_mark = "".join(self._space)
        self._after_mark, self._space = True, []

    def call(self, name: str) -> None:
        self.mark()
        self._parts.append((CallBegins, [name]))

    def arguments(self, text: str) -> None:
        self._add(Arguments, text)

    @property
    def holds_nothing(self) -> bool:
        """Whether the next text is told as it is, all of it."""
        return not self._after_mark and not self._space

    def finish(self) -> None:
        """Nothing follows: the last white space was no mark's."""
        space, self._space = "".join(self._space), []
        self._add(self._kind, "" if self._after_mark else space)

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return [kind("".join(texts)) for kind, texts in parts]

    def _text(self, kind: type[Content] | type[Reasoning], text: str) -> None:
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
        self._has_content = self._has_content or kind is Content
        self._add(kind, space)
        self._add(kind, settled)

    def _space_between(self, kind: type[Content] | type[Reasoning], after_mark: str) -> str:
        """What stays of the white space on the two sides of the last marks, when text of this kind follows."""
        if kind is Content and self._has_content:
            return after_mark if "\n" in after_mark or not self._before_mark else self._before_mark
        return after_mark[after_mark.rfind("\n") + 1 :] if "\n" in after_mark else ""

    def _add(self, kind: type[Content] | type[Reasoning] | type[Arguments], text: str) -> None:
        if not text:
            return
        if self._parts and self._parts[-1][0] is kind:
            self._parts[-1][1].append(text)
        else:
            self._parts.append((kind, [text]))
