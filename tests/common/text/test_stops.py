"""Stops in the text of an answer whose parts a reader tells apart, where tokens end within marks."""

from collections.abc import Sequence

from common.ids import ROUTER, AttemptId, RequestId
from common.messages import AnswerParts, ExpectAnswer
from common.text.stops import PartStops, Piece, Region

KEY = AttemptId(RequestId("a"), 0, ROUTER)


class Brackets:
    """Implements `AnswerReader`: thoughts come first and end with ]."""

    marks = ("]",)

    def __init__(self) -> None:
        self._region: Region = "thoughts"

    @property
    def region(self) -> Region:
        return self._region

    @property
    def may_end(self) -> bool:
        return self._region == "answer"

    def push(self, text: str) -> Sequence[Piece]:
        if self._region == "answer":
            return [("answer", text)]
        thought, mark, rest = text.partition("]")
        if not mark:
            return [("thoughts", text)]
        self._region = "answer"
        return [piece for piece in (("thoughts", thought), ("closing", mark), ("answer", rest)) if piece[1]]

    def finish(self) -> Sequence[Piece]:
        return ()


def stops_of(*stop: str, include: bool = False) -> PartStops:
    opened = ExpectAnswer(KEY, stop, include_stop=include, parts=AnswerParts(thoughts=True))
    return PartStops(opened, Brackets(), chr)


def test_a_stop_is_found_behind_the_mark_within_one_token_and_not_before_it() -> None:
    stops = stops_of("x")
    assert [stops.push(text) for text in ("axb", "x]a", "bx")] == ["axb", "x]a", "b"]
    assert stops.matched == "x"


def test_no_stop_begins_in_thoughts_and_ends_in_the_answer() -> None:
    stops = stops_of("x]y", "xy")
    assert [stops.push(text) for text in ("x", "]y", "z")] == ["x", "]y", "z"]
    assert stops.matched is None and stops.flush() == ""


def test_the_closing_mark_may_be_the_stop() -> None:
    for include, text in ((False, "a"), (True, "a]")):
        stops = stops_of("]", include=include)
        assert stops.push("a]b") == text and stops.matched == "]"


def test_a_token_counts_for_thoughts_where_its_text_begins_and_one_without_text_goes_with_the_next() -> None:
    stops = stops_of()
    for text in ("a", "", "b", "]c", "", "d"):
        stops.push(text)
    assert stops.thought_tokens == 4
