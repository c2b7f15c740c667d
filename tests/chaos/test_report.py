"""The report counts as gaps of a fault what waited for its victim, and nothing else."""

from tests.chaos.faults import Fault
from tests.chaos.fleet import Shape
from tests.chaos.report import Outcome, disturbed, longest, undisturbed
from tests.rig.client import Answer, Choice, Request
from tests.rig.report import percentile

SHAPE = Shape(heartbeat_s=0.5, dead_after_s=3.0)
REQUEST = Request("", {})


def answer(sent_s: float, *arrivals: float) -> Answer:
    return Answer(REQUEST, [Choice(arrivals=list(arrivals))], sent_s)


def test_a_stream_on_a_killed_decode_instance_waits_over_the_moment_of_the_kill() -> None:
    fault = Fault(0, "kill", "decode", "decode-0", at_s=10.0, over_s=10.0, back_s=15.0)
    waited, passed, late = answer(8.0, 9.0, 11.5), answer(8.0, 9.9, 10.9, 12.0), answer(9.0, 14.0)
    outcome = Outcome(SHAPE, answers=[waited, passed, late], faults=[fault])
    assert [gap.seconds for gap in disturbed(outcome, [fault])] == [2.5], "a first token waits for no decode instance"


def test_a_stream_goes_on_when_the_next_life_of_its_instance_registers_early() -> None:
    fault = Fault(0, "kill", "decode", "decode-0", at_s=10.0, over_s=10.0, back_s=10.5)
    outcome = Outcome(SHAPE, answers=[answer(8.0, 9.5, 10.75)], faults=[fault])
    assert [gap.seconds for gap in disturbed(outcome, [fault])] == [1.25]


def test_a_first_token_waits_for_a_stopped_prefill_instance() -> None:
    fault = Fault(0, "stop", "prefill", "prefill-0", at_s=10.0, over_s=16.0, back_s=16.0)
    outcome = Outcome(SHAPE, answers=[answer(9.0, 14.0), answer(9.9, 10.2)], faults=[fault])
    assert [gap.seconds for gap in disturbed(outcome, [fault])] == [5.0]


def test_a_drain_counts_the_longest_gap_of_every_open_stream() -> None:
    fault = Fault(0, "term", "decode", "decode-0", at_s=10.0, over_s=14.0)
    outcome = Outcome(SHAPE, answers=[answer(8.0, 9.0, 11.0, 11.5, 20.0, 29.0), answer(20.0, 21.0, 22.0)], faults=[fault])
    assert [gap.seconds for gap in disturbed(outcome, [fault])] == [8.5]


def test_undisturbed_gaps_are_those_away_from_every_fault() -> None:
    fault = Fault(0, "kill", "decode", "decode-0", at_s=10.0, over_s=10.0)
    outcome = Outcome(SHAPE, answers=[answer(4.0, 5.0, 5.5, 9.5, 13.5, 14.5, 14.75)], faults=[fault])
    assert undisturbed(outcome) == [4.0], "from 5.5 to 9.5; what lies after the kill may wait for it"


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.2, 0.5, 0.9, 1.0)] == [1.0, 3.0, 5.0, 5.0]


def test_the_longest_gap_is_listed_with_the_fault_beside_it() -> None:
    fault = Fault(0, "kill", "decode", "decode-0", at_s=10.0, over_s=10.0, back_s=15.0)
    outcome = Outcome(SHAPE, answers=[answer(1.0, 1.5), answer(8.0, 9.5, 13.0)], faults=[fault])
    first, *_, last = longest(outcome)
    assert "next token from -0.5 to 3.0 (3.5 s); kill decode-0 at 0.0" in first
    assert last.endswith("no fault")
