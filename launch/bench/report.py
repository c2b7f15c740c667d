"""The figures of a measurement as text: a table for a terminal, or a section of Markdown.

Owns the columns and their order. Measures and judges nothing.
"""

from collections.abc import Sequence

from launch.bench.figures import Goal, Outcome, Place, Row, cpu_s_per_gb, gb_per_s, median_us, p99_us

COLUMNS = ("page", "pages", "arrangement", "way", "GB/s", "least … most", "median us", "p99 us", "CPU-s/GB")
_VERDICTS = {True: "met", False: "not met", None: "not measured"}


def text(outcome: Outcome) -> str:
    """For a terminal: columns of equal width."""
    parts = [_machine(outcome)]
    for place in (outcome.host, outcome.network):
        parts += [f"{place.name}:", _columns([COLUMNS, *_cells(place)]), *_notes(place)]
    parts += [_goal_line(goal) for goal in outcome.goals]
    return "\n".join(parts)


def markdown(outcome: Outcome) -> str:
    """The section of docs/performance.md: what was run on what, every figure, and the goals."""
    parts = [f"```sh\n{outcome.command}\n```", _machine(outcome), "| goal | | measured |\n|---|---|---|"]
    parts[-1] += "".join(f"\n| {goal.rule} | {_VERDICTS[goal.met]} | {goal.figure} |" for goal in outcome.goals)
    for place in (outcome.host, outcome.network):
        if place.rows:
            rule = ("---",) * len(COLUMNS)
            table = "\n".join(f"| {' | '.join(cells)} |" for cells in (COLUMNS, rule, *_cells(place)))
            parts += [f"### Over the {place.name}", table]
        parts += [f"- {note}" for note in _notes(place)]
    return "\n\n".join(parts)


def bytes_text(number: int) -> str:
    """65536 as 64 KiB; the number itself where it is no whole number of KiB."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if number % size == 0:
            return f"{number // size} {unit}"
    return str(number)


def _cells(place: Place) -> list[tuple[str, ...]]:
    return [_row_cells(row) for row in place.rows]


def _row_cells(row: Row) -> tuple[str, ...]:
    speed = row.figure(gb_per_s)
    return (
        bytes_text(row.point.page_bytes),
        str(row.point.pages),
        row.point.arrangement,
        row.way.label,
        f"{speed.median:.2f}",
        f"{speed.least:.2f} … {speed.most:.2f}",
        f"{row.figure(median_us).median:.0f}",
        f"{row.figure(p99_us).median:.0f}",
        f"{row.figure(cpu_s_per_gb).median:.2f}",
    )


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _notes(place: Place) -> list[str]:
    idle = [f"{label} {cores:.2%}" for label, cores in place.idle_cores.items()]
    notes = [f"an idle pair uses of one core: {', '.join(idle)}"] if idle else []
    return notes + [f"{label} was skipped: {reason}" for label, reason in place.skipped.items()]


def _machine(outcome: Outcome) -> str:
    it = outcome.hardware
    libraries = ", ".join(f"{name} {version}" for name, version in it.libraries.items())
    return (
        f"{it.date}: {it.cores} cores of {it.cpu}, {it.memory_bytes / 2**30:.0f} GiB, Linux {it.kernel}, "
        f"Python {it.python}, {libraries}; load {it.load:.1f} at the start, pools of {bytes_text(outcome.pool_bytes)}."
    )


def _goal_line(goal: Goal) -> str:
    return f"{_VERDICTS[goal.met]:>12}: {goal.rule}: {goal.figure}"
