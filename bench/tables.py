"""What the reports of all benchmarks share: tables, the machine, the goals, and where a report goes.

Owns how they look, for a terminal or in Markdown. Does not know what was measured.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.figures import Outcome
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


def bytes_text(number: int) -> str:
    """65536 as 64 KiB; the number itself where it is no whole number of KiB."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if number % size == 0:
            return f"{number // size} {unit}"
    return str(number)


def text_report(outcome: Outcome, settings: str, steady: str, body: Sequence[str]) -> str:
    """A report for a terminal. settings: what to know besides the machine. steady: which figures other work affects least."""
    goals = [f"{_VERDICTS[goal.met]:>12}: {goal.rule}: {goal.figure}" for goal in outcome.goals]
    return "\n".join([machine_line(outcome.hardware, settings), *body, *goals, *_cautions(outcome, steady)])


def markdown_report(outcome: Outcome, settings: str, steady: str, body: Sequence[str]) -> str:
    """The section for a file in docs/measurements. Arguments as for `text_report`."""
    judged = [(goal.rule, _VERDICTS[goal.met], goal.figure) for goal in outcome.goals]
    goals = [markdown_table([("goal", "", "measured"), *judged])] if judged else []
    head = [f"```sh\n{outcome.command}\n```", machine_line(outcome.hardware, settings), *_cautions(outcome, steady)]
    return "\n\n".join([*head, *goals, *body])


def publish(outcome: Outcome, report: str, json: str) -> None:
    """Print the report. json: the file that gets every figure; empty for none."""
    print(report)
    write_figures(outcome, json)


def write_figures(figures: object, json: str) -> None:
    """json: the file that gets them; empty for none."""
    if json:
        Path(json).write_bytes(msgspec.json.format(msgspec.json.encode(figures)))


def say(text: str) -> None:
    """Tell of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def machine_line(hardware: Hardware, settings: str) -> str:
    """The date, the machine and its software. settings: what else to know of the run."""
    libraries = ", ".join(f"{name} {version}" for name, version in hardware.libraries.items())
    gpus = "".join(f"{count} × {gpu}, " for gpu, count in Counter(hardware.gpus).items())
    return (
        f"{hardware.date}: {gpus}{hardware.cores} cores of {hardware.cpu}, {hardware.memory_bytes / 2**30:.0f} GiB, "
        f"Linux {hardware.kernel}, Python {hardware.python}, {libraries}; load {hardware.load:.1f} at the start, {settings}."
    )


def _cautions(outcome: Outcome, steady: str) -> list[str]:
    return [f"{BUSY} {steady}"] if outcome.hardware.load > QUIET_LOAD else []
