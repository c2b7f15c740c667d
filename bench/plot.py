"""A drawing of speed over page size, as SVG: one line for each way, for the most scattered pages.

Owns the drawing. Knows rows of figures; measures nothing, and needs no library.
"""

import math
from xml.sax.saxutils import escape

from bench.figures import Place, fullest, gb_per_s
from bench.report import bytes_text

WIDTH, HEIGHT, MARGIN = 760, 420, 60
COLORS = ("#222222", "#8c8c8c", "#1f77b4", "#17becf", "#d62728", "#ff9896", "#2ca02c", "#98df8a", "#9467bd", "#c5b0d5", "#8c564b")


def draw(place: Place) -> str:
    """The SVG document. Both axes begin at their least value; speed is linear, page size logarithmic."""
    rows = fullest(place)
    sizes = sorted({row.point.page_bytes for row in rows})
    ways = list(dict.fromkeys(row.way for row in rows))
    top = max((row.figure(gb_per_s).most for row in rows), default=1.0)
    span = math.log2(sizes[-1] / sizes[0]) if len(sizes) > 1 else 1.0

    def x(page_bytes: int) -> float:
        return MARGIN + (WIDTH - 4 * MARGIN) * math.log2(page_bytes / sizes[0]) / span

    def y(speed: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * speed / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(MARGIN, MARGIN / 2, "GB/s over page size, scattered pages: median and spread of the rounds"),
    ]
    for step in range(5):
        speed = top * step / 4
        parts += [_line(MARGIN, y(speed), WIDTH - 3 * MARGIN, y(speed), "#dddddd"), _text(10, y(speed) + 4, f"{speed:.1f}")]
    parts += [_text(x(size) - 20, HEIGHT - MARGIN / 2, bytes_text(size)) for size in sizes]
    for number, way in enumerate(ways):
        color = COLORS[number % len(COLORS)]
        dots = [(x(row.point.page_bytes), row.figure(gb_per_s)) for row in rows if row.way == way]
        path = " ".join(f"{at:.1f},{y(figure.median):.1f}" for at, figure in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [_line(at, y(figure.least), at, y(figure.most), color) for at, figure in dots]
        height = MARGIN + 18 * number
        parts += [
            _line(WIDTH - 2.6 * MARGIN, height, WIDTH - 2.2 * MARGIN, height, color),
            _text(WIDTH - 2 * MARGIN, height + 4, way.label),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
