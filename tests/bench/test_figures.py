"""What all reports share, from numbers that are worked out by hand."""

import msgspec
import pytest

from bench.report import BenchOutcome, Spread, markdown_report, text_report, this_hardware


def test_a_spread_has_the_median_and_what_nine_of_ten_do_not_exceed() -> None:
    assert Spread.of([5, 1, 2, 3, 4, 6, 7, 8, 10, 9]) == Spread(least=1, median=5.5, p90=9, most=10)
    assert Spread.of([3.0]) == Spread(least=3.0, median=3.0, p90=3.0, most=3.0)
    assert Spread.of(range(1, 21)) == Spread(least=1, median=10.5, p90=18, most=20)


@pytest.mark.parametrize(("load", "cautious"), [(0.2, False), (7.0, True)])
def test_a_report_from_a_busy_machine_says_what_that_does_to_it(load: float, cautious: bool) -> None:
    on = msgspec.structs.replace(this_hardware(), load=load)
    outcome = BenchOutcome(command="measure", hardware=on, goals=[])
    for report in (text_report, markdown_report):
        assert ("The machine had other work" in report(outcome, "settings", "Ratios are steady.", [])) == cautious
