"""The steps that run before an instance is ready."""

from pathlib import Path

import pytest

from common.engine.pending import PendingStep
from common.engine.plan import Plan
from common.engine.warm_up import WARM_UP_PAGES, warm_up
from tests.common.engine.checkpoints import qwen3, saved
from tests.common.engine.test_graphs import CONTEXT, EVERY_KIND, ROWS, Engine, prompts


@pytest.mark.parametrize(("chunk_tokens", "max_rows"), [(20, ROWS), (5000, ROWS), (16, 1), (CONTEXT, 2)])
def test_the_largest_steps_run_on_a_pool_of_a_page_and_later_answers_are_as_if_they_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, max_rows: int
) -> None:
    path = saved(qwen3(), tmp_path)
    fresh, warmed = Engine(path), Engine(path)
    plans: list[Plan] = []
    launch = warmed.steps.launch

    def noted(plan: Plan) -> PendingStep:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(warmed.steps, "launch", noted)
    warm_up(warmed.steps, 8, chunk_tokens, max_rows, CONTEXT)
    assert max(plan.chunk_tokens for plan in plans) == min(chunk_tokens, CONTEXT)
    assert max(len(plan.decode_rows) for plan in plans) == max_rows
    assert {int(page) for plan in plans for start in plan.starts for page in start.pages} == set(range(WARM_UP_PAGES))
    assert warmed.answers(prompts(4), EVERY_KIND) == fresh.answers(prompts(4), EVERY_KIND)
