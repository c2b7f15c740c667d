"""The torch executor: the model runner on a thread of its own, so that launching a step never waits for one.

Owns the engine thread and the steps in flight. Knows no model. Implements `common.engine.executor.Executor` on CPU and CUDA.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from common.config import EngineConfig, ModelConfig
from common.engine.executor import ExecutorFailed
from common.engine.model_runner import ModelRunner
from common.engine.plan import Plan, StepResult
from common.ids import Int32Array

STEPS_QUEUED = 8
STOP_S = 30.0


@dataclass(slots=True, eq=False)
class _Step:
    """A step in flight. The engine thread sets its fields, the loop's thread reads them."""

    plan: Plan
    result: StepResult | None = None
    failure: Exception | None = None
    layers_done: int = 0
    ends_s: float | None = None

    def poll(self) -> StepResult | None:
        if self.failure is not None:
            raise ExecutorFailed(f"step {self.plan.step} failed: {self.failure}") from self.failure
        return self.result


class TorchExecutor:
    """Loads the model in its constructor. wake: called on the engine thread when a step completes or progresses."""

    def __init__(
        self, model: ModelConfig, engine: EngineConfig, wake: Callable[[], None], progress: Callable[[str], None]
    ) -> None:
        if engine.threads:
            torch.set_num_threads(engine.threads)
        self._threads = torch.get_num_threads()
        self._runner = ModelRunner(model, engine, progress)
        self.description = self._runner.description
        self._wake = wake
        self._steps: queue.Queue[_Step | None] = queue.Queue(STEPS_QUEUED)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def launch(self, plan: Plan) -> _Step:
        step = _Step(plan)
        self._steps.put_nowait(step)
        return step

    def digest_pages(self, pages: Int32Array) -> bytes:
        return self._runner.digest_pages(pages)

    def close(self) -> None:
        if self._thread.is_alive():
            self._steps.put(None)
            self._thread.join(STOP_S)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while (step := self._steps.get()) is not None:
            try:
                step.result = self._runner.run(step.plan, partial(self._advance, step))
            except Exception as error:  # noqa: BLE001 - the thread's outermost door; the step's poll raises it
                step.failure = error
            self._wake()

    def _advance(self, step: _Step, layers: int) -> None:
        step.layers_done = layers
        self._wake()
