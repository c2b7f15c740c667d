"""What holds for a command of `launch`, and where each value comes from: its command line, TANDEM_ variables, or a TOML file.

Owns the order of precedence, and how variables and files spell flags. Knows no flag: the parsers of the commands have them.
Refuses names and types; whether a value makes sense is left to the configs.

    command line  >  environment  >  [command] of the file  >  [role] of the file  >  top of the file  >  default
"""

import argparse
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.errors import ConfigError
from common.processes.child import KILLED_WITH, ORDER_FD, REPORT_FD
from launch.commands import CommandParser
from launch.suggestions import suggest

PREFIX = "TANDEM_"
COMMAND_LINE, DEFAULT = "the command line", "default"
_SWITCHED = {"true": "on", "false": "off"}
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {int: ((int,), "a whole number"), float: ((int, float), "a number")}
"""Types that a value in a file may have, by the type of its flag, and their name. Others are texts."""
_SECRET = ("header", "extra_body")
"""Flags whose values are not shown. Keys are in files, whose paths are."""


def environment_of_process() -> Mapping[str, str]:
    """The environment, or nothing in a child process: its command line has all that holds, as whoever started it has decided."""
    return {} if ORDER_FD in os.environ else os.environ


def settle(parser: argparse.ArgumentParser, flags: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Give each flag that was not on the command line what the environment or the file says.

    flags: as `parser`, that of the console script, has read them. They get `origins`, which says where each value comes from that
    is no default, and `of_roles`: what the file says of each role whose processes the command starts. Raises ConfigError.
    """
    flags.origins, flags.of_roles = {}, {}
    commands = dict(_commands(parser))
    variables = _variables(commands, environment)
    if "parser" not in flags:
        return
    settable = flags.parser.settable
    origins = flags.origins = dict.fromkeys(flags.given, COMMAND_LINE)

    def fill(values: Mapping[str, object], origin: str) -> None:
        new = {name: value for name, value in values.items() if name in settable and name not in origins}
        vars(flags).update(new)
        origins.update(dict.fromkeys(new, origin))

    for name, variable in variables.items():
        if name in settable:
            fill({name: _value(flags.parser, name, environment[variable], variable)}, variable)
    if flags.config:
        tables, command = _read_file(flags.config, commands), flags.prog.partition(" ")[2].replace(" ", ".")
        fill(tables.get(command, {}), f"{flags.config} [{command}]")
        for role in flags.roles:
            said = tables.get(role, {})
            flags.of_roles[role] = {name: said[name] for name in said if name in settable and name not in origins}
        fill(tables[""], flags.config)


def with_origins(message: str, flags: argparse.Namespace) -> str:
    """The message, and for each flag in it that a variable or a file has given, where that is."""
    named = dict.fromkeys(flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z0-9-]*)", message))
    given = {name: flags.origins[name] for name in named if flags.origins.get(name, COMMAND_LINE) != COMMAND_LINE}
    where = ", ".join(f"--{name.replace('_', '-')} is from {origin}" for name, origin in given.items())
    return f"{message} ({where})" if where else message


def describe(parser: argparse.ArgumentParser, words: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Lines that say what holds for the command of these words; without words, what is given for every command. Raises
    ConfigError."""
    for line in [words] if words else [name.split(".") for name, _ in _commands(parser)]:
        flags = parser.parse_args(line)
        settle(parser, flags, environment)
        if "parser" not in flags:
            raise ConfigError(f"{flags.prog} has no flags that a file or a variable can give")
        rows = [(name, vars(flags)[name], flags.origins.get(name, DEFAULT)) for name in flags.parser.settable if name != "config"]
        for role, values in flags.of_roles.items():
            rows += [(name, value, f"{flags.config} [{role}], for this role") for name, value in values.items()]
        if shown := [row for row in rows if words or row[2] != DEFAULT]:
            yield flags.prog
            yield from (f"  --{name.replace('_', '-'):<28} {_shown(name, value):<28} {origin}" for name, value, origin in shown)


def _shown(name: str, value: object) -> str:
    texts = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    return "(not shown)" if name in _SECRET and any(texts) else shlex.join(texts)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, CommandParser]]:
    """Every command whose flags may be given elsewhere, by its words with dots between them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from ((f"{name}.{words}".rstrip("."), each) for words, each in _commands(inner))
    if isinstance(parser, CommandParser) and parser.get_default("parser") is parser:
        yield "", parser


# --- the environment ---------------------------------------------------------------------------------------------------------


def _variables(commands: Mapping[str, CommandParser], environment: Mapping[str, str]) -> dict[str, str]:
    """The names of those that are set, by their flags' fields. Raises ConfigError for a name that is no flag's."""
    known = {f"{PREFIX}{name.upper()}": name for command in commands.values() for name in command.settable}
    given = [name for name in environment if name.startswith(PREFIX) and name not in (ORDER_FD, REPORT_FD, KILLED_WITH)]
    for name in given:  # beside these are others, in any order
        if name.endswith("SERVICE_HOST"):
            raise ConfigError(f"{name} is from Kubernetes, for a Service of that name: give the pod enableServiceLinks: false")
    for name in given:
        if name not in known:
            raise ConfigError(f"{name} is set, which is the variable of no flag{suggest(name, known)}")
    return {known[name]: name for name in given}


# --- the file ----------------------------------------------------------------------------------------------------------------


def _read_file(file: str, commands: Mapping[str, CommandParser]) -> dict[str, dict[str, object]]:
    """The values of each table, by their flags' fields; "": those at the top. Everything in it is checked, for whichever command
    it is. Raises ConfigError."""
    try:
        with open(file, "rb") as stream:
            tables = [*_tables(tomllib.load(stream), "")]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {file} cannot be read: {error}") from error
    read: dict[str, dict[str, object]] = {}
    for table, keys in tables:
        where = f"{file} [{table}]" if table else file
        if table and table not in commands:
            flags = {name for taker in commands.values() for name in taker.settable}
            if table.rpartition(".")[2].replace("-", "_") in flags:
                raise ConfigError(f"{where} is a flag: it must be a text in quotes, not a table")
            raise ConfigError(f"{where} is no command of launch{suggest(table, commands)}")
        takers = [commands[table]] if table else [*commands.values()]
        known = {name: taker for taker in takers for name in taker.settable if name != "config"}
        read[table] = {}
        for key, value in keys.items():
            name = key.replace("-", "_")
            if name not in known:
                raise ConfigError(f"{where}: {key} is not a flag of {'this' if table else 'any'} command{suggest(name, known)}")
            if name in read[table]:
                raise ConfigError(f"{where}: {key} is there twice, with - and with _")
            read[table][name] = _value(known[name], name, _spelled(known[name].settable[name], key, value, where), where)
    return read


def _tables(written: Mapping[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each table and its keys. One that only holds others is none."""
    keys = {key: value for key, value in written.items() if not isinstance(value, dict)}
    if keys or not path or not written:
        yield path, keys
    for name in written:
        if name not in keys:
            yield from _tables(written[name], f"{path}.{name}".lstrip("."))


