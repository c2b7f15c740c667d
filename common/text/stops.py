"""Where an answer ends by what it says: stop strings and stop tokens, and what of its text they act on.

Owns the search, the text that is held back because it may be the beginning of a stop string, and
how many tokens of the answer were thoughts. Does not know how models write thoughts and calls: a
reader says what each piece of the text is. Without a reader all of it is the answer.

    <think> so, so </think> \n\n I look. <tool_call> {"name": "f", "arguments":  {"a": 1}  } </tool_call>
    thoughts        closing  mark  answer  mark                                  arguments  mark

Stop strings and stop tokens act on the answer. A stop that is one of the format's own marks, such as
</tool_call>, acts where the mark stands as one. Nothing acts on thoughts and on arguments.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol, TypeAlias

from common.messages import AnswerParts, ExpectAnswer

Region: TypeAlias = Literal["answer", "thoughts", "closing", "arguments", "mark"]
"""What a piece of an answer's text is. closing: the mark that closes thoughts. mark: what stands
around calls and before the answer, with the white space there."""
Piece: TypeAlias = tuple[Region, str]


class AnswerReader(Protocol):
    """What the text of one answer is, as it comes."""

    @property
    def marks(self) -> Collection[str]:
        """The marks of the format."""

    @property
    def region(self) -> Region:
        """What the next character is, as far as that is known."""

    @property
    def may_end(self) -> bool:
        """Whether the answer may end here: not within thoughts, nor within a call."""

    def push(self, text: str) -> Sequence[Piece]:
        """The pieces that are settled now. Joined, all of them are the text."""

    def finish(self) -> Sequence[Piece]:
        """The text is over. Returns the last pieces."""


NewReader: TypeAlias = Callable[[AnswerParts], AnswerReader]


class StopStrings:
    """The search in one answer's text, which arrives in pieces. Owns the text that is held back because it may be the beginning
    of a stop string. Does not know tokens.

    stops: none of them empty (ValueError). included: the stop string stays in the text, so nothing is held back.
    """

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        if "" in stops:
            raise ValueError("an empty stop string would end every answer before it begins")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._included = included
        self._tail = ""
        """The end of the text so far that may begin a stop string. It is held back, unless stop strings are included."""
        self.matched: str | None = None
        """The stop string that ended the text. Push nothing after it."""

    def push(self, text: str, ends: bool = True) -> str:
        """Take the next piece. Returns the text that is certain to stay. ends: whether a stop string that is complete with this
        piece ends the text; one that only begins in it always can."""
        assert self.matched is None, "the text has ended"
        if not self._stops:
            return text
        before = len(self._tail)
        text = self._tail + text
        shown = before if self._included else 0
        # Only what ends in the new piece: the tail holds no whole stop string, except one that was to end nothing.
        places = ((text.find(stop, max(0, before + 1 - len(stop))), stop) for stop in self._stops) if ends else ()
        found = [(start + len(stop), start, stop) for start, stop in places if start >= 0]
        if found:
            end, start, self.matched = min(found)
            self._tail = ""
            return text[shown : end if self._included else start]
        held = self._possible_beginning(text)
        self._tail = text[len(text) - held :]
        return text[shown : len(text) if self._included else len(text) - held]

    def flush(self) -> str:
        """End the text. Returns what was held back."""
        text, self._tail = self._tail, ""
        return "" if self._included else text

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class PartStops:
    """The stops of an answer whose parts are told apart; used as `StopStrings`. token_text: the text of a token."""

    def __init__(self, opened: ExpectAnswer, reader: AnswerReader, token_text: Callable[[int], str]) -> None:
        self._strings = StopStrings(opened.stop, opened.include_stop)
        self._included = opened.include_stop
        self._reader = reader
        self.matched: str | int | None = None
        """What ended the answer. Push nothing after it."""
        marks = reader.marks
        texts = {token_id: token_text(token_id) for token_id in opened.stop_token_ids}
        self._tokens = frozenset(token_id for token_id, text in texts.items() if text not in marks)
        self._marks: dict[str, str | int] = {text: token_id for token_id, text in texts.items() if text in marks}
        self._marks |= {stop: stop for stop in opened.stop if stop.strip() in marks}
        """The stops that are marks of the format, by their texts."""
        self._count = _ThoughtCount()
        self._ends = True
        """As `push` was told last."""

    @property
    def thought_tokens(self) -> int:
        """How many tokens were thoughts, with the marks around them, as far as that is known."""
        return self._count.thoughts

    def ends_at(self, token_id: int) -> bool:
        """Whether this token ends the answer where it is now."""
        return token_id in self._tokens and self._reader.may_end

    def push(self, text: str, ends: bool = True) -> str:
        """Take the text of the next token. Returns the text that is certain to stay. ends: see `StopStrings`."""
        self._ends = ends
        self._count.token(len(text))
        return self._take(self._reader.push(text) if text else ())

    def flush(self) -> str:
        """End the text, which may end at a stop that is found now. Returns what was held back."""
        text = self._take(self._reader.finish())
        return text if self.matched is not None else text + self._strings.flush()

    def cut(self, token_id: int, text: str) -> str:
        """End the answer at this stop token, which has this text. Returns what was held back, and the text if it stays."""
        self._ends = False
        held = self.flush()
        self.matched = token_id
        return held + text if self._included else held

    def _take(self, pieces: Sequence[Piece]) -> str:
        taken: list[str] = []
        for region, piece in pieces:
            self._count.piece(region, len(piece))
            if region == "answer":
                taken.append(self._strings.push(piece, self._ends))
                self.matched = self._strings.matched
            else:
                taken += self._strings.flush(), self._at_marks(region, piece)
            if self.matched is not None:
                break
        return "".join(taken)

    def _at_marks(self, region: Region, piece: str) -> str:
        """The piece, or what stands in it before a stop that is a mark."""
        if not self._ends or not self._marks or region not in ("closing", "mark"):
            return piece
        found = [(piece.find(mark), mark) for mark in self._marks if mark in piece]
        if not found:
            return piece
        begin, mark = min(found)
        self.matched = self._marks[mark]
        return piece[: begin + len(mark) * self._included]


class _ThoughtCount:
    """Counts the tokens whose text begins within thoughts. A token without text goes with the next one that has some."""

    def __init__(self) -> None:
        self.thoughts = 0
        self._without_text = 0
        self._pushed = self._settled = 0
        self._tokens: deque[tuple[int, int]] = deque()
        """Where the text of tokens begins, and how many tokens go with it, of those that are not settled."""

    def token(self, chars: int) -> None:
        self._without_text += 1
        if chars:
            self._tokens.append((self._pushed, self._without_text))
            self._pushed += chars
            self._without_text = 0

    def piece(self, region: Region, chars: int) -> None:
        self._settled += chars
        while self._tokens and self._tokens[0][0] < self._settled:
            _, tokens = self._tokens.popleft()
            if region in ("thoughts", "closing"):
                self.thoughts += tokens
