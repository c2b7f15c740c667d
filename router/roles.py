"""Roles: instances that were told to serve in another one, and what came of it.

Owns what is under way. Opens no socket, reads no clock. Does not know how an instance changes its role: see
`common/instance/roles.py`.

    begin ─► TakeRole, again with each heartbeat ─► its heartbeat says that it serves in the role ─► answer(member)
                                                └─ RoleKept, another life in another role, or too late ─► answer(error)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.deadlines import earliest
from common.errors import Conflict, DeadlinePassed, TandemError
from common.ids import InstanceId, Life, ServingRole
from common.instance.ports import Send
from common.instance.roles import CHANGE_S
from common.messages import RoleKept, TakeRole
from router.members import Member

LATEST_S = CHANGE_S + 5.0
"""An instance gives up before that, and says so."""


@dataclass(slots=True, eq=False)
class _Change:
    order: TakeRole
    member: Member
    """The life that was told."""
    answer: Callable[[Member | TandemError], object]
    ends_s: float


class FleetRoles:
    """members: yields all of the fleet. find: the member that is a life. judge: called when `Member.told_role` has changed."""

    def __init__(
        self,
        members: Callable[[], Iterator[Member]],
        find: Callable[[Life], Member | None],
        judge: Callable[[Member], None],
    ) -> None:
        self._members, self._find, self._judge = members, find, judge
        self._under_way: dict[InstanceId, _Change] = {}
        self._last = 0

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
