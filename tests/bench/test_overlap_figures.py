"""What becomes of samples of fleets: spreads, shares, pairs and verdicts, from numbers that are worked out by hand."""

import json

import msgspec
import pytest

from bench.overlap_figures import Measured, OverlapOutcome, Sample, judge
from bench.overlap_plan import FleetKind
from bench.overlap_report import markdown, text
from bench.report import this_hardware


def sample(
    fleet: FleetKind,
    chunks: int = 1,
    number: int = 1,
    first_s: float = 1.0,
    push_s: float = 0.0,
    exposed_s: float = 0.0,
) -> Sample:
    return Sample(
        fleet=fleet,
        chunks=chunks,
        round=number,
        first_token_s=first_s,
        next_token_s=0.02,
        push_s=push_s,
        exposed_s=exposed_s,
        pushed_bytes=0 if fleet == "colocated" else 3_000_000,
    )


def measured(*samples: Sample) -> Measured:
    chunks = sorted({each.chunks for each in samples})
    return Measured(model="tiny", prompt_tokens={count: 512 * count - 16 for count in chunks}, samples=list(samples))


def a_round(
    number: int, chunks: int = 1, separate_s: float = 1.0, colocated_s: float = 1.0, exposed: float = 0.1
) -> list[Sample]:
    """exposed: of 40 ms that the layer-wise transfer takes."""
    return [
        sample("layer-wise", chunks, number, separate_s, push_s=0.04, exposed_s=0.04 * exposed),
        sample("page-wise", chunks, number, separate_s, push_s=0.02, exposed_s=0.02),
        sample("colocated", chunks, number, colocated_s),
    ]


def verdicts(*samples: Sample) -> dict[str, bool | None]:
    return {goal.rule.removeprefix("tiny: "): goal.met for goal in judge([measured(*samples)])}


ONE = "at most 50 % of the transfer of a prompt of one chunk is exposed"
EIGHT = "at most 10 % of the transfer of a prompt of 8 chunks is exposed"
FIRST = "the first token of a prompt of one chunk within 3 % + 2 ms of a colocated instance's"


@pytest.mark.parametrize(("chunks", "share", "rule"), [(1, 0.5, ONE), (8, 0.1, EIGHT)])
def test_the_exposed_share_of_the_median_request_decides(chunks: int, share: float, rule: str) -> None:
    some = [*a_round(1, chunks, exposed=share - 0.01), *a_round(2, chunks, exposed=0.99)]
    assert verdicts(*some, *a_round(3, chunks, exposed=share - 0.001))[rule] is True
    assert verdicts(*some, *a_round(3, chunks, exposed=share + 0.001))[rule] is False


def test_a_length_that_was_not_measured_is_neither_met_nor_missed() -> None:
    assert verdicts(*a_round(1, chunks=1))[EIGHT] is None
    assert verdicts(*a_round(1, chunks=8))[ONE] is None


@pytest.mark.parametrize(("separate_s", "met"), [(1.0319, True), (1.0321, False), (0.9, True)])
def test_a_first_token_may_come_three_per_cent_and_two_milliseconds_later(separate_s: float, met: bool) -> None:
    assert verdicts(*a_round(1, separate_s=separate_s))[FIRST] is met


def test_first_tokens_are_compared_round_by_round() -> None:
    """A round in which the machine was slow says nothing about either fleet; the medians alone would say 50 % more."""
    rounds = [(1.0, 1.0), (3.0, 3.0), (2.0, 2.0), (2.0, 1.0), (1.0, 1.0)]
    samples = [each for number, (ours, theirs) in enumerate(rounds) for each in a_round(number, 1, ours, theirs)]
    (goal,) = [goal for goal in judge([measured(*reversed(samples))]) if goal.rule.endswith(FIRST)]
    assert goal.met is True and goal.figure == "+0.0 ms, +0.0 %"


def outcome(*samples: Sample) -> OverlapOutcome:
    models, command = [measured(*samples)], "launch bench overlap --quick"
    return OverlapOutcome(
        command=command, hardware=this_hardware(), goals=judge(models), transport="nixl", threads=1, models=models
    )


def test_a_report_has_every_fleet_side_by_side() -> None:
    measured = outcome(*a_round(1, 1, 1.1, 1.0, 0.25), *a_round(2, 1, 1.3, 1.0, 0.75))
    assert text(measured).count("layer-wise") == 2 and "1200.0 / 1300.0" in text(measured)
    report = markdown(measured)
    for line in (
        "| 496 | layer-wise | 1200.0 / 1300.0 | 200.0 / 300.0 | 1.200 / 1.300 | 20.0 / 20.0 |",
        "| 496 | colocated | 1000.0 / 1000.0 |  |  | 20.0 / 20.0 |",
        "| 496 | layer-wise | 3.0 | 40.0 / 40.0 | 20.0 / 30.0 | 50 % / 75 % | 100 % / 150 % |",
        "| 496 | page-wise | 3.0 | 20.0 / 20.0 | 20.0 / 20.0 | 100 % / 100 % |  |",
        f"| tiny: {FIRST} | not met | +200.0 ms, +20.0 % |",
        f"| tiny: {ONE} | met | 50.0 % |",
    ):
        assert line in report
    assert report.startswith("```sh\nlaunch bench overlap --quick\n```") and "1 thread for each instance, nixl." in report


def test_an_outcome_is_json_with_every_sample() -> None:
    written = json.loads(msgspec.json.encode(outcome(*a_round(1), *a_round(2))))
    assert len(written["models"][0]["samples"]) == 6 and written["models"][0]["prompt_tokens"] == {"1": 496}
