"""A comparison as one HTML page that needs nothing else: tables, and the charts inside it.

Owns the page and the text tables. Draws no chart, measures nothing.
"""

import base64
import html
from collections.abc import Sequence

from bench.compare.figures import METRICS, CompareOutcome, Metric, ratios, spread_of
from bench.figures import Spread
from bench.tables import BUSY, QUIET_LOAD, machine_line

Lines = list[tuple[str, ...]]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1180px;
  margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .4em }
img { max-width: 100%; height: auto; display: block }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6em 0 }
th, td { text-align: right; padding: .25em .8em; border-bottom: 1px solid #ddd; vertical-align: top }
th:first-child, td:first-child { text-align: left }
td small { color: #555 } code { overflow-wrap: anywhere } .wide { overflow-x: auto } .failed { color: #a00000 }
"""
HOW = (
    "Each figure is the median of the rounds, with the least and the most in brackets where there are several. "
    "A × before a number is the ratio to the first layout, taken round by round: its median, least and most."
)


def page(outcome: CompareOutcome, charts: Sequence[tuple[str, str, bytes]]) -> str:
    """charts: as `bench.compare.charts` makes them."""
    names = " against ".join(side.name for side in outcome.layouts)
    sides = [("layout", "launch local, or URL"), *((side.name, side.text) for side in outcome.layouts)]
    parts = [f"<h1>{_text(names)}</h1>", *(f"<p>{_text(line)}</p>" for line in notes(outcome)), _table(sides)]
    parts += [f'<p class="failed">{_text(line)}</p>' for line in failed(outcome)]
    for name, title, png in charts:
        data = base64.b64encode(png).decode()
        parts.append(
            f'<h2>{_text(title)}</h2>\n<img alt="{_text(title)}" title="{_text(name)}" src="data:image/png;base64,{data}">'
        )
    parts.append(f"<h2>Figures</h2>\n<p>{_text(HOW)}</p>")
    parts += [f"<h3>{_text(metric.title)}</h3>\n{_table(table(outcome, metric))}" for metric in METRICS]
    parts.append(f"<h2>Command</h2>\n<p><code>{_text(outcome.command)}</code></p>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{_text(names)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def notes(outcome: CompareOutcome) -> list[str]:
    """The machine, the load, and what a good answer is."""
    limits = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in outcome.limits_ms.items())
    rounds = f"{outcome.rounds} round{'s' * (outcome.rounds > 1)}"
    settings = f"{rounds}, {outcome.seconds:g} s at each rate; clients and layouts share these cores"
    busy = [BUSY] if outcome.hardware.load > QUIET_LOAD else []
    return [machine_line(outcome.hardware, settings), *busy, f"A good answer keeps: {limits}."]


def failed(outcome: CompareOutcome) -> list[str]:
    """What went wrong: turns that were not measured, and requests that failed."""
    lines = [f"{each.layout}, round {each.round + 1}: not measured to its end: {each.reason}" for each in outcome.failures]
    for run in outcome.runs:
        if run.errors:
            kinds = ", ".join(f"{count} {kind}" for kind, count in run.errors.items())
            lines.append(f"{run.layout}, round {run.round + 1}, {run.rate:g} requests/s: failed requests: {kinds}")
    return lines


def table(outcome: CompareOutcome, metric: Metric) -> Lines:
    """A line for each rate, a column for each layout. The first line is the head."""
    lines: Lines = [("requests/s", *(side.name for side in outcome.layouts))]
    first = outcome.layouts[0].name
    for rate in outcome.rates:
        cells = []
        for side in outcome.layouts:
            values = outcome.values(side.name, rate, metric.key)
            ratio = None if side.name == first else ratios(values, outcome.values(first, rate, metric.key))
            cells.append(_cell(spread_of(values.values()), ratio, metric.digits))
        lines.append((f"{rate:g}", *cells))
    return lines


def _cell(spread: Spread | None, ratio: Spread | None, digits: int) -> str:
    if spread is None:
        return "–"
    return _numbers(spread, digits) + ("" if ratio is None else f"  ×{_numbers(ratio, 2)}")


def _numbers(spread: Spread, digits: int) -> str:
    if spread.least == spread.most:
        return f"{spread.median:,.{digits}f}"
    return f"{spread.median:,.{digits}f} ({spread.least:,.{digits}f} … {spread.most:,.{digits}f})"


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    head, *rest = lines
    rows = ["".join(f"<th>{_text(cell)}</th>" for cell in head)]
    rows += ["".join(f"<td>{_ratio_below(cell)}</td>" for cell in line) for line in rest]
    return '<div class="wide"><table>\n' + "\n".join(f"<tr>{row}</tr>" for row in rows) + "\n</table></div>"


def _ratio_below(cell: str) -> str:
    """The ratio of a cell on a line of its own."""
    figure, mark, ratio = cell.partition("  ×")
    return _text(figure) + (f"<br><small>×{_text(ratio)}</small>" if mark else "")


def _text(text: str) -> str:
    return html.escape(text)
