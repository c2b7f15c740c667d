"""vLLM with steps that compute nothing and last a given time, for `tests.soak.fronts`.

`vllm serve MODEL --distributed-executor-backend vllm_timed.TimedExecutor`, in an environment that has vLLM and with this file's
folder on its path. STEP_COST_S: what a step takes, as --step-cost: seconds, for a token of a prompt (left out here), for a row.
The model is loaded, so that vLLM starts as it always does, and never asked.
"""

import os
import time
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor  # type: ignore[import-not-found]
from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found]

TOKEN = 536


def _step_s(rows: int) -> float:
    step_s, _, row_s = map(float, os.environ["STEP_COST_S"].split(","))
    return step_s + row_s * rows if rows else 0.0


class Due(Future[Any]):
    """What a step gives, when it has taken its time."""

    def __init__(self, output: Any, due_s: float) -> None:
        super().__init__()
        self._due_s = due_s
        self.set_result(output)

    def result(self, timeout: float | None = None) -> Any:
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        return super().result(timeout)


class TimedExecutor(UniProcExecutor):  # type: ignore[misc]
    """Every request of a step gets one token: prompts must be shorter than a step's tokens."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return False

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        names = list(scheduler_output.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[TOKEN] for _ in names],
        )
        due_s = time.perf_counter() + _step_s(len(names))
        future = Due(output, due_s)
        return future if non_block else future.result()
