"""What the instruments share: how one is started, as `python -m benchmarks.NAME`, how its report is published, and what other
processes use of this machine.

Owns the flags that each instrument has beside its own. Knows no instrument.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.report import BenchOutcome, Goal, ReportStyle, this_hardware, write_figures
from common.errors import ConfigError
from common.options import C, ConfigClass, option, read_config, require, with_defaults
from launch.child import BAD_FLAG
from launch.commands import SWITCHES, Command, CommandParser, command_line

PROGRAMS = {"engine": "launch bench engine", "scorecard": "python -m tests.soak.scorecard"}
"""How those are started that are elsewhere than the others."""


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Where figures go beside the report."""

    json: str = option("", "write every figure to this file")


class Invocation:
    """The command line of an instrument that was started."""

    def __init__(self, flags: argparse.Namespace, configs: Sequence[type[ConfigClass]]) -> None:
        """Raises ConfigError for a value that no config takes."""
        self._flags, self.hardware = flags, this_hardware()
        for name, file in (("json", flags.json), ("page", vars(flags).get("page", ""))):  # before minutes are spent
            require(not file or Path(file).absolute().parent.is_dir(), name, "a file in a folder that exists", file)
        self.is_quick, self.style = bool(flags.quick), ReportStyle(flags.markdown)
        self.command = command_line(flags, *(read_config(config, flags) for config in configs))
        """Repeats the measurement."""

    def config(self, config: type[C], quick: Mapping[str, object]) -> C:
        """The config that the flags make. quick: what takes the place of its defaults with --quick."""
        return with_defaults(read_config(config, self._flags), quick if self.is_quick else {})

    def publish(
        self,
        settings: str,
        steady: str,
        body: Sequence[str],
        goals: Iterable[Goal] = (),
        page: tuple[str, Sequence[str]] = ("", ()),
        **figures: object,
    ) -> None:
        """Print the report, and write the files.

        settings: what to know besides the machine. steady: which figures other work affects least. body: paragraphs and tables.
        page: a file for the report in Markdown, empty for none, and the same body in Markdown. figures: what the file has besides
        the command, the machine and the goals.
        """
        outcome = BenchOutcome(command=self.command, hardware=self.hardware, goals=list(goals))
        print(self.style.report(outcome, settings, steady, body))
        write_figures(msgspec.structs.asdict(outcome) | figures, read_config(PublishOptions, self._flags).json)
        if page[0]:
            Path(page[0]).write_text(ReportStyle(True).report(outcome, settings, steady, page[1]) + "\n")


def start(
    name: str,
    explanation: str,
    run: Callable[[Invocation], int],
    *configs: type[ConfigClass],
    without: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
) -> int:
    """Run an instrument. Returns the exit status: 2 for a bad flag, which is named on stderr.

    without: fields of the configs that are no flags. arguments: those of this process unless given.
    """
    program, published = PROGRAMS.get(name, f"python -m benchmarks.{name}"), (*configs, PublishOptions)
    parser = CommandParser(prog=program, description=explanation, allow_abbrev=False)
    command = Command(name, "", lambda flags: run(Invocation(flags, published)), published, tuple(without), tuple(SWITCHES))
    command.set_up(parser)
    flags = parser.parse_args(arguments)
    try:
        status: int = flags.command(flags)
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return BAD_FLAG
    return status


# --- what other processes use, as the kernel tells it --------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """The CPU time of a process so far: of all its threads, in user and system mode, without its children."""
    # The clock of another process, as https://man7.org/linux/man-pages/man3/clock_getcpuclockid.3.html makes its id.
    return time.clock_gettime((~pid << 3) | 2)


def resident_mb(pid: int) -> float:
    """The resident memory of a process, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def below(pid: int) -> Iterator[int]:
    """The process and all that it started, directly or not."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from below(int(child))


def command_of(pid: int) -> list[str]:
    """How it was started."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