def _spelled(action: argparse.Action, key: str, value: object, where: str) -> list[str]:
    """The words that the flag would have on a command line. Raises ConfigError for a value of another type."""
    kinds, named = _KINDS.get(action.type, ((str,), "a text in quotes"))
    if _is_switch(action):
        kinds, named = (bool, str), "true or false"
    if action.nargs == "+":
        kinds, named = (list,), "a list of texts in quotes"
    texts = value if isinstance(value, list) else [value]
    if type(value) not in kinds or (action.nargs == "+" and not all(isinstance(text, str) for text in texts)):
        shown = "" if action.dest in _SECRET else f"; it is {value!r}"
        raise ConfigError(f"{where}: {key} must be {named}{shown}")
    return [str(text).lower() if isinstance(text, bool) else str(text) for text in texts]


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0 or "on" in (action.choices or ())


def _value(parser: CommandParser, name: str, given: str | list[str], where: str) -> object:
    """What the flag makes of the text of a variable, or of the words of a file. Raises ConfigError."""
    action = parser.settable[name]
    is_list = action.nargs == "+"
    try:
        words = given if isinstance(given, list) else shlex.split(given) if is_list else [given]
        values = [parser.value_of(action, _SWITCHED.get(word, word) if _is_switch(action) else word) for word in words]
    except (argparse.ArgumentError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None
    return values if is_list else values[0]
