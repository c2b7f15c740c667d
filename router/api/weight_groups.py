"""The endpoints by which a trainer sends weights to the fleet through a group of `torch.distributed`, with SGLang's names and
fields, and the one that reads weights back.

Owns the bodies and answers, and which members are in which group. Does not know how an instance joins one or receives, nor how a
fleet changes its weights: each bucket is an update of its own, in two phases as any other (`router.weights`). Fields:
InitWeightsUpdateGroupReqInput and those beside it in python/sglang/srt/managers/io_struct.py at
https://github.com/sgl-project/sglang.

    join ─► every rank of every member meets the trainer ─► update, bucket by bucket ─► … ─► leave
               └─ not all come in time: all leave               └─ whatever goes wrong: all leave

A broadcast reaches those that are there and comes once. So a group serves the members that made it and no others, and is over
when one of them may have missed something: what comes next would be taken for that.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Literal
from uuid import uuid4

import msgspec
from fastapi import Request
from msgspec import Meta
from starlette.responses import Response

from common.errors import BadRequest, TandemError, Unavailable
from common.ids import Life
from common.messages.tasks import JoinGroup, LeaveGroup, Name, ReadWeight
from common.messages.weights import MOST_WEIGHTS, AnnouncedWeight, FloatName, GroupName, WeightsFromGroup
from common.ranges import Size
from router.api.description import ApiPart, Described
from router.api.fields import Unsupported
from router.api.weights import UPDATE_FIELDS, UpdateAnswer, UpdateFields, update_answer
from router.core import Gateway

Group = Annotated[GroupName, Meta(description="The group's name.")]
DEFAULT_GROUP = "weight_update_group"
JOIN_S = 300.0


class InitGroupFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /init_weights_update_group."""

    master_address: Name
    """The trainer's host, where its rank 0 listens."""
    master_port: Annotated[int, Meta(ge=1, le=65_535)]
    """The port there."""
    rank_offset: Annotated[int, Meta(ge=1, lt=2**31)]
    """The rank of the fleet's first; the trainer's sender is rank 0."""
    world_size: Annotated[int, Meta(ge=2, lt=2**31)]
    """How many processes meet: those of the trainer, and each rank of each instance here."""
    group_name: Group = DEFAULT_GROUP
    backend: Literal["nccl", "gloo"] = "nccl"
    """What carries the weights: nccl needs GPUs."""
    timeout_s: Annotated[float, Meta(gt=0, le=1e6)] = JOIN_S
    """How long all may take to meet, and how long the fleet waits for any weight afterwards."""


