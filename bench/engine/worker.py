"""A process of `launch bench engine`: does one task after the other and reports each figure as soon as it has it.

Owns which function does which task. Run as `python -m bench.engine.worker`. Ends when a task fails, with the reason as the last
line that it prints, or when its parent is gone. Imports what is heavy only for a task that needs it.
"""

import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias, assert_never

import msgspec

from bench.engine.figures import Done, Figure, WorkerReport
from bench.engine.plan import (
    AnyTask,
    Build,
    CheckAnswers,
    CheckOperations,
    CheckRing,
    MeasureCeilings,
    MeasureExposed,
    MeasureFloor,
    MeasureHost,
    MeasureOffline,
    MeasurePush,
    MeasureSampling,
    MeasureSteps,
)
from common.errors import TandemError
from common.processes.lines import Progress
from common.processes.parent import Parent

Say: TypeAlias = Callable[[str], None]


def figures_of(task: AnyTask, say: Say) -> Iterator[Figure]:
    """Do the task. say: called with what it is doing."""
    match task:
        case CheckRing() | MeasurePush() | MeasureExposed():
            from bench.engine import fleets

            return fleets.figures_of(task, say)
        case CheckOperations():
            from bench.engine import operations

            return operations.check(task)
        case CheckAnswers():
            from bench.engine import answers

            return answers.check(task, say)
        case MeasureHost():
            from bench.engine import host

            return host.measure(task)
        case MeasureSampling():
            from bench.engine import sampling

            return sampling.measure(task, say)
        case MeasureOffline():
            from bench.engine import offline

            return offline.measure(task, say)
        case MeasureCeilings():
            from bench.engine import ceilings

            return ceilings.measure(task)
        case Build():
            from bench.engine import steps

            return steps.build(task, say)
        case MeasureFloor():
            from bench.engine import floor

            return floor.measure(task, say)
        case MeasureSteps():
            from bench.engine import steps

            return steps.measure(task, say)
        case _:
            assert_never(task)


def main() -> None:
    parent: Parent[AnyTask, WorkerReport] = Parent(msgspec.json.Decoder[AnyTask](AnyTask))

    def say(text: str) -> None:
        parent.report(Progress(text=text))

    def act(task: AnyTask) -> WorkerReport:
        for figure in figures_of(task, say):
            parent.report(figure)
        return Done()

    try:
        parent.obey(act)
    except TandemError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
