"""What the commands of `launch` have in common: how one is made, how it refuses a wrong flag, and which keys it reads before it
starts anything.

Owns no command. Imports nothing heavy.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from common import own_version
from common.access import Trust, read_access, read_trust, require_guarded
from common.addresses import bind_address, check_address
from common.config import AccessConfig, SecurityConfig
from common.options import ConfigClass, add_flags, read_config, to_flags
from launch.child import BAD_FLAG
from launch.suggestions import COMMANDS_OF_OTHERS, suggest

SWITCHES = {
    "--quick": "take less than a minute, to show that everything works: flags that are not given get small values",
    "--markdown": "print the report as Markdown, with the command and the machine",
}

CONFIG_HELP = "file (TOML) with values for flags that neither the command line nor a TANDEM_ variable gives (see launch config)"


@dataclass(frozen=True)
class Command:
    """A command of `launch`."""

    name: str
    explanation: str
    """What the command does."""
    run: Callable[[argparse.Namespace], int]
    """Returns the exit status."""
    configs: tuple[type[ConfigClass], ...] = ()
    """The configs whose fields are its flags."""
    without: tuple[str, ...] = ()
    """Fields of them that are no flags: the command decides them."""
    switches: tuple[str, ...] = ()
    """Which of SWITCHES it has."""
    life: str = ""
    """What happens after the start, and how it ends."""
    roles: tuple[str, ...] = ()
    """The processes that it starts, whose tables in a file hold for them."""

    def add_to(self, commands: Any) -> argparse.ArgumentParser:
        """commands: the subparsers of the console script."""
        description = f"{self.explanation[0].upper()}{self.explanation[1:]}. {self.life}".rstrip()
        parser: argparse.ArgumentParser = commands.add_parser(
            self.name, help=self.explanation, description=description, allow_abbrev=False
        )
        self.set_up(parser)
        if self.configs:
            parser.add_argument("--config", default="", metavar="FILE", help=CONFIG_HELP)
            parser.set_defaults(parser=parser, roles=self.roles)
        return parser

    def set_up(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser this command and its flags."""
        parser.set_defaults(command=self.run, prog=parser.prog)
        add_flags(parser, *self.configs, without=self.without)
        for switch in self.switches:
            parser.add_argument(switch, action="store_true", help=SWITCHES[switch])


class CommandParser(argparse.ArgumentParser):
    """Refuses a wrong command line with one line, which names the nearest right word, and status BAD_FLAG."""

    passes_on = False
    """All that is behind the command is in `rest`, for a program that has flags of its own."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_FLAG, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """What is not known is refused here, by the parser of the command that was given, and not by the outermost one."""
        if self.passes_on:
            return argparse.Namespace(**self._defaults, rest=list(args or ())), []
        settable = self.settable
        blank = argparse.Namespace(**dict.fromkeys(settable))  # a flag that is not given stays None, and a list begins empty
        read, unknown = super().parse_known_args(args, namespace or blank)
        if settable:
            read.given = [name for name in settable if vars(read)[name] is not None]
            for name in settable.keys() - read.given:
                setattr(read, name, settable[name].default)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            if flags:
                self.error(f"{flags[0]} is not a flag of this command{suggest(flags[0], self._option_string_actions)}")
            is_model = "--model" in self._option_string_actions
            self.error(f"unexpected argument {unknown[0]}{f'; did you mean --model {unknown[0]}?' if is_model else ''}")
        return read, unknown

    @property
    def settable(self) -> dict[str, argparse.Action]:
        """The flags of this command that may be given elsewhere, by their fields."""
        actions = self._actions if self.get_default("parser") is self else ()
        return {each.dest: each for each in actions if each.dest != "help"}

    def value_of(self, action: argparse.Action, word: str) -> object:
        """What a flag makes of a word that was given elsewhere. Raises argparse.ArgumentError."""
        if action.nargs == 0:  # a switch that takes no word on the command line
            if word not in ("on", "off"):
                raise argparse.ArgumentError(action, f"must be on or off; it is {word!r}")
            return word == "on"
        value: object = self._get_value(action, word)
        self._check_value(action, value)
        return value

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            if "local" in choices and value in COMMANDS_OF_OTHERS:
                self.error(f"there is no command {value}; did you mean launch {COMMANDS_OF_OTHERS[value]}?")
            near = suggest(str(value), choices)
            raise argparse.ArgumentError(action, f"must be one of {', '.join(choices)}; it is {value!r}{near}")


class ShowVersion(argparse.Action):
    """Looks the version up when it is asked for: that takes longer than all other flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"{parser.prog} (tandem-serve) {own_version()}")
        parser.exit()


def read_security(flags: argparse.Namespace) -> tuple[SecurityConfig, Trust]:
    """Raises ConfigError, before anything is started, when the key cannot be used or an address needs one."""
    config = read_config(SecurityConfig, flags)
    trust = read_trust(config)
    if "host" in flags:
        trust.check(f"tcp://{bind_address(flags.host, '--host')}:0")
    if "router" in flags:
        for address in flags.router.split(","):
            trust.check(check_address(address.strip()))
    return config, trust


def read_guarded_access(flags: argparse.Namespace, security: SecurityConfig) -> AccessConfig:
    """Raises ConfigError, before anything is started, when a file cannot be used or HTTP would be open to everybody."""
    config = read_config(AccessConfig, flags)
    read_access(config)
    address = f"tcp://{bind_address(flags.host, '--host')}:0"
    require_guarded(config, address, insecure=security.insecure == "on")
    return config


def command_line(flags: argparse.Namespace, *configs: ConfigClass, without: Sequence[str] = ()) -> str:
    """The command line that was given, so that a reader can repeat it. without: fields that are no flags of the command."""
    given = [switch for switch in SWITCHES if vars(flags).get(switch.strip("-"))]
    return f"{flags.prog} {shlex.join([*given, *to_flags(*configs, without=without)])}".rstrip()


def where_launch_is(message: str) -> str:
    """What to add to a message that says to run `launch`, where a shell would not find it; "" when it would."""
    ours = Path(sys.executable).with_name("launch")
    if "`launch " not in message or shutil.which("launch") is not None or not ours.exists():
        return ""
    return f" (`launch` is not on PATH: it is {ours}; or run `source {ours.with_name('activate')}` once in each shell)"
