"""What each piece of an answer's text is: the answer itself, thoughts, arguments of calls, or the marks around them.

Owns the text that is not settled yet. Reads with the readers that make the answer's parts, so the
two never differ. Runs in the detokenizer, which looks for stops; see `common.text.stops`.
"""

from collections.abc import Collection, Sequence

from common.text.stops import Piece, Region
from router.api.parsing.parser import GrowingText, Thoughts, ToolReader, read_content, read_parts


class AnswerRegions:
    """Implements `AnswerReader`, and `AnswerSink` for its own reading. marks: those of the format. For the others see
    `AnswerParser`."""

    def __init__(
        self,
        marks: Collection[str],
        closes: Sequence[str] = (),
        *,
        thoughts: Thoughts | None,
        opened: bool,
        read_tools: ToolReader | None,
    ) -> None:
        """closes: those of the marks that end a call, or all calls."""
        self.marks = marks
        self._closes = tuple(mark.strip() for mark in closes if mark.strip())
        self._source = GrowingText()
        self._text = ""
        """What is not settled."""
        self._settled = 0
        """How many characters are."""
        self._pieces: list[Piece] = []
        self._within: Region = "thoughts" if opened and thoughts is not None else "answer"
        """What was told last."""
        self._after_mark = False
        """Whether nothing but white space came since a mark: it is not part of the answer."""
        self._reading = read_parts(self._source, self, thoughts, opened, read_tools)
        self._rest = read_content(self._source, self)

    @property
    def region(self) -> Region:
        unsettled = self._text[: self._source.place - self._settled]
        return "mark" if self._within == "answer" and unsettled.strip() else self._within

    @property
    def may_end(self) -> bool:
        if self.region != "mark":
            return self.region == "answer"
        unsettled = self._text[: self._source.place - self._settled]
        return unsettled.rstrip().endswith(self._closes) if self._closes else False

    def push(self, text: str) -> list[Piece]:
        self._text += text
        self._source.push(text)
        return self._read()

    def finish(self) -> list[Piece]:
        self._source.over = True
        pieces = self._read()
        if self._text:
            pieces.append((self._within if self._within in ("thoughts", "arguments") else "mark", self._text))
            self._text = ""
        return pieces

    def content(self, text: str) -> None:
        end = self._source.place
        self._settle(end - len(text), "mark")
        self._within = "answer"
        if self._after_mark:
            body = text.lstrip()
            self._settle(end - len(body), "mark")
            self._after_mark = not body
        self._settle(end, "answer")

    def reasoning(self, text: str) -> None:
        self._within = "thoughts"
        self._settle(self._source.place, "thoughts")

    def mark(self) -> None:
        if self._within != "answer":  # else it belongs to what begins behind it
            self._settle(self._source.place, "closing" if self._within == "thoughts" else "mark")
        self._within, self._after_mark = "answer", True

    def call(self, name: str, arguments: str = "") -> None:
        self._settle(self._source.place, "mark")
        self._within = "arguments"

    def arguments(self, text: str) -> None:
        self._settle(self._source.place, "arguments")

    def _read(self) -> list[Piece]:
        for _ in self._reading:
            break
        else:
            next(self._rest, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _settle(self, end: int, region: Region) -> None:
        """The text up to this place in the answer is of this region."""
        chars = end - self._settled
        if chars > 0:
            self._pieces.append((region, self._text[:chars]))
            self._text = self._text[chars:]
            self._settled = end
