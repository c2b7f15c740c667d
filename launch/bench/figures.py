"""What was measured: samples, their median and spread over the rounds, and whether the goals are met.

Owns the figures and the goals. Measures and prints nothing.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from launch.bench.plan import Point, Way

GOAL_OF_MEMMOVE = 0.75
GOAL_PUSH_S = 50e-6
GOAL_CPU_S_PER_GB = 0.4
GOAL_IDLE_CORES = 0.005
"""Less is not told apart from the noise of the clock."""
LARGE_PAGE_BYTES = 64 * 2**10
NETWORK_PAGE_BYTES = 256 * 2**10


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


class Figure(msgspec.Struct, frozen=True):
    """The median of some rounds, and between what they lie."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Figure":
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A way at a point: one sample for each round."""

    way: Way
    point: Point
    samples: list[Sample]

    def figure(self, of: Callable[[Sample], float]) -> Figure:
        return Figure.of(of(sample) for sample in self.samples)


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


MEMMOVE, SOCKET = Way("memmove"), Way("socket")
NIXL, NIXL_THREAD = Way("transport", "nixl"), Way("thread", "nixl")


def judge(host: Place, network: Place) -> list[Goal]:
    """The goals of NIXL, through the port alone and through a transfer thread, as an instance uses it."""
    goals = []
    for way in (NIXL, NIXL_THREAD):
        large = [row for row in _fullest(host, way) if row.point.page_bytes >= LARGE_PAGE_BYTES]
        shares = {row.point: _ratio(row, host.row(MEMMOVE, row.point)) for row in large}
        one_page = [row for row in host.rows if row.way == way and row.point.pages == 1]
        small = [row for row in one_page if row.point.page_bytes <= LARGE_PAGE_BYTES]
        ahead = {
            row.point: _ratio(row, network.row(SOCKET, row.point))
            for row in _fullest(network, way)
            if row.point.page_bytes == NETWORK_PAGE_BYTES
        }
        goals += [
            _goal(f"{way.label}: at least {GOAL_OF_MEMMOVE:.0%} of a scattered memmove, pages of 64 KiB and more",
                  _least(shares), lambda share: share >= GOAL_OF_MEMMOVE, lambda share: f"{share:.0%}"),
            _goal(f"{way.label}: one page of up to 64 KiB in less than {GOAL_PUSH_S * 1e6:.0f} us",
                  _most({row.point: row.figure(lambda sample: sample.median_s).median for row in small}),
                  lambda push_s: push_s < GOAL_PUSH_S, lambda push_s: f"{push_s * 1e6:.0f} us"),
            _goal(f"{way.label}: at most {GOAL_CPU_S_PER_GB} CPU-s/GB, scattered pages of 64 KiB and more",
                  _most({row.point: row.figure(lambda sample: sample.cpu_s_per_gb).median for row in large}),
                  lambda cost: cost <= GOAL_CPU_S_PER_GB, lambda cost: f"{cost:.2f} CPU-s/GB"),
            _idle_goal(way, host),
            _goal(f"{way.label}: ahead of the TCP socket between network namespaces, pages of 256 KiB",
                  _least(ahead), lambda ratio: ratio > 1.0, lambda ratio: f"{ratio:.2f} times its speed"),
        ]
    return goals
