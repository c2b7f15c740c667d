"""Many sequences at once, without a scheduler or HTTP: an executor, driven as an instance's worker drives it.

Owns the loop and its clock. Every token is known to be wanted in advance, so plans do not depend on answers.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

from bench.engine.batch import OfflinePlanner
from bench.engine.figures import Offline
from bench.engine.models import lengths_of, shape_folder
from bench.engine.plan import MeasureOffline
from common.executor import Executor, StepHandle
from engine.device import with_device_defaults
from engine.torch_executor import TorchExecutor

WAIT_S = 60.0


def measure(task: MeasureOffline, say: Callable[[str], None]) -> Iterator[Offline]:
    prompts, answers = lengths_of(task.sequences, task.fewest, task.most, seed=1)
    ready = threading.Event()
    with shape_folder(task.model) as model:
        engine = with_device_defaults(replace(task.engine, load_format="dummy", grammar="off"))
        with closing(TorchExecutor(model, engine, ready.set, say)) as executor:
            for in_flight in task.steps_in_flight:
                say(f"{task.sequences} sequences, {in_flight} steps in flight")
                planner = OfflinePlanner(executor.description, engine.chunk_tokens, prompts, answers)
                began = time.perf_counter()
                steps, tokens = run(executor, planner, in_flight, ready)
                seconds = time.perf_counter() - began
                assert tokens == answers.sum(), "an answer has another length than was asked for"
                yield Offline(
                    model=task.model,
                    graphs=engine.graphs,
                    steps_in_flight=in_flight,
                    sequences=task.sequences,
                    prompt_tokens=int(prompts.sum()),
                    answer_tokens=int(tokens),
                    steps=steps,
                    seconds=seconds,
                )


def run(executor: Executor, planner: OfflinePlanner, in_flight: int, ready: threading.Event) -> tuple[int, int]:
    """Returns the number of steps and of sampled tokens. ready: set when a step may have completed."""
    handles: deque[StepHandle] = deque()
    steps = tokens = 0
    plan = planner.next()
    while plan is not None or handles:
        while plan is not None and len(handles) < in_flight:
            handles.append(executor.launch(plan))
            steps += 1
            plan = planner.next()
        while handles and (result := handles[0].poll()) is not None:
            tokens += len(result.tokens)
            handles.popleft()
        if handles and (plan is None or len(handles) == in_flight):
            assert ready.wait(WAIT_S), f"a step took more than {WAIT_S:g} s"
            ready.clear()
    return steps, tokens
