"""What the reports of all instruments share: the machine, figures with their spread, goals, tables, and where a report goes.

Owns how a report looks, for a terminal or in Markdown, and the questions to the system. Does not know what was measured.
"""

import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import msgspec

from common import version_of
from common.host import core_count

LIBRARIES = (
    "nixl",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "torch",
    "triton",
    "flashinfer-python",
    "transformers",
    "numpy",
)
QUIET_LOAD = 0.5
BUSY = "The machine had other work, which affects all speeds, times and ratios, even where a goal is met."
_VERDICTS = {True: "met", False: "not met", None: "not measured"}


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that a measurement ran on, its libraries and the date."""

    cpu: str
    cores: int
    """The cores that this process may run on."""
    memory_bytes: int
    kernel: str
    python: str
    libraries: dict[str, str]
    """The version of each that is installed. That of torch names the version of CUDA."""
    load: float
    """The machine's load over the last minute, when measuring began."""
    date: str
    gpus: tuple[str, ...] = ()
    """The name of each, its driver, and the highest clocks of its processors and its memory."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Several values of one figure, such as those of the rounds."""

    least: float
    median: float
    p90: float
    """What nine of ten values do not exceed."""
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
        return cls(least=ordered[0], median=statistics.median(ordered), p90=p90, most=ordered[-1])

    def text(self, form: str, scale: float = 1.0) -> str:
        """The median in this format, and between which values it lies where there are several."""
        least, median, most = (format(scale * value, form) for value in (self.least, self.median, self.most))
        return median if self.least == self.most else f"{median} ({least} … {most})"


def spread_of(values: Iterable[float]) -> Spread | None:
    """None without values."""
    known = list(values)
    return Spread.of(known) if known else None


def ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread | None:
    """ours / theirs, round by round, so that what changes about the machine between rounds cancels out. A round with nothing to
    divide by is left out."""
    return spread_of(value / theirs[number] for number, value in ours.items() if theirs.get(number, 0.0) > 0)


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that a measurement should keep, and the figure that says whether it does."""

    rule: str
    met: bool | None
    """None when it was not measured."""
    figure: str

    @classmethod
    def of(
        cls, rule: str, value: float | None, form: str, *, least: float = -math.inf, most: float = math.inf, unit: str = ""
    ) -> "Goal":
        """The figure must not be below `least`, nor above `most`. value: None when it was not measured."""
        if value is None:
            return cls(rule=rule, met=None, figure="not measured")
        return cls(rule=rule, met=least <= value <= most, figure=f"{value:{form}}{unit}")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known at the end of a measurement."""

    command: str
    """The command that repeats it."""
    hardware: Hardware


class BenchOutcome(Outcome, frozen=True, kw_only=True):
    """That of a benchmark, which has goals."""

    goals: list[Goal]


@dataclass(frozen=True, slots=True)
class Column:
    """How a table shows a figure; it annotates the figure's field."""

    head: str
    form: str = ""
    scale: float = 1
    """What the figure is multiplied by."""

    def cell(self, value: Any) -> str:
        """Empty where nothing was measured."""
        if isinstance(value, Spread):
            return value.text(self.form, self.scale)
        return "" if value is None else format(value if self.scale == 1 else value * self.scale, self.form)


def table_of(kind: type[msgspec.Struct], figures: Iterable[msgspec.Struct]) -> list[tuple[str, ...]]:
    """A line for each, below the heads of the fields that have a column."""
    hints = get_type_hints(kind, include_extras=True)
    columns: dict[str, Column] = {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}
    rows = map(msgspec.structs.asdict, figures)
    cells = [tuple(column.cell(row[name]) for name, column in columns.items()) for row in rows]
    return [tuple(column.head for column in columns.values()), *cells]


def this_hardware() -> Hardware:
    return Hardware(
        cpu=_cpu_model(),
        cores=core_count(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        libraries={name: version for name in LIBRARIES if (version := version_of(name))},
        load=os.getloadavg()[0],
        date=time.strftime("%Y-%m-%d"),
        gpus=_gpus(),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gpus() -> tuple[str, ...]:
    """The GPUs as NVIDIA's tool names them, which makes no context on them. Empty where the tool is not."""
    command = ("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader")
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(listed.splitlines())


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head."""
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest))


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def machine_line(hardware: Hardware, settings: str) -> str:
    """The date, the machine and its software. settings: what else to know of the run."""
    libraries = ", ".join(f"{name} {version}" for name, version in hardware.libraries.items())
    gpus = "".join(f"{count} × {gpu}, " for gpu, count in Counter(hardware.gpus).items())
    return (
        f"{hardware.date}: {gpus}{hardware.cores} cores of {hardware.cpu}, {hardware.memory_bytes / 2**30:.0f} GiB, "
        f"Linux {hardware.kernel}, Python {hardware.python}, {libraries}; load {hardware.load:.1f} at the start, {settings}."
    )


def cautions(hardware: Hardware, steady: str = "") -> list[str]:
    """What to say of figures from a machine that had other work."""
    return [f"{BUSY} {steady}".rstrip()] if hardware.load > QUIET_LOAD else []


def write_figures(figures: object, json: str) -> None:
    """json: the file that gets them; empty for none."""
    if json:
        Path(json).write_bytes(msgspec.json.format(msgspec.json.encode(figures)))


@dataclass(frozen=True, slots=True)
class ReportStyle:
    """How a report looks: for a terminal, or in Markdown as a section for docs/measurements, with the command."""

    is_markdown: bool

    def table(self, lines: Sequence[Sequence[str]]) -> str:
        """The first line is the head."""
        return markdown_table(lines) if self.is_markdown else text_table(lines)

    def section(self, title: str, lines: Sequence[Sequence[str]]) -> list[str]:
        """A table with its title."""
        return [f"### {title}" if self.is_markdown else f"{title}:", self.table(lines)]

    def text(self, command: str, parts: Sequence[str]) -> str:
        """parts: paragraphs and tables."""
        return "\n\n".join([f"```sh\n{command}\n```", *parts]) if self.is_markdown else "\n".join(parts)

    def report(self, outcome: BenchOutcome, settings: str, steady: str, body: Sequence[str]) -> str:
        """settings: what to know besides the machine. steady: which figures other work affects least."""
        machine, warning = machine_line(outcome.hardware, settings), cautions(outcome.hardware, steady)
        judged = [(goal.rule, _VERDICTS[goal.met], goal.figure) for goal in outcome.goals]
        if self.is_markdown:
            goals = [markdown_table([("goal", "", "measured"), *judged])] if judged else []
            return self.text(outcome.command, [machine, *warning, *goals, *body])
        goals = [f"{verdict:>12}: {rule}: {figure}" for rule, verdict, figure in judged]
        return self.text(outcome.command, [machine, *body, *goals, *warning])


def say(line: str) -> None:
    """Report progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
