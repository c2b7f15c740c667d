"""What the commands of `launch` have in common: how one is made, and which keys it reads before it starts anything.

Owns no command. Imports nothing heavy.
"""

import argparse
from collections.abc import Callable
from typing import Any

from common.access import read_access, require_guarded
from common.addresses import bind_address, check_address
from common.config import AccessConfig, SecurityConfig
from common.flags import read_config
from common.trust import Trust, read_trust

Command = Callable[[argparse.Namespace], int]


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
