"""What members are told to do until they have: tasks that all of them do once, beside their steps, and a change of one's role.

Owns what is under way: who has done it, who must be told again, and what came of it. Opens no socket, reads no clock. Does not
know what a task is for, nor how an instance changes its role: see `common/instance/roles.py`.

    begin ─► DoTask to each ─► TaskDone of all ─► answer(results)
                   └─ a member cannot, leaves, or takes too long ─► answer(error), which names it
    begin ─► TakeRole, again with each heartbeat ─► its heartbeat says that it serves in the role ─► answer(member)
                                                └─ RoleKept, another life in another role, or too late ─► answer(error)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from common.deadlines import earliest
from common.errors import Conflict, DeadlinePassed, TandemError, Unavailable
from common.ids import InstanceId, Life, ServingRole
from common.instance.ports import Send
from common.instance.roles import CHANGE_S
from common.messages import DoTask, RoleKept, TakeRole, TaskDone
from common.messages.variants import Task
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


@dataclass(slots=True, eq=False)
class FleetTasks:
    """Tasks that are under way, by number."""

    _find: Callable[[Life], Member | None]
    """The member that is this life."""
    _last: int = 0
    _under_way: dict[int, FleetTask] = field(default_factory=dict)

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


LATEST_S = CHANGE_S + 5.0
"""An instance gives up before that, and says so."""


@dataclass(slots=True, eq=False)
class _Change:
    order: TakeRole
    member: Member
    """The life that was told."""
    answer: Callable[[Member | TandemError], object]
    ends_s: float


@dataclass(slots=True, eq=False)
class FleetRoles:
    """Changes of roles that are under way, by instance."""

    _members: Callable[[], Iterator[Member]]
    """Yields all of the fleet."""
    _find: Callable[[Life], Member | None]
    """The member that is a life."""
    _judge: Callable[[Member], None]
    """Called when `Member.told_role` has changed."""
    _under_way: dict[InstanceId, _Change] = field(default_factory=dict)
    _last: int = 0

    def begin(
        self, member: Member, role: ServingRole, answer: Callable[[Member | TandemError], object], now: float
    ) -> list[Send]:
        """Have the member serve in this role. answer: called once, with the life that does, or why it does not. Raises
        Conflict."""
        name = member.info.id
        if name in self._under_way:
            raise Conflict(f"{name} is taking the role {self._under_way[name].order.role} at this moment", field="role")
        if member.role == role:
            answer(member)
            return []
        if member.draining:
            raise Conflict(f"{name} is leaving the fleet", field="role")
        if role == "prefill" and not any(
            each.info.role == "decode" and each.trouble is None and each is not member for each in self._members()
        ):
            only = f"{name} is the only decode instance that takes requests, and without one none can be served"
            raise Conflict(f"{only}: give that role to another one first", field="role")
        order = TakeRole(number=self._last + 1, role=role, incarnation=member.info.incarnation)
        member.check_knows(order)
        self._last += 1
        self._under_way[name] = _Change(order, member, answer, now + LATEST_S)
        if (role == "prefill") != (member.info.role == "prefill"):
            member.told_role = role
            self._judge(member)
        return [Send(member.info.id, order)]

    def heard(self, member: Member) -> list[Send]:
        """Its heartbeat has come."""
        change = self._under_way.get(member.info.id)
        if change is None:
            return []
        if member.role == change.order.role:
            self._end(change, member)
        elif member.life == change.member.life:
            if member is not change.member:  # it was silent for a while, and is back
                member.told_role, change.member = change.member.told_role, member
                self._judge(member)
            return [Send(member.info.id, change.order)]
        else:
            self._end(change, Conflict(f"{member.info.id} was started anew meanwhile, as {member.role}", field="role"))
        return []

    def kept(self, message: RoleKept, member: Member) -> None:
        """It says that it stays in its role."""
        change = self._under_way.get(member.info.id)
        if change is not None and change.order.number == message.number:
            self._end(change, Conflict(f"{member.info.id} stays in the role {member.role}: {message.reason}", field="role"))

    def tick(self, now: float) -> None:
        for name, change in list(self._under_way.items()):
            if now >= change.ends_s:
                self._end(change, DeadlinePassed(f"{name} did not take the role {change.order.role} within {LATEST_S:g} s"))

    def next_deadline(self) -> float | None:
        return earliest(*(change.ends_s for change in self._under_way.values()))

    def _end(self, change: _Change, outcome: Member | TandemError) -> None:
        del self._under_way[change.member.info.id]
        if self._find(change.member.life) is change.member:
            change.member.told_role = None
            self._judge(change.member)
        change.answer(outcome)
