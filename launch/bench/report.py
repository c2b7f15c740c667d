"""The figures of a measurement as text: a table for a terminal, or a section of Markdown.

Owns the columns and their order. Measures and judges nothing.
"""

from collections.abc import Callable, Sequence

from launch.bench.figures import Goal, Outcome, Place, Row, cpu_s_per_gb, gb_per_s, median_us, p99_us

COLUMNS = ("page", "pages", "arrangement", "way", "GB/s (least … most)", "us: median / p99", "CPU-s/GB")
QUIET_LOAD = 0.5
BUSY = (
    "The machine had other work: speeds, times and their ratios depend on who got the cores when, also where a goal is met. "
    "CPU-s/GB suffers least."
)
_VERDICTS = {True: "met", False: "not met", None: "not measured"}


def text(outcome: Outcome) -> str:
    """For a terminal: columns of equal width."""
    parts = [_machine(outcome)]
    for place in (outcome.host, outcome.network):
        table = [_columns([COLUMNS, *_cells(place)])] if place.rows else []
        parts += [f"{place.name}:", *table, *_notes(place)]
    parts += [_goal_line(goal) for goal in outcome.goals]
    parts += _caution(outcome)
    return "\n".join(parts)


def markdown(outcome: Outcome) -> str:
    """The section of docs/performance.md: what was run on what, the goals, and every figure with the ways side by side."""
    goals = [("goal", "", "measured"), *((goal.rule, _VERDICTS[goal.met], goal.figure) for goal in outcome.goals)]
    parts = [f"```sh\n{outcome.command}\n```", _machine(outcome), *_caution(outcome), _table(goals)]
    for place in (outcome.host, outcome.network):
        if place.rows:
            parts += [f"### {place.name.capitalize()}: GB/s, median (least … most of the rounds)", _side_by_side(place, _speed)]
            parts += [f"### {place.name.capitalize()}: microseconds of a push, median / p99", _side_by_side(place, _latency)]
            parts += [f"### {place.name.capitalize()}: CPU-s/GB, both processes", _side_by_side(place, _cost)]
        parts += [f"- {note}" for note in _notes(place)]
    return "\n\n".join(parts)


def _side_by_side(place: Place, cell: Callable[[Row], str]) -> str:
    """A line for each point, a column for each way."""
    ways = list(dict.fromkeys(row.way for row in place.rows))
    lines = [("page", "pages", "", *(way.label for way in ways))]
    for point in dict.fromkeys(row.point for row in place.rows):
        cells = {row.way: cell(row) for row in place.rows if row.point == point}
        lines.append((bytes_text(point.page_bytes), str(point.pages), point.arrangement, *(cells[way] for way in ways)))
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head."""
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest))


def bytes_text(number: int) -> str:
    """65536 as 64 KiB; the number itself where it is no whole number of KiB."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if number % size == 0:
            return f"{number // size} {unit}"
    return str(number)


def _cells(place: Place) -> list[tuple[str, ...]]:
    return [_row_cells(row) for row in place.rows]


def _row_cells(row: Row) -> tuple[str, ...]:
    point = row.point
    return (
        bytes_text(point.page_bytes),
        str(point.pages),
        point.arrangement,
        row.way.label,
        _speed(row),
        _latency(row),
        _cost(row),
    )


def _speed(row: Row) -> str:
    speed = row.figure(gb_per_s)
    return f"{speed.median:.2f} ({speed.least:.2f} … {speed.most:.2f})"


def _latency(row: Row) -> str:
    return f"{row.figure(median_us).median:.0f} / {row.figure(p99_us).median:.0f}"


def _cost(row: Row) -> str:
    return f"{row.figure(cpu_s_per_gb).median:.2f}"


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


def _caution(outcome: Outcome) -> list[str]:
    return [BUSY] if outcome.hardware.load > QUIET_LOAD else []


def _goal_line(goal: Goal) -> str:
    return f"{_VERDICTS[goal.met]:>12}: {goal.rule}: {goal.figure}"
