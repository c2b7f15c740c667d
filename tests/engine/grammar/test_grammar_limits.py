"""What the limits of grammars count, and that no text makes the counting slow."""

import re
from itertools import product

import pytest

from common.errors import BadRequest
from engine.grammar.strings import _LITERALS, _REPEAT, check_size

FILLERS = (" ", "0", "a", ",", "\\\\", "\\a", '"', "[", "{", "(", "#", "\\u{", "{5,")
CLOSERS = ("}", "]", '"', "\n", ",", "5}")
FAR = 12
"""So many characters a pattern may look at and not take."""


@pytest.mark.parametrize("pattern", dict.fromkeys((*_LITERALS.values(), _REPEAT)))
def test_a_pattern_takes_what_it_reads_so_that_hostile_repetitions_are_read_once(pattern: re.Pattern[str]) -> None:
    def taken(text: str) -> int:
        match = pattern.match(text)
        return 0 if match is None else match.end()

    for opening, filler, closer in product(FILLERS, FILLERS, CLOSERS):
        text = opening + filler * 3 * FAR
        end = taken(text)
        if end < len(text):
            assert taken(text[: end + FAR] + closer) == end, f"{opening} and {filler!r}: {closer!r} is far away, but it matters"


@pytest.mark.parametrize("repeat", ["{20000}", "{ 20000 }", "{1,20000}", "{1 , 20000 }", "{  0020000, }", "{150}b{150}"])
def test_numbers_of_repetition_multiply_however_they_are_written(repeat: str) -> None:
    with pytest.raises(BadRequest, match="multiply"):
        check_size("regex", "regex", f"(a{repeat})")
    check_size("regex", "regex", f"(a{repeat.replace('0', '')}|\\u{{20000}}[{repeat}])")
