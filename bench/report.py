"""The figures of `launch bench transfer` as text: a table for a terminal, or a section of Markdown.

Owns the columns and their order. Measures and judges nothing.
"""

from collections.abc import Callable

from bench.figures import Place, Row, TransferOutcome
from bench.tables import markdown_report, markdown_table, text_report, text_table

COLUMNS = ("page", "pages", "arrangement", "way", "GB/s (least … most)", "us: median / p99", "CPU-s/GB")
STEADY = "CPU-s/GB is affected least."


def text(outcome: TransferOutcome) -> str:
    """For a terminal: columns of equal width."""
    body = []
    for place in (outcome.host, outcome.network):
        lines = [(*_point(row), row.way.label, _speed(row), _latency(row), _cost(row)) for row in place.rows]
        table = [text_table([COLUMNS, *lines])] if lines else []
        body += [f"{place.name}:", *table, *_notes(place)]
    return text_report(outcome, _settings(outcome), STEADY, body)


def markdown(outcome: TransferOutcome) -> str:
    """The section for docs/measurements/transports.md: the run, the goals, and every figure with the ways side by side."""
    body = []
    for place in (outcome.host, outcome.network):
        for title, cell in (
            ("GB/s, median (least … most of the rounds)", _speed),
            ("microseconds of a push, median / p99", _latency),
            ("CPU-s/GB, both processes", _cost),
        ):
            if place.rows:
                body += [f"### {place.name.capitalize()}: {title}", _side_by_side(place, cell)]
        body += [f"- {note}" for note in _notes(place)]
    return markdown_report(outcome, _settings(outcome), STEADY, body)


def _side_by_side(place: Place, cell: Callable[[Row], str]) -> str:
    """A line for each point, a column for each way."""
    ways = list(dict.fromkeys(row.way for row in place.rows))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in place.rows:
        cells.setdefault(_point(row), {})[row.way.label] = cell(row)
    lines = [(*point, *(of[way.label] for way in ways)) for point, of in cells.items()]
    return markdown_table([("page", "pages", "", *(way.label for way in ways)), *lines])


def _point(row: Row) -> tuple[str, str, str]:
    return bytes_text(row.point.page_bytes), str(row.point.pages), row.point.arrangement


def bytes_text(number: int) -> str:
    """65536 as 64 KiB; the number itself where it is no whole number of KiB."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if number % size == 0:
            return f"{number // size} {unit}"
    return str(number)


def _speed(row: Row) -> str:
    speed = row.spread(lambda sample: sample.gb_per_s)
    return f"{speed.median:.2f} ({speed.least:.2f} … {speed.most:.2f})"


def _latency(row: Row) -> str:
    median, p99 = row.spread(lambda sample: 1e6 * sample.median_s), row.spread(lambda sample: 1e6 * sample.p99_s)
    return f"{median.median:.0f} / {p99.median:.0f}"


def _cost(row: Row) -> str:
    return f"{row.spread(lambda sample: sample.cpu_s_per_gb).median:.2f}"


def _notes(place: Place) -> list[str]:
    idle = [f"{label} {cores:.2%}" for label, cores in place.idle_cores.items()]
    notes = [f"an idle pair uses of one core: {', '.join(idle)}"] if idle else []
    return notes + [f"{label} was skipped: {reason}" for label, reason in place.skipped.items()]


def _settings(outcome: TransferOutcome) -> str:
    return f"pools of {bytes_text(outcome.pool_bytes)}"
