"""When requests are due: the rate and the spread of the gaps are those that were asked for, at a fixed seed."""

import math

import numpy as np
import pytest

from bench.serve.arrivals import due_times
from bench.serve.plan import Load

MANY = 20_000


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_their_shape(burstiness: float, variation: float) -> None:
    times = due_times(Load(request_rate=5.0, burstiness=burstiness), MANY, seed=7)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all() and times[-1] == pytest.approx(MANY / 5.0), "the last one is due when the rate says"
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03, abs=1e-9), "a gamma's is 1 / sqrt(shape)"


def test_gaps_without_burstiness_are_those_of_a_poisson_process() -> None:
    gaps = np.diff(due_times(Load(request_rate=2.0), MANY, seed=1), prepend=0.0)
    for s in (0.1, 0.5, 1.0, 2.0):
        assert (gaps > s).mean() == pytest.approx(math.exp(-2.0 * s), abs=0.01)


def test_a_seed_makes_the_same_times_and_another_seed_makes_others() -> None:
    load = Load(request_rate=3.0)
    assert (due_times(load, 50, 1) == due_times(load, 50, 1)).all()
    assert (due_times(load, 50, 1) != due_times(load, 50, 2)).any()


@pytest.mark.parametrize(("strategy", "halfway"), [("linear", 50.5), ("exponential", 10.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: str, halfway: float) -> None:
    load = Load(ramp_up_strategy=strategy, ramp_up_start_rps=1, ramp_up_end_rps=100, burstiness=math.inf)  # type: ignore[arg-type]
    rates = 1 / np.diff(due_times(load, 1001, seed=0), prepend=0.0)
    assert rates[[0, 500, 1000]] == pytest.approx([1.0, halfway, 100.0])


def test_without_a_rate_everything_is_due_at_once() -> None:
    assert (due_times(Load(), 3, seed=0) == 0).all()
