"""Sequences that are planned ahead, on an engine whose next token depends on every byte of its KV."""

import numpy as np
import pytest

from common.executor import StepPlan, StepResult
from common.sampling_params import SamplingParams
from tests.engine.driver import Driver
from tests.engine.planned import SequencePlanner
from tests.engine.toy import ToyExecutor

GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


def result_of(executor: ToyExecutor, plan: StepPlan) -> StepResult:
    result = executor.launch(plan).result
    assert result is not None
    return result


@pytest.mark.parametrize("rows", [3, 8])
def test_sequences_that_share_a_batch_answer_as_each_would_alone(rows: int) -> None:
    """With less memory than all sequences need at once."""
    prompts, answers = np.array([1, 8, 9, 40, 17, 3, 25]), np.array([20, 1, 8, 30, 2, 16, 9])
    executor = ToyExecutor(24, rows)
    planner = SequencePlanner(executor.description, 16, prompts, answers)
    results = [result_of(executor, plan) for plan in iter(planner.next, None)]
    assert sum(len(result.tokens) for result in results) == answers.sum() > len(results)
    found: list[list[int]] = []
    of_row: dict[int, list[int]] = {}
    for result in results:
        for start in result.plan.starts:  # sequences start in their order
            of_row[start.row] = []
            found.append(of_row[start.row])
        for row, token in zip(result.plan.sampled_rows.tolist(), result.tokens.tolist(), strict=True):
            of_row[row].append(token)
    for prompt, count, answer in zip(planner.prompts, answers.tolist(), found, strict=True):
        alone = ToyExecutor(24, 1)

        def compute(plan: StepPlan, alone: ToyExecutor = alone) -> StepResult:
            return result_of(alone, plan)

        assert [answer] == Driver(compute, alone.description).answers([prompt], count, GREEDY)
