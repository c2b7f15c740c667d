"""Commands of `launch` as deployments write them: read by the real parser, and checked by the real config classes.

Owns the reading, and the stub of `launch` that notes how it was called.
"""

import argparse
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config import AccessConfig, EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig, SecurityConfig
from common.options import ConfigClass, read_config
from launch.main import build_parser


@dataclass(frozen=True)
class Command:
    """A command that starts a router or an instance. Its flags are flags of the role."""

    role: str
    flags: argparse.Namespace

    @property
    def router(self) -> RouterConfig:
        return read_config(RouterConfig, self.flags)

    @property
    def instance(self) -> InstanceConfig:
        return read_config(InstanceConfig, self.flags)


def read_command(words: Sequence[str]) -> Command:
    """Raises SystemExit for a flag that the role does not have, and ConfigError for a value that it does not take."""
    flags = build_parser().parse_args(words)
    own: tuple[type[ConfigClass], ...] = (RouterConfig, AccessConfig) if words[0] == "router" else (InstanceConfig, EngineConfig)
    for config in (ModelConfig, LogConfig, SecurityConfig, *own):
        read_config(config, flags)
    return Command(words[0], flags)


def write_program(path: Path, body: str) -> None:
    """A bash script that can be run."""
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def note_call(folder: Path) -> str:
    """For a script: write a line with its words, and tabs between them."""
    return f'(IFS="$(printf "\\t")"; echo "$*" >> {folder}/calls)'


def calls_of(folder: Path) -> list[list[str]]:
    return [line.split("\t") for line in (folder / "calls").read_text().splitlines()]
