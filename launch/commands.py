"""What the commands of `launch` have in common: how one is made, how it refuses a wrong flag, and which keys it reads before it
starts anything.

Owns no command. Imports nothing heavy.
"""

import argparse
import difflib
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from common.access import read_access, require_guarded
from common.addresses import bind_address, check_address
from common.config import AccessConfig, SecurityConfig
from common.flags import read_config
from common.trust import Trust, read_trust
from launch.reports import BAD_FLAG

Command = Callable[[argparse.Namespace], int]


class CommandParser(argparse.ArgumentParser):
    """Refuses a wrong command line with one line, which names the nearest right word, and status BAD_FLAG."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_FLAG, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """What is not known is refused here, by the parser of the command that was given, and not by the outermost one."""
        read, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            named = flags[0] if flags else unknown[0]
            what = "is not a flag of this command" if flags else "follows no flag that takes it"
            self.error(f"{named} {what}{_nearest(named, self._option_string_actions)}")
        return read, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = _nearest(str(value), choices)
            raise argparse.ArgumentError(action, f"must be one of {', '.join(choices)}; it is {value!r}{near}")


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


class ShowVersion(argparse.Action):
    """Looks the version up when it is asked for: that takes longer than all other flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            shown = version("tandem-serve")
        except PackageNotFoundError:  # a checkout that is not installed
            shown = "of a checkout that is not installed"
        print(f"{parser.prog} (tandem-serve) {shown}")
        parser.exit()


def add_command(commands: Any, name: str, explanation: str, command: Command, life: str = "") -> argparse.ArgumentParser:
    """explanation: what the command does. life: what happens after the start, and how it ends."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=explanation, description=f"{explanation[0].upper()}{explanation[1:]}. {life}".rstrip(), allow_abbrev=False
    )
    parser.set_defaults(command=command, prog=parser.prog)
    return parser


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


def where_launch_is(message: str) -> str:
    """What to add to a message that says to run `launch`, where a shell would not find it; "" when it would."""
    ours = Path(sys.executable).with_name("launch")
    if "`launch " not in message or shutil.which("launch") is not None or not ours.exists():
        return ""
    return f" (`launch` is not on PATH: it is {ours}; or run `source {ours.with_name('activate')}` once in each shell)"
