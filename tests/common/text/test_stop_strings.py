"""Stop strings, compared with a search in the whole text."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.text.detokenizer import StopStrings

LETTERS = st.text(alphabet="ab\n🙂", max_size=24)


def search_in_whole_text(text: str, stops: Sequence[str], included: bool = False, ignored: int = 0) -> tuple[str, str | None]:
    """Text before the end, and the stop string: the first one that is complete, and of several at once the longest. included:
    with that string. ignored: what is complete within so many characters ends nothing."""
    for end in range(ignored + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if included else end - len(stop)], stop
    return text, None


def pushed(pieces: Sequence[str], stops: Sequence[str], included: bool = False, ignored: int = 0) -> tuple[str, str | None]:
    """ignored: so many pieces do not end the text."""
    finder = StopStrings(stops, included)
    text = ""
    for number, piece in enumerate(pieces):
        text += finder.push(piece, number >= ignored)
        if finder.matched is not None:
            return text, finder.matched
    return text + finder.flush(), None


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=4))
def test_the_text_ends_where_a_search_in_the_whole_text_ends_it(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    expected = search_in_whole_text(whole, stops)
    assert pushed(list(whole), stops) == expected
    # A piece may bring more than the first end: the earliest one must win inside it too.
    assert pushed(pieces, stops) == expected
    assert pushed([whole], stops) == expected


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=4), st.booleans(), st.integers(0, 8))
def test_stop_strings_may_stay_in_the_text_and_may_be_ignored_at_its_beginning(
    pieces: list[str], stops: list[str], included: bool, ignored: int
) -> None:
    whole = "".join(pieces)
    expected = search_in_whole_text(whole, stops, included, len("".join(pieces[:ignored])))
    assert pushed(pieces, stops, included, ignored) == expected


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=4))
def test_nothing_is_held_back_when_the_stop_string_stays(pieces: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops, included=True)
    for piece in pieces:
        shown = finder.push(piece)
        if finder.matched is not None:
            return
        assert shown == piece


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=4))
def test_text_is_held_back_only_while_it_could_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops)
    so_far, shown = "", ""
    for piece in pieces:
        so_far += piece
        shown += finder.push(piece)
        if finder.matched is not None:
            return
        held = so_far.removeprefix(shown)
        assert shown + held == so_far
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_is_found_across_pieces_and_trimmed() -> None:
    finder = StopStrings(["STOP"])
    assert [finder.push(piece) for piece in ("one S", "T", "OP two")] == ["one ", "", ""]
    assert finder.matched == "STOP"


def test_text_that_only_looked_like_a_stop_string_is_returned() -> None:
    finder = StopStrings(["\n\nUser:"])
    assert finder.push("a\n\nUs") == "a"
    assert finder.push("ed\n") == "\n\nUsed"
    assert finder.flush() == "\n"
    assert finder.matched is None


def test_of_two_stop_strings_that_are_complete_at_once_the_longer_one_counts() -> None:
    finder = StopStrings(["b", "ab"])
    assert finder.push("xab") == "x"
    assert finder.matched == "ab"


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopStrings([]).push("text") == "text"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
