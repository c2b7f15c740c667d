"""Tasks that all members do once, beside their steps: who has done them, who must be told again, and what came of them.

Owns the tasks that are under way. Opens no socket, reads no clock. Does not know what a task is for.

    begin ─► DoTask to each ─► TaskDone of all ─► answer(results)
                   └─ a member cannot, leaves, or takes too long ─► answer(error), which names it
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.deadlines import earliest
from common.errors import TandemError, Unavailable
from common.ids import Life
from common.instance.ports import Send
from common.messages import DoTask, TaskDone
from common.messages.tasks import Task
from router.members import Member


@dataclass(slots=True, eq=False)
class FleetTask:
    """A task that is under way."""

    tasks: Mapping[Life, Task]
    """What each member is to do."""
    answer: Callable[[dict[Life, str] | TandemError], object]
    """Called once, when it is over."""
    deadline_s: float
    results: dict[Life, str] = field(default_factory=dict)


class FleetTasks:
    """find: the member that is this life."""

    def __init__(self, find: Callable[[Life], Member | None]) -> None:
        self._find = find
        self._last = 0
        self._under_way: dict[int, FleetTask] = {}

    def begin(
        self,
        tasks: Mapping[Life, Task],
        answer: Callable[[dict[Life, str] | TandemError], object],
        deadline_s: float,
    ) -> list[Send]:
        """tasks: what each member is to do. answer: called with the result of each, or with the first error. Raises
        Unavailable when there is no member, Conflict."""
        if not tasks:
            raise Unavailable("no instance is a member of the fleet")
        for life, task in tasks.items():
            member = self._find(life)
            if member is not None:
                member.check_knows(task)
        self._last += 1
        self._under_way[self._last] = FleetTask(tasks, answer, deadline_s)
        return [self._order(self._last, life, task) for life, task in tasks.items()]

    @property
    def last_over(self) -> int:
        """All tasks up to this number are over."""
        return min(self._under_way, default=self._last + 1) - 1

    def heard(self, member: Member) -> list[Send]:
        """A member that has not answered yet is told again with each of its heartbeats: messages may be lost."""
        waiting = ((number, each) for number, each in self._under_way.items() if member.life not in each.results)
        return [
            self._order(number, member.life, each.tasks[member.life]) for number, each in waiting if member.life in each.tasks
        ]

    def done(self, message: TaskDone, member: Member) -> None:
        task = self._under_way.get(message.number)
        if task is None or member.life not in task.tasks:
            return
        if message.failed is not None:
            self._end(message.number, message.failed.to_error(f"{member.info.id}: {message.failed.message}"))
            return
        task.results[member.life] = message.result
        if len(task.results) == len(task.tasks):
            self._end(message.number, task.results)

    def left(self, member: Member) -> None:
        for number, task in list(self._under_way.items()):
            if member.life in task.tasks.keys() - task.results.keys():
                self._end(number, Unavailable(f"{member.info.id} has left the fleet meanwhile: try again"))

    def tick(self, now: float) -> None:
        for number, task in list(self._under_way.items()):
            if now >= task.deadline_s:
                late = ", ".join(sorted(life.id for life in task.tasks if life not in task.results))
                self._end(number, Unavailable(f"{late} did not answer in time"))

    def next_deadline(self) -> float | None:
        return earliest(*(task.deadline_s for task in self._under_way.values()))

    def _order(self, number: int, life: Life, task: Task) -> Send:
        return Send(life.id, DoTask(number=number, task=task, incarnation=life.incarnation))

    def _end(self, number: int, outcome: dict[Life, str] | TandemError) -> None:
        self._under_way.pop(number).answer(outcome)
