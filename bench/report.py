"""The figures of `launch bench transfer` as text: a table for a terminal, or a section of Markdown.

Owns the columns and their order. Measures and judges nothing.
"""

from collections.abc import Callable

from bench.figures import Outcome, Place, Row, cpu_s_per_gb, gb_per_s, median_us, p99_us
from bench.tables import cautions, machine_line, markdown_goals, markdown_table, text_goals, text_table

COLUMNS = ("page", "pages", "arrangement", "way", "GB/s (least … most)", "us: median / p99", "CPU-s/GB")


def text(outcome: Outcome) -> str:
    """For a terminal: columns of equal width."""
    parts = [_machine(outcome)]
    for place in (outcome.host, outcome.network):
        table = [text_table([COLUMNS, *_cells(place)])] if place.rows else []
        parts += [f"{place.name}:", *table, *_notes(place)]
    parts += text_goals(outcome.goals)
    parts += _cautions(outcome)
    return "\n".join(parts)


def markdown(outcome: Outcome) -> str:
    """The section for docs/measurements/transports.md: the run, the goals, and every figure with the ways side by side."""
    parts = [f"```sh\n{outcome.command}\n```", _machine(outcome), *_cautions(outcome), markdown_goals(outcome.goals)]
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
    return markdown_table(lines)


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


def _notes(place: Place) -> list[str]:
    idle = [f"{label} {cores:.2%}" for label, cores in place.idle_cores.items()]
    notes = [f"an idle pair uses of one core: {', '.join(idle)}"] if idle else []
    return notes + [f"{label} was skipped: {reason}" for label, reason in place.skipped.items()]


def _machine(outcome: Outcome) -> str:
    return machine_line(outcome.hardware, f"pools of {bytes_text(outcome.pool_bytes)}")


def _cautions(outcome: Outcome) -> list[str]:
    return cautions(outcome.hardware, "CPU-s/GB is affected least.")
