"""Tables and lines that every report of a measurement shares: for a terminal, or in Markdown.

Owns how they look. Knows the machine and the goals, but not what was measured.
"""

from collections.abc import Sequence

from bench.figures import Goal
from bench.hardware import Hardware

QUIET_LOAD = 0.5
BUSY = "The machine had other work, which affects all speeds, times and ratios, even where a goal is met."
_VERDICTS = {True: "met", False: "not met", None: "not measured"}


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head."""
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest))


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def machine_line(hardware: Hardware, rest: str) -> str:
    """The machine that it was measured on. rest: other settings."""
    libraries = ", ".join(f"{name} {version}" for name, version in hardware.libraries.items())
    return (
        f"{hardware.date}: {hardware.cores} cores of {hardware.cpu}, {hardware.memory_bytes / 2**30:.0f} GiB, "
        f"Linux {hardware.kernel}, Python {hardware.python}, {libraries}; load {hardware.load:.1f} at the start, {rest}."
    )


def cautions(hardware: Hardware, rest: str) -> list[str]:
    """A warning when the machine was busy. rest: which figures are affected least."""
    return [f"{BUSY} {rest}"] if hardware.load > QUIET_LOAD else []


def markdown_goals(goals: Sequence[Goal]) -> str:
    return markdown_table([("goal", "", "measured"), *((goal.rule, _VERDICTS[goal.met], goal.figure) for goal in goals)])


def text_goals(goals: Sequence[Goal]) -> list[str]:
    return [f"{_VERDICTS[goal.met]:>12}: {goal.rule}: {goal.figure}" for goal in goals]
