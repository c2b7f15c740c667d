"""What config classes are made of: frozen dataclasses whose fields are options, rules that their values keep, and their flags.

One field is one flag and one help text. A value that breaks a rule is refused by its flag on construction: no config holds one.
Owns the translation between configs and command lines, and how amounts of memory are spelled ("512MiB", "40%", "auto"). Does not
know which configs there are or what a flag means.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from common.errors import ConfigError

_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str, flag: str = "") -> int | None:
    """Bytes of "512MiB", "40GiB", "1000000"; None for "auto". Raises ConfigError, which names the flag."""
    if text == "auto":
        return None
    digits = text.rstrip("BKMGIbkmgi ")
    unit = text[len(digits) :].strip().upper()
    try:
        number = float(digits)
    except ValueError:
        number = -1.0
    scale = _UNITS.get(unit, 0)
    if not (math.isfinite(number) and number * scale >= 1):  # false for an unknown unit too
        where = f"--{flag}: " if flag else ""
        raise ConfigError(f"{where}{text!r} is not an amount of memory: write a number with B, KiB, MiB or GiB, or auto")
    return int(number * scale)


def parse_memory(text: str, flag: str, total_bytes: int) -> int | None:
    """As `parse_bytes`, and "40%" is that share of a memory of `total_bytes`. Raises ConfigError, which names the flag."""
    percent = parse_share(text, flag)
    return parse_bytes(text, flag) if percent is None else int(total_bytes * percent / 100)


def parse_share(text: str, flag: str) -> float | None:
    """Percent of "40%"; None for what is not a share. Raises ConfigError, which names the flag."""
    share = _SHARE.fullmatch(text)
    if share is None:
        return None
    percent = float(share[1])
    if not 0 < percent <= 100:
        raise ConfigError(f"--{flag}: {text!r} is not a share of memory: write a number above 0 and up to 100 with %")
    return percent


Switch = Literal["off", "on"]

N = TypeVar("N", int, float)


def option(default: Any, help_text: str, metavar: str = "", letter: str = "") -> Any:
    """A field that is also a flag. metavar: what help calls its value; default: by its type. letter: of a second, short flag."""
    return field(default=default, metadata={"help": help_text, "metavar": metavar, "letter": letter})


def require(holds: bool, flag: str, rule: str, value: object) -> None:
    """Raises ConfigError, which names the flag and the rule, unless the rule holds. flag: it, or its field."""
    if not holds:
        raise ConfigError(f"{flag_of(flag)} must be {rule}; it is {value!r}")


def require_at_least(config: Any, **least: float) -> None:
    """Raises ConfigError, which names the flag, unless each of these fields is at least this."""
    for name, limit in least.items():
        value = vars(config)[name]
        require(value >= limit, name, f"at least {limit:g}" if limit else "0 or more", value)


def require_between(config: Any, least: float, most: float, *names: str) -> None:
    """Raises ConfigError, which names the flag, unless each of these fields is from least to most."""
    for name in names:
        require(least <= vars(config)[name] <= most, name, f"between {least:g} and {most:g}", vars(config)[name])


def require_above_0(config: Any, *names: str) -> None:
    """Raises ConfigError, which names the flag, unless each of these fields is above 0."""
    for name in names:
        require(vars(config)[name] > 0, name, "above 0", vars(config)[name])


def refuse_without_effect(config: Any, names: Iterable[str], why: str) -> None:
    """Raises ConfigError when one of these fields, which would change nothing, does not have its default."""
    for name in names:
        if getattr(config, name) != type(config).__dataclass_fields__[name].default:
            raise ConfigError(f"{flag_of(name)} has no effect {why}: leave it out")


def require_choices(config: Any) -> None:
    """Raise ConfigError unless every field whose type is a Literal holds one of its values."""
    types = get_type_hints(type(config))
    for known in fields(config):
        if get_origin(types[known.name]) is Literal:
            choices, value = get_args(types[known.name]), getattr(config, known.name)
            require(value in choices, known.name, " or ".join(choices), value)


def parse_numbers(
    text: str, flag: str, kind: Callable[[str], N], rule: str = "numbers with commas between them"
) -> tuple[N, ...]:
    """The numbers of "1,32,1024", as they stand there. kind: int or float. Raises ConfigError, which names the flag and the
    rule."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--{flag} must be {rule}; it is {text!r}") from None


class ConfigClass(Protocol):
    """A frozen dataclass whose fields were made with `common.options.option`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


C = TypeVar("C", bound=ConfigClass)


def flag_of(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, *configs: type[ConfigClass], without: Sequence[str] = ()) -> None:
    """A flag for each field of the configs, but those in `without`. A field that two of them have is one flag for both."""
    seen = set(without)
    for config in configs:
        group = parser.add_argument_group((config.__doc__ or config.__name__).strip().splitlines()[0].rstrip("."))
        types = get_type_hints(config)
        for each in dataclasses.fields(config):
            if each.name not in seen:
                seen.add(each.name)
                _add_flag(group, each, types[each.name])


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], annotation: Any) -> None:
    """Raises TypeError for an annotation that no flag can be made of."""
    explanation = str(field.metadata["help"]).replace("%", "%%")
    help_text = f"{explanation} (default: {field.default})" if field.default not in ("", ()) else explanation
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        switch: dict[str, Any] = (
            {"nargs": "?", "const": "on"} if set(get_args(Switch)) <= set(choices) else {}
        )  # the bare flag: on
        group.add_argument(flag_of(field.name), default=field.default, choices=choices, help=help_text, **switch)
    elif annotation == tuple[str, ...]:
        default: Any = field.default
        # A list, to which each time that the flag is given adds.
        group.add_argument(flag_of(field.name), default=[*default], nargs="+", action="extend", metavar="TEXT", help=help_text)
    elif annotation in (str, int, float):
        metavar = field.metadata["metavar"] or {str: "TEXT", int: "N", float: "X"}[annotation]
        flags = [flag_of(field.name), *(f"-{letter}" for letter in field.metadata["letter"])]
        group.add_argument(*flags, default=field.default, type=annotation, metavar=metavar, help=help_text)
    else:
        raise TypeError(f"{field.name}: no flag can be made of {annotation}")


def read_config(config: type[C], flags: argparse.Namespace, **values: object) -> C:
    """A config from parsed flags. values: fields that were decided otherwise; they win. The rest keeps its default.

    Raises ConfigError.
    """
    given = vars(flags)
    fields = [field.name for field in dataclasses.fields(config)]
    read = {name: tuple(given[name]) if isinstance(given[name], list) else given[name] for name in fields if name in given}
    return config(**read | values)


def with_defaults(config: C, defaults: Mapping[str, object]) -> C:
    """The config with these values in the fields that have their default."""
    left = {field.name for field in dataclasses.fields(config) if vars(config)[field.name] == field.default}
    return dataclasses.replace(config, **{name: value for name, value in defaults.items() if name in left})


def to_flags(*configs: ConfigClass, without: Sequence[str] = ()) -> list[str]:
    """The command line that makes these configs: what differs from its default, once, but for the fields in `without`."""
    line: dict[str, list[str]] = {}
    for config in configs:
        for each in dataclasses.fields(config):
            value = vars(config)[each.name]
            if value != each.default and each.name not in without:
                flag = flag_of(each.name)
                line[flag] = [flag, *value] if isinstance(value, tuple) else [f"{flag}={value}"]
    return [part for parts in line.values() for part in parts]
