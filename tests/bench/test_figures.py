"""What becomes of samples: figures, ratios and verdicts, from numbers that are worked out by hand."""

import msgspec
import pytest

from bench import overlap_report
from bench.figures import Goal, Place, Row, Sample, Spread, TransferOutcome, judge
from bench.hardware import this_hardware
from bench.overlap_figures import OverlapOutcome
from bench.plan import Point, Way
from bench.report import markdown, text

KIB = 2**10
ONE, MANY = Point(64 * KIB, 1, "contiguous"), Point(64 * KIB, 8, "scattered")
FAR = Point(256 * KIB, 8, "scattered")
NIXL, THREAD, MEMMOVE, SOCKET = Way("transport", "nixl"), Way("thread", "nixl"), Way("memmove"), Way("socket")


def sample(gb_per_s: float, median_s: float = 40e-6, cpu_s_per_gb: float = 0.3) -> Sample:
    return Sample(pushes=3, gb_per_s=gb_per_s, median_s=median_s, p99_s=2 * median_s, cpu_s_per_gb=cpu_s_per_gb)


def row(way: Way, point: Point, *samples: Sample) -> Row:
    return Row(way=way, point=point, samples=list(samples))


def place(*rows: Row, **idle_cores: float) -> Place:
    return Place(name="host", rows=list(rows), idle_cores=idle_cores)


def verdicts(host: Place, network: Place) -> list[bool | None]:
    """Of NIXL through the port: memory's share, latency, CPU, idle, network."""
    return [goal.met for goal in judge(host, network)[:5]]


def test_a_sample_counts_bytes_over_the_whole_time_and_latency_push_by_push() -> None:
    pushes = [0.001] * 98 + [0.004, 0.010]
    made = Sample.of(Point(1000, 10, "scattered"), pushes, elapsed_s=0.5, cpu_s=0.002)
    assert made.pushes == 100
    assert made.gb_per_s == pytest.approx(100 * 10_000 / 1e9 / 0.5)
    assert (made.median_s, made.p99_s) == (0.001, 0.010)
    assert made.cpu_s_per_gb == pytest.approx(2.0)


def test_a_spread_has_the_median_and_what_nine_of_ten_do_not_exceed() -> None:
    assert Spread.of([5, 1, 2, 3, 4, 6, 7, 8, 10, 9]) == Spread(least=1, median=5.5, p90=9, most=10)
    assert Spread.of([3.0]) == Spread(least=3.0, median=3.0, p90=3.0, most=3.0)
    assert Spread.of(range(1, 21)) == Spread(least=1, median=10.5, p90=18, most=20)


def test_goals_that_are_met_are_judged_so() -> None:
    host = place(row(MEMMOVE, MANY, sample(8.0)), row(NIXL, MANY, sample(6.1)), row(NIXL, ONE, sample(1.0)), nixl=0.001)
    network = place(row(SOCKET, FAR, sample(1.0)), row(NIXL, FAR, sample(1.2)))
    assert verdicts(host, network) == [True, True, True, True, True]


def test_each_goal_can_be_missed() -> None:
    host = place(
        row(MEMMOVE, MANY, sample(8.0)),
        row(NIXL, MANY, sample(5.9, cpu_s_per_gb=0.41)),
        row(NIXL, ONE, sample(1.0, median_s=51e-6)),
        nixl=0.006,
    )
    network = place(row(SOCKET, FAR, sample(1.0)), row(NIXL, FAR, sample(0.9)))
    assert verdicts(host, network) == [False, False, False, False, False]


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    nothing = place()
    assert verdicts(nothing, nothing) == [None] * 5
    assert {goal.figure for goal in judge(nothing, nothing)} == {"not measured"}


def test_speeds_are_compared_round_by_round() -> None:
    """A round in which the machine was slow for both says nothing about their ratio; the medians alone would say 50 %."""
    host = place(
        row(MEMMOVE, MANY, sample(8.0), sample(8.0), sample(4.0)),
        row(NIXL, MANY, sample(6.4), sample(4.0), sample(3.2)),
    )
    assert judge(host, place())[0].figure == "80 %"


def test_the_worst_page_size_decides_and_the_fullest_push_of_each_counts() -> None:
    small, large = Point(64 * KIB, 2, "scattered"), Point(128 * KIB, 8, "scattered")
    host = place(
        *(row(MEMMOVE, point, sample(8.0)) for point in (small, MANY, large)),
        row(NIXL, small, sample(0.1)),
        row(NIXL, MANY, sample(7.2)),
        row(NIXL, large, sample(6.8)),
    )
    assert judge(host, place())[0].figure == "85 %"


def outcome(host: Place) -> TransferOutcome:
    network = Place(name="network", skipped={"namespaces": "they were not asked for"})
    goals = [Goal(rule="a rule", met=False, figure="a figure")]
    command = "launch bench transfer --quick"
    return TransferOutcome(command=command, hardware=this_hardware(), goals=goals, pool_bytes=2**20, host=host, network=network)


def test_a_report_says_every_figure_the_spread_and_what_was_skipped() -> None:
    host = place(row(NIXL, MANY, sample(3.0), sample(5.0), sample(4.0)), nixl=0.0123)
    for report in (text(outcome(host)), markdown(outcome(host))):
        for said in ("4.00", "3.00 … 5.00", "64 KiB", "scattered", "0.30", "nixl 1.23%", "they were not asked for", "not met"):
            assert said in report
        assert "Linux" in report and "1 MiB" in report
    assert "launch bench transfer --quick" in markdown(outcome(host))


@pytest.mark.parametrize(("load", "cautious"), [(0.2, False), (7.0, True)])
def test_a_report_from_a_busy_machine_says_what_that_does_to_it(load: float, cautious: bool) -> None:
    on = msgspec.structs.replace(this_hardware(), load=load)
    transfer = msgspec.structs.replace(outcome(place()), hardware=on)
    overlap = OverlapOutcome(command="", hardware=on, goals=[], transport="nixl", threads=1, models=[])
    for report in (text(transfer), markdown(transfer), overlap_report.text(overlap), overlap_report.markdown(overlap)):
        assert ("The machine had other work" in report) == cautious


def test_markdown_has_the_ways_side_by_side() -> None:
    report = markdown(outcome(place(row(NIXL, MANY, sample(3.0), sample(5.0), sample(4.0)), row(SOCKET, MANY, sample(1.0)))))
    assert "| page | pages |  | nixl | tcp socket |" in report
    assert "| 64 KiB | 8 | scattered | 4.00 (3.00 … 5.00) | 1.00 (1.00 … 1.00) |" in report
    assert "| 64 KiB | 8 | scattered | 40 / 80 | 40 / 80 |" in report
    assert "| 64 KiB | 8 | scattered | 0.30 | 0.30 |" in report
    assert "| a rule | not met | a figure |" in report
