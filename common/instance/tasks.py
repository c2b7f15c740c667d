"""The tasks of an instance: what routers have it do once, and what came of that.

Owns which tasks are under way and the latest answers. Does not know what a task is: the executor does it beside its steps.
"""

from collections.abc import Iterable, Iterator

from common.errors import TandemError
from common.executor import Executor, Work, take_done
from common.ids import InstanceId
from common.instance.ports import Send
from common.instance.roles import InstanceRole
from common.messages import DoTask, Failed, TaskDone
from common.messages.base import fits
from common.messages.tasks import JoinGroup, LeaveGroup, ReadAdapter, Task

ANSWERS_KEPT = 256
"""A router that has not heard the answer asks again within seconds."""


class InstanceTasks:
    """Tasks by the router that ordered them and its number."""

    def __init__(self, role: InstanceRole, executor: Executor) -> None:
        self._role, self._executor = role, executor
        self._tasks: dict[tuple[InstanceId, int], Task] = {}
        self._under_way: dict[tuple[InstanceId, int], Work] = {}
        self._answers: dict[tuple[InstanceId, int], TaskDone] = {}
        """The latest ones, the oldest first."""
        self.groups: dict[str, InstanceId] = {}
        """The router that had this instance join each trainer's group."""

    @property
    def ends_s(self) -> Iterable[float | None]:
        """When each ends that is under way, if that is known in advance."""
        return [work.ends_s for work in self._under_way.values()]

    @property
    def is_reading_adapter(self) -> bool:
        return any(isinstance(task, ReadAdapter) for task in self._tasks.values())

    def order(self, router: InstanceId, order: DoTask) -> list[Send]:
        """A router that has welcomed this instance orders something."""
        key = router, order.number
        if not fits(order.incarnation, self._role.me.incarnation) or key in self._under_way:
            return []
        if key not in self._answers:
            try:
                self._under_way[key] = self._executor.perform(order.task)
            except TandemError as error:
                self._answer(key, "", Failed.of(error))
            else:
                self._tasks[key] = order.task
                match order.task:
                    case JoinGroup(group=group):
                        self.groups[group] = router
                    case LeaveGroup(group=group):
                        self.groups.pop(group, None)
                return []
        return [Send(router, self._answers[key])]

    def poll(self) -> Iterator[tuple[Task, TaskDone, InstanceId]]:
        """What has ended since the last call: the task, its answer, and the router that is to get it."""
        for key, result, failed in take_done(self._under_way):
            yield self._tasks.pop(key), self._answer(key, result, failed), key[0]

    def forget(self, router: InstanceId) -> None:
        """This life of a router is gone: nobody waits for its answers, and no trainer sends by it."""
        for key in [key for key in self._under_way if key[0] == router]:
            del self._under_way[key], self._tasks[key]
        for group in [group for group, owner in self.groups.items() if owner == router]:
            del self.groups[group]
            self._executor.perform(LeaveGroup(group))

    def _answer(self, key: tuple[InstanceId, int], result: str, failed: Failed | None) -> TaskDone:
        me = self._role.me
        answer = TaskDone(id=me.id, incarnation=me.incarnation, number=key[1], result=result, failed=failed)
        self._answers[key] = answer
        if len(self._answers) > ANSWERS_KEPT:
            del self._answers[next(iter(self._answers))]
        return answer
