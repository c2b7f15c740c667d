"""The groups of `torch.distributed` in which trainers send weights to the fleet: who is in each, and when one is over.

Owns which members are in which group. Does not know how an instance joins one or receives, nor how a fleet changes its weights:
each bucket is an update of its own, in two phases as any other (`router.weights`).

    join ─► every rank of every member meets the trainer ─► update, bucket by bucket ─► … ─► leave
               └─ not all come in time: all leave               └─ whatever goes wrong: all leave

A broadcast reaches those that are there and comes once. So a group serves the members that made it and no others, and is over
when one of them may have missed something: what comes next would be taken for that.
"""

from contextlib import suppress

from msgspec.structs import replace

from common.errors import BadRequest, TandemError, Unavailable
from common.ids import Life
from common.messages.tasks import JoinGroup, LeaveGroup
from router.core import Gateway
from router.weights import Updated, UpdateOrder

ANSWER_S = 60.0
"""How long members may take to answer, beside their wait for a trainer."""


class FleetGroups:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._groups: dict[str, frozenset[Life]] = {}

    async def join(self, order: JoinGroup) -> dict[str, range]:
        """Have every rank join. Returns when all have met, with the ranks of each instance in the group: prefill instances come
        first, and those of a role are in the order of their names. order: with the first rank. Raises BadRequest, Unavailable."""
        group, first = order.group, order.first_rank
        if group in self._groups:
            rule = "is there already: send POST /destroy_weights_update_group first, or give this one another name"
            raise BadRequest(f"group_name: the group {group} {rule}", field="group_name")
        members = sorted(self._gateway.core.fleet.members(), key=lambda member: (member.info.role != "prefill", member.info.id))
        ranks = dict[str, range]()
        for member in members:
            ranks[member.info.id] = range(first, first + len(member.info.ranks))
            first = ranks[member.info.id].stop
        if order.world_size < first:
            counted = ", ".join(f"{name}: {len(here)}" for name, here in ranks.items())
            begin, size = order.first_rank, order.world_size
            rule = f"the fleet has {first - begin} ranks ({counted}), which begin with rank_offset {begin}"
            raise BadRequest(f"world_size: {rule}, so it must be {first} or more, and not {size}", field="world_size")
        made = self._groups[group] = frozenset(member.life for member in members)
        try:
            await self._have_all_leave(group)  # members may be in one of this name that an earlier life of the router has made
            tasks = {member.life: replace(order, first_rank=ranks[member.info.id].start) for member in members}
            await self._gateway.perform(tasks, order.timeout_s + ANSWER_S)
        except TandemError:
            if self._groups.get(group) is made:  # else it was left meanwhile, and another one may have its name
                await self.leave(group)
            raise
        return ranks

    async def update(self, group: str, order: UpdateOrder) -> Updated:
        """Change weights that the trainer broadcasts to this group. Raises what came of it: then the group is over."""
        if group not in self._groups:
            rule = "send POST /init_weights_update_group first, also after an update that failed"
            raise BadRequest(f"group_name: the fleet is in no group {group}: {rule}", field="group_name")
        group_of = self._groups[group]
        try:
            self._require_whole(group)
            return await self._gateway.update_weights(order)
        except TandemError:
            if self._groups.get(group) is group_of:
                await self.leave(group)
            raise

    async def leave(self, group: str) -> None:
        """Have all members leave it, if they are in it. Idempotent; those that cannot be reached now leave before a group of this
        name is made again."""
        self._groups.pop(group, None)
        with suppress(Unavailable):
            await self._have_all_leave(group)

    async def _have_all_leave(self, group: str) -> None:
        await self._gateway.perform({member.life: LeaveGroup(group) for member in self._gateway.core.fleet.members()}, ANSWER_S)

    def _require_whole(self, group: str) -> None:
        """Raises Unavailable when the members of the fleet that change their weights are not those of the group."""
        weights, lives = self._gateway.core.fleet.weights, self._groups[group]
        members = {member.life: member for member in self._gateway.core.fleet.members()}
        gone, new = (", ".join(sorted(life.id for life in some)) for some in (lives - members.keys(), members.keys() - lives))
        late = ", ".join(sorted(life.id for life, member in members.items() if member.weights != weights.target))
        for names, what in (
            (gone, "has left the fleet"),
            (new, "has joined the fleet since then"),
            (late, "has other weights than the fleet"),
        ):
            if names:
                raise Unavailable(f"{names} {what}, so the group {group} is over: send POST /init_weights_update_group again")
