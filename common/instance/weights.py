"""The weights of an instance: what it computes with, what is staged beside that, and when it changes to it; and its tasks.

Owns the orders of routers about weights, steps and tasks: what is under way, and the latest answers. Does not know how weights
are read or what a task is, which the executor does, nor what becomes of requests: the worker launches no step while `is_holding`,
and carries out a switch when none is in flight.

    StageWeights ─► executor.stage ─► poll ─► WeightsStaged      to the router that asked; asked again, it answers again
    SwitchWeights ─► is_holding ─► the steps in flight return ─► requests end, caches are flushed, executor.switch
"""

from collections.abc import Iterable, Iterator

from common.errors import TandemError, Unavailable
from common.executor import Executor, Work, take_done
from common.ids import Digest, InstanceId
from common.instance.ports import Send
from common.instance.roles import InstanceRole
from common.messages import (
    DoTask,
    DropWeights,
    Failed,
    HoldSteps,
    StageWeights,
    SwitchWeights,
    TaskDone,
    WeightsOrder,
    WeightsStaged,
)
from common.messages.base import fits
from common.messages.variants import FIRST_VERSION, JoinGroup, LeaveGroup, ReadAdapter, Task


class InstanceWeights:
    """What routers order, and how far it is carried out. `version` is what people call the weights in use."""

    def __init__(self, role: InstanceRole, executor: Executor) -> None:
        self._role, self._executor = role, executor
        self.version = FIRST_VERSION
        self.changes = 0
        """How often they have changed."""
        self._orderer: tuple[InstanceId, int] | None = None
        """The router that had the present weights staged, and the number of its update."""
        self._staged: dict[tuple[InstanceId, int], Work] = {}
        """While they are being made ready, by their orderer."""
        self._answer: WeightsStaged | None = None
        """What became of it."""
        self._switch: SwitchWeights | None = None
        """The order that waits for the steps in flight."""
        self._holders: set[InstanceId] = set()
        """The routers that want no step."""

    @property
    def digest(self) -> Digest:
        return self._executor.weights

    @property
    def staged_update(self) -> int:
        """The update whose weights take memory beside those in use; 0: none."""
        return 0 if self._orderer is None else self._orderer[1]

    @property
    def told(self) -> tuple[Digest, str, bool]:
        """What routers hear of it with heartbeats."""
        return self.digest, self.version, self.is_held

    @property
    def is_held(self) -> bool:
        """A router wants no step."""
        return bool(self._holders)

    @property
    def is_holding(self) -> bool:
        """No step may be launched."""
        return self.is_held or self._switch is not None

    @property
    def is_switching(self) -> bool:
        """The weights are to change as soon as no step is in flight."""
        return self._switch is not None

    @property
    def ends_s(self) -> float | None:
        """When what is being made ready will be, if that is known in advance."""
        return next((work.ends_s for work in self._staged.values()), None)

    def order(self, router: InstanceId, order: WeightsOrder) -> list[Send]:
        """A router that has welcomed this instance orders something. Repeating an order changes nothing."""
        match order:
            case StageWeights() if fits(order.incarnation, self._role.me.incarnation):
                return self._stage(router, order)
            case SwitchWeights() if fits(order.incarnation, self._role.me.incarnation):
                answer = self._answer
                if answer is not None and answer.weights and (order.update, order.weights) == (answer.update, answer.weights):
                    self._switch = order
                elif order.weights == self.digest:
                    self.version = order.version
                else:  # another update has taken its place meanwhile
                    lost = Failed.of(Unavailable(f"{self._role.me.id} has not staged {order.weights}, or not any more"))
                    return [Send(router, self._staged_as(order.update, failed=lost))]
            case DropWeights():
                if self._orderer == (router, order.update) and self._switch is None:
                    self._drop()
            case HoldSteps():
                (self._holders.add if order.hold else self._holders.discard)(router)
        return []

    def forget(self, router: InstanceId) -> None:
        """This life of a router is gone: nobody gives its further orders."""
        self._holders.discard(router)
        if self._orderer is not None and self._orderer[0] == router and self._switch is None:
            self._drop()

    def poll(self) -> list[Send]:
        """Tell the router when the weights are ready, or why they never will be."""
        for (router, update), result, failed in take_done(self._staged):
            self._answer = self._staged_as(update, Digest(result), failed)
            return [Send(router, self._answer)]
        return []

    def switch(self) -> None:
        """Compute with what was staged from now on. No step is in flight, and every request has ended."""
        assert self._switch is not None
        self._executor.switch()
        self.version, self.changes = self._switch.version, self.changes + 1
        self._switch = self._answer = self._orderer = None

    def _staged_as(self, update: int, weights: Digest = Digest(""), failed: Failed | None = None) -> WeightsStaged:  # noqa: B008
        me = self._role.me
        return WeightsStaged(id=me.id, incarnation=me.incarnation, update=update, weights=weights, failed=failed)

    def _stage(self, router: InstanceId, order: StageWeights) -> list[Send]:
        if self._switch is not None:
            return []
        if self._orderer == (router, order.update):
            return [] if self._answer is None else [Send(router, self._answer)]
        if self._orderer is not None and self._orderer[0] != router:
            busy = Failed.of(
                Unavailable(f"{self._orderer[0]} has {self._role.me.id} change its weights at this moment: try again")
            )
            return [Send(router, self._staged_as(order.update, failed=busy))]
        self._drop()
        self._orderer = router, order.update
        self._staged[self._orderer] = self._executor.stage(order.source)
        return self.poll()

    def _drop(self) -> None:
        self._executor.drop_staged()
        self._staged.clear()
        self._answer = self._orderer = None


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
