"""What was measured: samples, their median and spread over the rounds, and whether the goals are met.

Owns the figures and the goals. Measures and prints nothing.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from bench.hardware import Hardware
from bench.plan import Point, Way

LARGE_PAGE_BYTES = 64 * 2**10
NETWORK_PAGE_BYTES = 256 * 2**10
MEMMOVE, SOCKET = Way("memmove"), Way("socket")
NIXL, NIXL_THREAD = Way("transport", "nixl"), Way("thread", "nixl")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A point in one round. GB: 10^9 bytes. cpu_s_per_gb: user and system, both processes."""

    pushes: int
    gb_per_s: float
    median_s: float
    p99_s: float
    cpu_s_per_gb: float

    @classmethod
    def of(cls, point: Point, pushes: Sequence[float], elapsed_s: float, cpu_s: float) -> "Sample":
        """pushes: how long each took, in seconds."""
        gigabytes = len(pushes) * point.push_bytes / 1e9
        ordered = sorted(pushes)
        return cls(
            pushes=len(pushes),
            gb_per_s=gigabytes / elapsed_s,
            median_s=statistics.median(ordered),
            p99_s=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            cpu_s_per_gb=cpu_s / gigabytes,
        )


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """p90: what nine of ten values do not exceed."""

    least: float
    median: float
    p90: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
        return cls(least=ordered[0], median=statistics.median(ordered), p90=p90, most=ordered[-1])


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A way at a point: one sample for each round."""

    way: Way
    point: Point
    samples: list[Sample]

    def spread(self, of: Callable[[Sample], float]) -> Spread:
        return Spread.of(of(sample) for sample in self.samples)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Everything measured in one place, such as one host. idle_cores: of each connected pair. skipped: what could not be
    measured, and why."""

    name: str
    rows: list[Row] = []
    idle_cores: dict[str, float] = {}
    skipped: dict[str, str] = {}

    def row(self, way: Way, point: Point) -> Row | None:
        return next((row for row in self.rows if (row.way, row.point) == (way, point)), None)


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """met: None when it was not measured."""

    rule: str
    met: bool | None
    figure: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known at the end of a benchmark. command: repeats it."""

    command: str
    hardware: Hardware
    goals: list[Goal]


class TransferOutcome(Outcome, frozen=True, kw_only=True):
    """All that is known at the end of `launch bench transfer`."""

    pool_bytes: int
    host: Place
    network: Place


def judge(host: Place, network: Place) -> list[Goal]:
    """The goals of NIXL, through the port alone and through a transfer thread, as an instance uses it."""
    return [goal for way in (NIXL, NIXL_THREAD) for goal in _goals_of(way, host, network)]


def _goals_of(way: Way, host: Place, network: Place) -> Iterator[Goal]:
    large = [row for row in _fullest(host) if row.way == way and row.point.page_bytes >= LARGE_PAGE_BYTES]
    one_page = [row for row in host.rows if row.way == way and row.point.pages == 1 and row.point.page_bytes <= LARGE_PAGE_BYTES]
    far = [row for row in _fullest(network) if row.way == way and row.point.page_bytes == NETWORK_PAGE_BYTES]
    shares = [100 * share for row in large for share in _ratio(row, host.row(MEMMOVE, row.point))]
    leads = [lead for row in far for lead in _ratio(row, network.row(SOCKET, row.point))]
    idle = [100 * host.idle_cores[way.label]] if way.label in host.idle_cores else []
    for rule, at_least, limit, unit, values in (
        ("of a scattered memmove, pages of 64 KiB and more", True, 75, " %", shares),
        (
            "for one page of up to 64 KiB",
            False,
            50,
            " us",
            [1e6 * row.spread(lambda sample: sample.median_s).median for row in one_page],
        ),
        (
            "for scattered pages of 64 KiB and more",
            False,
            0.4,
            " CPU-s/GB",
            [row.spread(lambda sample: sample.cpu_s_per_gb).median for row in large],
        ),
        ("of a core for a pair that is idle", False, 0.5, " %", idle),
        ("the speed of a TCP socket between network namespaces, pages of 256 KiB", True, 1, " times", leads),
    ):
        worst = min(values, default=None) if at_least else max(values, default=None)
        yield Goal(
            rule=f"{way.label}: at {'least' if at_least else 'most'} {limit:g}{unit} {rule}",
            met=None if worst is None else (worst >= limit if at_least else worst <= limit),
            figure="not measured" if worst is None else f"{float(f'{worst:.3g}'):g}{unit}",
        )


def _fullest(place: Place) -> list[Row]:
    """The rows with the most scattered pages, for each way and page size."""
    most: dict[tuple[Way, int], Row] = {}
    for row in place.rows:
        key = row.way, row.point.page_bytes
        if row.point.arrangement == "scattered" and (key not in most or row.point.pages > most[key].point.pages):
            most[key] = row
    return list(most.values())


def _ratio(row: Row, other: Row | None) -> list[float]:
    """The speed of one row in that of another, round by round, so that both have seen the same noise. Their median, if any."""
    if other is None:
        return []
    pairs = zip(row.samples, other.samples, strict=True)
    return [statistics.median(ours.gb_per_s / theirs.gb_per_s for ours, theirs in pairs)]
