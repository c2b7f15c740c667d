"""Flags, made from the fields of the config classes: one field, one flag, one help text.

Owns the translation in both directions. Knows dataclasses and argparse; does not know what a flag means.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from common.options import Switch


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
        for field in dataclasses.fields(config):
            if field.name not in seen:
                seen.add(field.name)
                _add_flag(group, field, types[field.name])


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
        metavar = {str: "TEXT", int: "N", float: "X"}[annotation]
        group.add_argument(flag_of(field.name), default=field.default, type=annotation, metavar=metavar, help=help_text)
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
        for field in dataclasses.fields(config):
            value = vars(config)[field.name]
            if value != field.default and field.name not in without:
                flag = flag_of(field.name)
                line[flag] = [flag, *value] if isinstance(value, tuple) else [f"{flag}={value}"]
    return [part for parts in line.values() for part in parts]
