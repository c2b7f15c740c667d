"""The soak of a load that shifts: its sums, and, with --soak, the whole of it."""

import pytest

from tests.soak.shift import BIN_S, ShiftResult, shift


def test_a_phase_is_back_when_two_bins_in_a_row_are_well() -> None:
    result = ShiftResult(phase_s=6 * BIN_S)
    for number, well in enumerate([10, 10, 10, 10, 10, 10, 2, 10, 3, 9, 10, 10]):
        result.kept[number] = [True] * well + [False] * (10 - well)
    assert (result.back_after_s(0), result.back_after_s(1)) == (0.0, 3 * BIN_S)
    result.kept[10] = result.kept[8]
    assert result.back_after_s(1) == float("inf")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_attainment_is_back_within_half_a_minute_of_a_shift() -> None:
    result = shift(3, 90.0, 4.0, 3, 3, scaled=True, flags=[])
    assert not result.failures
    assert any(each["action"] == "flip" and not each["outcome"] for each in result.decisions)
    assert max(result.back_after_s(phase) for phase in (1, 2)) <= 30.0
