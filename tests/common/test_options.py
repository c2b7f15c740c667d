"""Options: each field of a config is one flag, and what breaks a rule or cannot be honoured is refused by that flag."""

import argparse
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest

from common.config import AccessConfig, EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig, SecurityConfig
from common.errors import ConfigError
from common.options import (
    ConfigClass,
    add_flags,
    flag_of,
    option,
    parse_numbers,
    read_config,
    require_above_0,
    require_at_least,
    require_between,
    to_flags,
)
from launch import main as launch_main


@dataclass(frozen=True, kw_only=True)
class Kettle:
    """A kettle. It boils water."""

    water_l: float = option(1.5, "litres; 100% is full")
    cups: int = option(4, "cups")
    name: str = option("", "what it is called")
    mode: Literal["boil", "warm"] = option("boil", "what to do")


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


CONFIGS: tuple[type[ConfigClass], ...]
CONFIGS = (RouterConfig, ModelConfig, EngineConfig, InstanceConfig, LogConfig, SecurityConfig, AccessConfig)


@dataclass(frozen=True, kw_only=True)
class Stove:
    """A stove."""

    name: str = option("", "what it is called")
    rings: int = option(2, "rings")


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """A shelf."""

    pots: tuple[str, ...] = option((), "what stands on it")
    lid: Literal["auto", "off", "on"] = option("auto", "whether they are covered")


def parser_for(*configs: type[ConfigClass], without: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, *configs, without=without)
    return parser


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_field_is_a_flag_with_its_help_and_default(config: type[ConfigClass]) -> None:
    text = "".join(parser_for(config).format_help().split())  # lines also break at hyphens
    for field in dataclasses.fields(config):
        assert flag_of(field.name) in text
        assert "".join(field.metadata["help"].split()) in text
        if field.default not in ("", ()):
            assert f"(default:{field.default})" in text
    assert read_config(config, parser_for(config).parse_args([])) == config(), "without flags"


def test_values_have_the_type_of_their_field() -> None:
    flags = parser_for(Kettle).parse_args(["--water-l", "0.5", "--cups=3", "--name", "x", "--mode", "warm"])
    assert read_config(Kettle, flags) == Kettle(water_l=0.5, cups=3, name="x", mode="warm")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["--cups", "many"], "--cups"),
        (["--mode", "fry"], "--mode"),
        (["--water-l", "much"], "--water-l"),
        (["--sugar", "1"], "--sugar"),
        (["--cup", "1"], "--cup"),
    ],
)
def test_bad_values_unknown_flags_and_abbreviations_are_refused_by_name(
    line: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parser_for(Kettle).parse_args(line)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_a_field_of_several_texts_takes_them_behind_one_flag_and_survives_a_command_line() -> None:
    flags = parser_for(Shelf).parse_args(["--pots", "red", "blue", "--lid", "on"])
    shelf = read_config(Shelf, flags)
    assert shelf == Shelf(pots=("red", "blue"), lid="on")
    assert read_config(Shelf, parser_for(Shelf).parse_args(to_flags(shelf))) == shelf


def test_the_bare_flag_means_on_where_on_and_off_are_choices() -> None:
    assert read_config(Shelf, parser_for(Shelf).parse_args(["--lid"])).lid == "on"


def test_a_field_that_two_configs_have_is_one_flag_for_both() -> None:
    flags = parser_for(Kettle, Stove).parse_args(["--name", "x"])
    assert read_config(Kettle, flags).name == read_config(Stove, flags).name == "x"


def test_a_field_that_is_left_out_has_no_flag() -> None:
    parser = parser_for(Kettle, without=("name",))
    assert "--name" not in parser.format_help()
    assert read_config(Kettle, parser.parse_args([]), name="y").name == "y"


def test_a_field_whose_type_has_no_flag_is_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Odd:
        """Odd."""

        items: tuple[int, ...] = option((), "some")

    with pytest.raises(TypeError, match="items"):
        parser_for(Odd)


def test_configs_survive_a_command_line() -> None:
    kettle, stove = Kettle(water_l=0.1 + 0.2, cups=-1, name="--mode", mode="warm"), Stove(rings=3)
    flags = parser_for(Kettle, Stove).parse_args(to_flags(kettle, stove))
    assert read_config(Kettle, flags) == kettle
    assert read_config(Stove, flags) == Stove(rings=3, name="--mode"), "a flag that both have reaches both"
    assert to_flags(Kettle(), Stove()) == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["local", "--page-size", "0"], "--page-size"),
        (["local", "--kv-memory", "some"], "--kv-memory"),
        (["local", "--decode", "0"], "--decode"),
        (["local", "--prefill", "-1"], "--prefill"),
        (["local", "--dead-after-s", "0.1"], "--dead-after-s"),
        (["router", "--port", "70000"], "--port"),
        (["router", "--max-body", "?"], "--max-body"),
        (["prefill", "--tp", "0"], "--tp"),
        (["decode", "--rank", "1"], "--rank"),
        (["decode", "--name", "router"], "--name"),
        (["prefill", "--name", "a b"], "--name"),
    ],
)
def test_a_value_that_a_config_refuses_is_one_line_that_names_the_flag(
    line: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_main.main(line) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"launch {line[0]}: ") and named in error and error.count("\n") == 1
