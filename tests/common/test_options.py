"""Options: what breaks a rule is refused by its flag."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from common.errors import ConfigError
from common.options import option, parse_numbers, require_above_0, require_at_least, require_between


@dataclass(frozen=True, kw_only=True)
class Kettle:
    water_l: float = option(1.5, "litres")
    cups: int = option(4, "cups")


def has_some(kettle: Kettle) -> None:
    require_above_0(kettle, "cups", "water_l")


def has_a_cup(kettle: Kettle) -> None:
    require_at_least(kettle, water_l=0, cups=1)


def is_small(kettle: Kettle) -> None:
    require_between(kettle, 1, 4, "cups", "water_l")


@pytest.mark.parametrize(
    ("rule", "kettle", "message"),
    [
        (has_some, Kettle(water_l=0.0), "--water-l must be above 0; it is 0.0"),
        (has_some, Kettle(water_l=math.nan), "--water-l must be above 0; it is nan"),
        (has_a_cup, Kettle(cups=0), "--cups must be at least 1; it is 0"),
        (has_a_cup, Kettle(water_l=-0.5), "--water-l must be 0 or more; it is -0.5"),
        (has_a_cup, Kettle(water_l=math.nan), "--water-l must be 0 or more; it is nan"),
        (is_small, Kettle(water_l=4.5), "--water-l must be between 1 and 4; it is 4.5"),
        (is_small, Kettle(cups=0), "--cups must be between 1 and 4; it is 0"),
        (is_small, Kettle(water_l=math.nan), "--water-l must be between 1 and 4; it is nan"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_flag_and_the_rule(
    rule: Callable[[Kettle], None], kettle: Kettle, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rule(kettle)
    assert str(caught.value) == message


@pytest.mark.parametrize("kettle", [Kettle(), Kettle(water_l=1.0, cups=1), Kettle(water_l=4.0)])
def test_a_value_at_the_limit_is_in_range(kettle: Kettle) -> None:
    for rule in (has_some, has_a_cup, is_small):
        rule(kettle)


def test_numbers_are_read_as_they_stand_there() -> None:
    assert parse_numbers("8, 1,8", "pages", int) == (8, 1, 8)
    assert parse_numbers("0.5,2", "rates", float) == (0.5, 2.0)


@pytest.mark.parametrize("text", ["", "1,", "1;2", "1.5", "two"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--pages must be numbers with commas between them"):
        parse_numbers(text, "pages", int)
