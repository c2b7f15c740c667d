"""Options: what breaks a rule is refused by its flag."""

import pytest

from common.errors import ConfigError
from common.options import parse_numbers


def test_numbers_are_read_as_they_stand_there() -> None:
    assert parse_numbers("8, 1,8", "pages", int) == (8, 1, 8)
    assert parse_numbers("0.5,2", "rates", float) == (0.5, 2.0)


@pytest.mark.parametrize("text", ["", "1,", "1;2", "1.5", "two"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--pages must be numbers with commas between them"):
        parse_numbers(text, "pages", int)
