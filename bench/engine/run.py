"""`launch bench engine`: builds, checks and times the engine on one device, in processes of its own.

Owns the order, the time and the processes. A task that fails or takes too long is reported in its place, with what it had found
by then, and the next one gets a new process. Measures nothing itself and uses no device. Prints only its progress, on stderr.
"""

import contextlib
import itertools
import re
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from bench.engine import report
from bench.engine.figures import Done, EngineOutcome, Figure, TaskRun, WorkerReport, judge
from bench.engine.plan import AnyTask, Build, EngineBench, tasks
from bench.report import publish, say, this_hardware
from common.config import EngineConfig
from common.processes.child import KILL_S, ChildEnded, Respondent
from common.processes.lines import Progress

LEAST_S = 5.0
"""A task is not begun with less time than this."""
BUILDS_AT_ONCE = 6
_ERROR = re.compile(r"[A-Za-z][\w.]*(Error|Exception|Failed|Refused|Ended): ")


def run(bench: EngineBench, engine: EngineConfig, is_quick: bool, command: str, markdown: bool) -> int:
    """Measure, print the report and write the file. Returns the exit status: 1 if a task failed, else 0, goals met or not."""
    hardware = this_hardware()
    on_cuda = engine.device.startswith("cuda") or (engine.device == "auto" and bool(hardware.gpus))
    began = time.monotonic()
    with contextlib.closing(Bench(began + bench.budget_s)) as measured:
        for is_build, group in itertools.groupby(tasks(bench, engine, is_quick, on_cuda), lambda task: isinstance(task, Build)):
            if is_build:
                measured.at_once(group)
            else:
                measured.one_by_one(group)
    outcome = EngineOutcome(
        command=command,
        hardware=hardware,
        goals=judge(measured.figures),
        device=engine.device,
        seconds=time.monotonic() - began,
        runs=measured.runs,
        figures=measured.figures,
    )
    publish(outcome, report.markdown(outcome) if markdown else report.text(outcome), bench.json)
    return 1 if any(run.failure for run in outcome.runs) else 0


class Bench:
    """What is known so far, and the process of the tasks that need none of their own. until: on the monotonic clock."""

    def __init__(self, until: float) -> None:
        self.figures: list[Figure] = []
        self.runs: list[TaskRun] = []
        self._until = until
        self._shared: _Worker | None = None

    def one_by_one(self, tasks: Iterable[AnyTask]) -> None:
        for task in tasks:
            if task.is_alone:
                self.close()
                with contextlib.closing(_Worker()) as worker:
                    self._do(worker, task)
                continue
            if self._shared is None:
                self._shared = _Worker()
            if not self._do(self._shared, task):
                self.close()

    def at_once(self, tasks: Iterable[AnyTask]) -> None:
        """For tasks that only compile: none of them is timed for its own sake."""

        def do(task: AnyTask) -> None:
            with contextlib.closing(_Worker()) as worker:
                self._do(worker, task)

        with ThreadPoolExecutor(BUILDS_AT_ONCE) as pool:
            list(pool.map(do, tasks))

    def close(self) -> None:
        """End the shared process. Its device memory is free then."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _do(self, worker: "_Worker", task: AnyTask) -> bool:
        """Returns whether the worker can go on."""
        began = time.monotonic()
        left_s = min(task.limit_s, self._until - began)
        if left_s < LEAST_S:
            self.runs.append(TaskRun(label=task.label, seconds=0.0, failure="no time was left (--budget-s)"))
            return True
        say(task.label)
        account = ""
        try:
            for figure in worker.figures(task, began + left_s):
                self.figures.append(figure)
        except (ChildEnded, TimeoutError) as error:
            account = str(error)
            say(f"{task.label} failed: {account}")
        failure = _reason(account)
        self.runs.append(TaskRun(label=task.label, seconds=time.monotonic() - began, failure=failure, account=account))
        return not account


class _Worker:
    """A process that does tasks, one after the other."""

    def __init__(self) -> None:
        decoder = msgspec.json.Decoder[WorkerReport](WorkerReport)
        command = [sys.executable, "-P", "-m", "bench.engine.worker"]
        self._child: Respondent[AnyTask, WorkerReport] = Respondent("engine worker", command, decoder)

    def figures(self, task: AnyTask, until: float) -> Iterator[Figure]:
        """As they are found. Raises ChildEnded, or TimeoutError at that time of the monotonic clock."""
        self._child.order(task)
        doing = ""
        while True:
            report = self._child.next_report(until - time.monotonic())
            match report:
                case None:
                    raise TimeoutError(f"it took too long and was stopped; it was at: {doing or 'its first step'}")
                case Progress():
                    doing = report.text
                    say(f"  {task.label}: {report.text}")
                case Done():
                    return
                case _:
                    yield report

    def close(self) -> None:
        """A worker that is busy is not waited for: what it starts ends with it."""
        self._child.kill()
        self._child.wait(KILL_S)


def _reason(account: str) -> str:
    """The reason in an account: the last line that names an error, because CUDA's errors end in general advice; or the last."""
    lines = [line.strip() for line in account.splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.match(line)]
    return (named or lines or [""])[-1]