class GroupBucketFields(UpdateFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /update_weights_from_distributed."""

    names: Annotated[list[Annotated[str, Meta(min_length=1, max_length=512)]], Meta(min_length=1, max_length=MOST_WEIGHTS)]
    """The weights that the trainer broadcasts now, by their names in the checkpoint, in the order in which they come. All others
    stay as they are."""
    dtypes: list[FloatName]
    """The dtype in which each comes."""
    shapes: list[Annotated[list[Annotated[int, Meta(ge=0, lt=2**40)]], Meta(max_length=8)]]
    """The shape of each, as in the checkpoint."""
    group_name: Group = DEFAULT_GROUP

    def __post_init__(self) -> None:
        """Raises BadRequest."""
        super().__post_init__()
        for field, count in (("dtypes", len(self.dtypes)), ("shapes", len(self.shapes))):
            if count != len(self.names):
                raise BadRequest(f"{field}: there are {count}, and {len(self.names)} names: give one for each", field=field)


class DestroyGroupFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /destroy_weights_update_group."""

    group_name: Group = DEFAULT_GROUP


class ReadWeightFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /get_weights_by_name."""

    name: Name
    """The weight's name in the checkpoint."""
    truncate_size: Size = 100
    """How many rows of it."""


class GroupAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All have joined the group, or left it."""

    success: bool = True
    message: str


class JoinedAnswer(GroupAnswer, frozen=True, kw_only=True):
    """All have met."""

    ranks: dict[str, list[int]]
    """The ranks of each instance in the group."""


_BUCKET = Unsupported({**UPDATE_FIELDS, "selector": ("all",)})
ANSWER_S = 60.0
"""How long members may take to answer, beside their wait for a trainer."""


class WeightGroupsApi(ApiPart):
    """The handlers, and which members are in which group."""

    refusals = (400, 403, 409, 413, 415, 503)
    is_control = True

    def __init__(self, gateway: Gateway, model: str) -> None:
        super().__init__(gateway, model)
        self._groups: dict[str, frozenset[Life]] = {}

    @Described("POST /init_weights_update_group", "SGLang", "Join a trainer's group")
    async def join(self, request: Request, asked: InitGroupFields) -> JoinedAnswer:
        """Every rank of every instance joins the group. The answer comes when all have met: send this, and join as rank 0
        meanwhile. Prefill instances get the first ranks; those of a role follow in the order of their names."""
        group, first = asked.group_name, asked.rank_offset
        if group in self._groups:
            rule = "is there already: send POST /destroy_weights_update_group first, or give this one another name"
            raise BadRequest(f"group_name: the group {group} {rule}", field="group_name")
        members = sorted(self._gateway.core.fleet.members(), key=lambda member: (member.info.role != "prefill", member.info.id))
        ranks, tasks = dict[str, list[int]](), dict[Life, JoinGroup]()
        where, size = (asked.master_address, asked.master_port), asked.world_size
        for member in members:
            tasks[member.life] = JoinGroup(group, *where, first, size, asked.backend, asked.timeout_s)
            ranks[member.info.id] = list(range(first, first + len(member.info.ranks)))
            first += len(member.info.ranks)
        if size < first:
            counted = ", ".join(f"{name}: {len(here)}" for name, here in ranks.items())
            begin = f"which begin with rank_offset {asked.rank_offset}"
            rule = f"the fleet has {first - asked.rank_offset} ranks ({counted}), {begin}"
            raise BadRequest(f"world_size: {rule}, so it must be {first} or more, and not {size}", field="world_size")
        self._groups[group] = frozenset(tasks)
        async with self._over_on_error(group):
            await self._have_all_leave(group)  # members may be in one of this name that an earlier life of the router has made
            await self._gateway.perform(tasks, asked.timeout_s + ANSWER_S)
        message = f"{first - asked.rank_offset} ranks of {len(ranks)} instances are in the group {group}"
        return JoinedAnswer(message=message, ranks=ranks)

    @Described(
        "POST /update_weights_from_distributed", "SGLang", "Update the weights from a trainer's group", unsupported=_BUCKET
    )
    async def update(self, request: Request, asked: GroupBucketFields) -> UpdateAnswer:
        """Every instance receives the weights beside those in use, while the trainer's rank 0 broadcasts them one by one in this
        order. When all have them, with one digest, all change to them: each call is an update of its own. If one fails, the fleet
        keeps what it had before the call, and the group is over."""
        group = asked.group_name
        if group not in self._groups:
            rule = "send POST /init_weights_update_group first, also after an update that failed"
            raise BadRequest(f"group_name: the fleet is in no group {group}: {rule}", field="group_name")
        weights = tuple(
            AnnouncedWeight(name, dtype, tuple(shape))
            for name, dtype, shape in zip(asked.names, asked.dtypes, asked.shapes, strict=True)
        )
        open_requests = len(self._gateway.core.requests)
        async with self._over_on_error(group):
            self._require_whole(group)
            done = await self._gateway.update_weights(asked.order(WeightsFromGroup(group, uuid4().hex, weights)))
        return update_answer(done, open_requests)

    @Described("POST /destroy_weights_update_group", "SGLang", "Leave a trainer's group")
    async def leave(self, request: Request, asked: DestroyGroupFields) -> GroupAnswer:
        """Every rank leaves the group, if it is in it. What is received from it meanwhile is given up."""
        await self._end(asked.group_name)
        return GroupAnswer(message=f"no instance is in a group {asked.group_name} any more")

    @Described(
        "POST /get_weights_by_name, GET /get_weights_by_name",
        "SGLang",
        "Read a weight",
        "Its first rows.",
        list[float | list[float]],
    )
    async def read(self, request: Request, asked: ReadWeightFields) -> Response:
        """The first rows of a weight in use, as one decode instance has it. The body is the same with GET and POST."""
        members = sorted(self._gateway.core.fleet.members(), key=lambda member: (member.info.role, member.info.id))
        tasks = {member.life: ReadWeight(asked.name, asked.truncate_size) for member in members[:1]}
        (found,) = (await self._gateway.perform(tasks, ANSWER_S)).values()
        return Response(found, media_type="application/json")

    @asynccontextmanager
    async def _over_on_error(self, group: str) -> AsyncIterator[None]:
        """The group is over when this fails, unless it was left meanwhile: then another one may have its name."""
        lives = self._groups[group]
        try:
            yield
        except TandemError:
            if self._groups.get(group) is lives:
                await self._end(group)
            raise

    async def _end(self, group: str) -> None:
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
