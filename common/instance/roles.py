"""The role of an instance, and how it changes while its process stays.

Owns the order that is under way, how long it may take, and the names of the lives. Does not know what a role does: the worker
tells the scheduler of the present role to leave, and makes that of the other one when nothing is left.

    TakeRole ─► prefill ↔ decode   LeaveRole ─► what waits ends, what runs is handed off or ends; routers resume it elsewhere
                                      ├─ nothing is left ──────► Goodbye, and another life registers: with the same pool, prefix
                                      │                          cache, engine and transfers
                                      └─ CHANGE_S have passed ─► StayInRole, RoleKept
             └► decode ↔ both      told with the next heartbeat; nothing ends
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from common.ids import Incarnation, InstanceId, Role, ServingRole
from common.instance.ports import Send
from common.messages import InstanceInfo, RoleKept, TakeRole


def is_of_one_process(one: Incarnation, other: Incarnation) -> bool:
    """Whether these lives follow each other in one process, by `InstanceRole.become`."""
    return one.partition(".")[0] == other.partition(".")[0]


CHANGE_S = 10.0
"""How long an instance may take to get rid of what it has. Otherwise it stays: a writer is silent, or a push does not end."""
HAND_OFF_S = {"prefill": 0.3, "decode": 0.0}
"""How long a role that leaves lets requests run. A prompt that is nearly computed is handed off. An answer may go on for minutes,
so it goes on elsewhere at once."""


@dataclass(slots=True, eq=False)
class InstanceRole:
    """me: this life. serves_whole: a decode instance that gets whole requests too."""

    me: InstanceInfo
    serves_whole: bool = False
    ends_s: float | None = None
    """When it gives that up."""
    _order: tuple[InstanceId, TakeRole] | None = None
    """What is under way, and the router that wants it."""
    _refusals: dict[InstanceId, RoleKept] = field(default_factory=dict)
    """The latest to each router: it may have been lost, and an order that it answers may come again."""
    _numbers: dict[InstanceId, int] = field(default_factory=dict)
    """The number of the latest order of each router."""
    _lives: int = 0

    @property
    def present(self) -> ServingRole:
        return "both" if self.serves_whole else self.me.role

    @property
    def wanted(self) -> ServingRole | None:
        """What it is about to be; None: it stays what it is."""
        return None if self._order is None else self._order[1].role

    def is_late(self, router: InstanceId, order: TakeRole) -> bool:
        """A later order of this router has come before."""
        latest = self._numbers[router] = max(order.number, self._numbers.get(router, 0))
        return order.number < latest

    def former_refusal(self, router: InstanceId, order: TakeRole) -> list[Send]:
        """The answer to this order, if it was refused before."""
        refusal = self._refusals.get(router)
        return [] if refusal is None or refusal.number != order.number else [Send(router, refusal)]

    def begin(self, router: InstanceId, order: TakeRole, now: float) -> None:
        self._order, self.ends_s = (router, order), now + CHANGE_S

    def keep(self, reason: str) -> list[Send]:
        """It stays in its role: tell the router that ordered something else, if one has."""
        order, self._order, self.ends_s = self._order, None, None
        return [] if order is None else self.refuse(*order, reason)

    def refuse(self, router: InstanceId, order: TakeRole, reason: str) -> list[Send]:
        me = self.me
        self._refusals[router] = RoleKept(id=me.id, incarnation=me.incarnation, number=order.number, reason=reason)
        return [Send(router, self._refusals[router])]

    def forget(self, router: InstanceId) -> None:
        """This life of a router is gone. What it has ordered is carried out all the same."""
        self._refusals.pop(router, None)
        self._numbers.pop(router, None)

    def become(self) -> InstanceInfo:
        """The next life has begun, in the role that is wanted. It comes behind the former one, but before every process that was
        started after this one: such a process is its successor all the same."""
        assert self.wanted is not None
        first, me = self.me.incarnation.partition(".")[0] if self._lives else self.me.incarnation, self.me
        role: Role = "prefill" if self.wanted == "prefill" else "decode"
        self._lives += 1
        self.me = replace(me, incarnation=Incarnation(f"{first}.{self._lives}"), role=role, started_ns=me.started_ns + 1)
        self.serves_whole = self.wanted == "both"
        self._order = self.ends_s = None
        return self.me
