"""What config classes are made of: frozen dataclasses whose fields are options, and rules that their values keep.

Flags are made from these fields (`common/flags.py`): one field, one flag, one help text. A value that breaks a rule is refused
by its flag on construction, so no config holds one. Does not know which configs there are.
"""

from collections.abc import Callable, Iterable
from dataclasses import field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from common.errors import ConfigError

Switch = Literal["off", "on"]

N = TypeVar("N", int, float)


def option(default: Any, help_text: str) -> Any:
    """A field that is also a flag."""
    return field(default=default, metadata={"help": help_text})


def require(holds: bool, flag: str, rule: str, value: object) -> None:
    """Raises ConfigError, which names the flag and the rule, unless the rule holds."""
    if not holds:
        raise ConfigError(f"--{flag} must be {rule}; it is {value!r}")


def require_at_least(config: Any, **least: float) -> None:
    """Raises ConfigError, which names the flag, unless each of these fields is at least this."""
    for name, limit in least.items():
        require(
            vars(config)[name] >= limit, _flag_name(name), f"at least {limit:g}" if limit else "0 or more", vars(config)[name]
        )


def require_between(config: Any, least: float, most: float, *names: str) -> None:
    """Raises ConfigError, which names the flag, unless each of these fields is from least to most."""
    for name in names:
        require(least <= vars(config)[name] <= most, _flag_name(name), f"between {least:g} and {most:g}", vars(config)[name])


def require_above_0(config: Any, *names: str) -> None:
    """Raises ConfigError, which names the flag, unless each of these fields is above 0."""
    for name in names:
        require(vars(config)[name] > 0, _flag_name(name), "above 0", vars(config)[name])


def refuse_without_effect(config: Any, names: Iterable[str], why: str) -> None:
    """Raises ConfigError when one of these fields, which would change nothing, does not have its default."""
    for name in names:
        if getattr(config, name) != type(config).__dataclass_fields__[name].default:
            raise ConfigError(f"--{_flag_name(name)} has no effect {why}: leave it out")


def require_choices(config: Any) -> None:
    """Raise ConfigError unless every field whose type is a Literal holds one of its values."""
    types = get_type_hints(type(config))
    for known in fields(config):
        if get_origin(types[known.name]) is Literal:
            choices, value = get_args(types[known.name]), getattr(config, known.name)
            require(value in choices, _flag_name(known.name), " or ".join(choices), value)


def parse_numbers(text: str, flag: str, kind: Callable[[str], N]) -> tuple[N, ...]:
    """The numbers of "1,32,1024", as they stand there. kind: int or float. Raises ConfigError, which names the flag."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--{flag} must be numbers with commas between them; it is {text!r}") from None


def _flag_name(field_name: str) -> str:
    return field_name.replace("_", "-")
