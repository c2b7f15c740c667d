"""The cost of steps that an instance measures, against steps whose cost is known."""

from collections.abc import Iterable
from itertools import cycle, islice
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.executor import Chunk, Plan
from common.instance.worker import HALF_LIFE_STEPS, LEAST_STEPS, CostMeter
from common.step_cost import StepCost

COST = StepCost(step_s=0.006, chunk_token_s=0.00004, decode_row_s=0.0001)
WORK = ((0, 1), (500, 0), (0, 60), (8000, 0), (0, 20), (2000, 30))
"""Chunk tokens and decode rows of some steps."""


def plan(tokens: int, rows: int) -> Plan:
    chunks = (Chunk(0, 0, np.zeros(tokens, dtype=np.int32), last=True),) if tokens else ()
    return Plan(0, chunks=chunks, decode_rows=np.zeros(rows, dtype=np.int32))


class Engine:
    """Its steps take what the cost says, and run one after the other."""

    def __init__(self) -> None:
        self.meter = CostMeter()
        self.now = 0.0

    def compute(self, work: Iterable[tuple[int, int]], longer_s: float = 0.0) -> StepCost:
        """longer_s: how much longer than their cost these steps take. Returns the cost that is measured behind them."""
        for tokens, rows in work:
            began_s, what = self.now, plan(tokens, rows)
            self.now += seconds(what) + longer_s
            self.meter.step(what, began_s, self.now)
        return self.meter.read()


def seconds(work: Plan) -> float:
    return COST.seconds(work.chunk_tokens, len(work.decode_rows))


def assert_is_cost(cost: StepCost, share: float = 0.01) -> None:
    assert (cost.step_s, cost.chunk_token_s, cost.decode_row_s) == pytest.approx(
        (COST.step_s, COST.chunk_token_s, COST.decode_row_s), rel=share
    )


def test_the_pace_is_the_cost_of_the_steps() -> None:
    assert_is_cost(Engine().compute(WORK * 20))


def test_a_few_steps_tell_nothing_yet() -> None:
    engine = Engine()
    assert engine.compute(WORK[:1] * (LEAST_STEPS - 1)) == StepCost()
    assert engine.compute(WORK[:1]) != StepCost()


def test_steps_that_are_held_up_for_seconds_do_not_count_more_than_others() -> None:
    engine = Engine()
    engine.compute(WORK[1:2], longer_s=5.0)
    for _ in range(10):
        engine.compute(WORK * 10)
        engine.compute(WORK[:1], longer_s=5.0)
    assert_is_cost(engine.compute(WORK), share=0.05)


@pytest.mark.parametrize("alike", [(8192, 0), (0, 64), (4096, 64)])
def test_steps_that_are_all_alike_are_told_right_however_their_seconds_are_divided(alike: tuple[int, int]) -> None:
    cost = Engine().compute([alike] * 100)
    assert cost.seconds(*alike) == pytest.approx(COST.seconds(*alike), rel=0.001)
    assert (cost.chunk_token_s > 0, cost.decode_row_s > 0) == (alike[0] > 0, alike[1] > 0), "what never came is not measured"


def test_what_no_step_tells_any_more_stays_as_it_was() -> None:
    engine = Engine()
    engine.compute(WORK * 20)
    for _ in range(200):
        cost = engine.compute([(0, 64)] * 100)
    assert_is_cost(cost)


def test_another_pace_is_learned() -> None:
    engine = Engine()
    engine.compute(WORK * 100)
    for _ in range(100):
        cost = engine.compute(WORK * 6, longer_s=0.01)
    assert cost.step_s == pytest.approx(COST.step_s + 0.01, rel=0.02)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 10), (10, 1)])
def test_a_pace_that_changes_as_a_whole_is_learned_within_a_few_half_lives(before: int, after: int) -> None:
    """As when a GPU is throttled, or is free again."""
    meter, now = CostMeter(), 0.0

    def compute(steps: int, factor: int) -> StepCost:
        nonlocal now
        for tokens, rows in islice(cycle(WORK), steps):
            began_s, what = now, plan(tokens, rows)
            now += factor * seconds(what)
            meter.step(what, began_s, now)
            if began_s // 1.0 != now // 1.0:
                meter.read()
        return meter.read()

    assert compute(8 * HALF_LIFE_STEPS, before).chunk_token_s == pytest.approx(before * COST.chunk_token_s, rel=0.05)
    cost = compute(5 * HALF_LIFE_STEPS, after)
    assert (cost.step_s, cost.chunk_token_s) == pytest.approx((after * COST.step_s, after * COST.chunk_token_s), rel=0.25)


def test_a_step_that_waited_for_the_one_before_began_when_that_ended_and_two_of_one_turn_count_as_one() -> None:
    meter, now, chance = CostMeter(), 0.0, Random(1)
    for _ in range(100):
        some = [plan(*chance.choice(WORK)) for _ in range(3)]
        began_s = now + 1.0  # it was idle meanwhile
        now = began_s + seconds(some[0])
        meter.step(some[0], began_s, now)
        now += seconds(some[1]) + seconds(some[2])
        meter.step(some[1], began_s, now)
        meter.step(some[2], began_s + 0.001, now)
    assert_is_cost(meter.read())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 300), st.floats(1e-4, 1e3)), min_size=LEAST_STEPS, max_size=60))
def test_whatever_the_steps_took_nothing_is_negative_and_no_other_pace_fits_much_better(
    steps: list[tuple[int, int, float]],
) -> None:
    meter, now = CostMeter(), 0.0
    for tokens, rows, took_s in steps:
        meter.step(plan(tokens, rows), now, now + took_s)
        now += took_s
    cost = meter.read()
    fit = np.array([cost.step_s, cost.chunk_token_s, cost.decode_row_s])
    assert (fit >= 0).all() and fit.any()
    what = np.array([(1, tokens, rows) for tokens, rows, _ in steps], dtype=float)
    took = np.array([took_s for *_, took_s in steps])
    weights = 1 / np.maximum(took, took.mean())  # as for the first fit

    def error(x: np.ndarray) -> float:
        return float((((what @ x - took) * weights) ** 2).sum())

    scale = 1 / np.maximum(what.max(axis=0), 1)
    for number in range(3):
        for change in (-0.1, 0.1):
            other = fit.copy()
            other[number] = max(0.0, fit[number] + change * scale[number] * took.mean())
            assert error(fit) <= error(other) + 0.01 * len(steps)
