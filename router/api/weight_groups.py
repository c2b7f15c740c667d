"""The endpoints by which a trainer sends weights to the fleet through a group of `torch.distributed`, with SGLang's names and
fields, and the one that reads weights back.

Owns the bodies and answers. Does not know groups: `router.weight_groups` does. Fields: InitWeightsUpdateGroupReqInput and those
beside it in python/sglang/srt/managers/io_struct.py at https://github.com/sgl-project/sglang.
"""

from typing import Annotated, Literal
from uuid import uuid4

import msgspec
from fastapi import Request
from msgspec import Meta
from starlette.responses import Response

from common.errors import BadRequest
from common.messages.tasks import JoinGroup, Name, ReadWeight
from common.messages.weights import MOST_WEIGHTS, AnnouncedWeight, FloatName, GroupName, WeightsFromGroup
from common.ranges import Size
from router.api.description import ApiPart, Described
from router.api.fields import Unsupported
from router.api.weights import UPDATE_FIELDS, UpdateAnswer, UpdateFields, update_answer
from router.core import Gateway
from router.weight_groups import ANSWER_S, FleetGroups

Group = Annotated[GroupName, Meta(description="The group's name.")]
DEFAULT_GROUP = "weight_update_group"
JOIN_S = 300.0


class InitGroupFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /init_weights_update_group."""

    master_address: Annotated[Name, Meta(description="The trainer's host, where its rank 0 listens.")]
    master_port: Annotated[int, Meta(ge=1, le=65_535, description="The port there.")]
    rank_offset: Annotated[
        int, Meta(ge=1, lt=2**31, description="The rank of the fleet's first; the trainer's sender is rank 0.")
    ]
    world_size: Annotated[
        int,
        Meta(ge=2, lt=2**31, description="How many processes meet: those of the trainer, and each rank of each instance here."),
    ]
    group_name: Group = DEFAULT_GROUP
    backend: Annotated[Literal["nccl", "gloo"], Meta(description="What carries the weights: nccl needs GPUs.")] = "nccl"
    timeout_s: Annotated[
        float,
        Meta(gt=0, le=1e6, description="How long all may take to meet, and how long the fleet waits for any weight afterwards."),
    ] = JOIN_S


class GroupBucketFields(UpdateFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /update_weights_from_distributed."""

    names: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=512)]],
        Meta(
            min_length=1,
            max_length=MOST_WEIGHTS,
            description="The weights that the trainer broadcasts now, by their names in the checkpoint, in the order in which "
            "they come. All others stay as they are.",
        ),
    ]
    dtypes: Annotated[list[FloatName], Meta(description="The dtype in which each comes.")]
    shapes: Annotated[
        list[Annotated[list[Annotated[int, Meta(ge=0, lt=2**40)]], Meta(max_length=8)]],
        Meta(description="The shape of each, as in the checkpoint."),
    ]
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

    name: Annotated[Name, Meta(description="The weight's name in the checkpoint.")]
    truncate_size: Annotated[Size, Meta(description="How many rows of it.")] = 100


class GroupAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All have joined the group, or left it."""

    success: bool = True
    message: str


class JoinedAnswer(GroupAnswer, frozen=True, kw_only=True):
    """All have met."""

    ranks: Annotated[dict[str, list[int]], Meta(description="The ranks of each instance in the group.")]


_BUCKET = Unsupported({**UPDATE_FIELDS, "selector": ("all",)})


class WeightGroupsApi(ApiPart):
    """The handlers."""

    refusals = (400, 403, 409, 413, 415, 503)

    def __init__(self, gateway: Gateway, model: str) -> None:
        super().__init__(gateway, model)
        self._groups = FleetGroups(gateway)

    @Described("POST /init_weights_update_group", "SGLang", "Join a trainer's group")
    async def join(self, request: Request, asked: InitGroupFields) -> JoinedAnswer:
        """Every rank of every instance joins the group. The answer comes when all have met: send this, and join as rank 0
        meanwhile. Prefill instances get the first ranks; those of a role follow in the order of their names."""
        where, first, size = (asked.master_address, asked.master_port), asked.rank_offset, asked.world_size
        ranks = await self._groups.join(JoinGroup(asked.group_name, *where, first, size, asked.backend, asked.timeout_s))
        message = f"{sum(map(len, ranks.values()))} ranks of {len(ranks)} instances are in the group {asked.group_name}"
        return JoinedAnswer(message=message, ranks={name: list(here) for name, here in ranks.items()})

    @Described(
        "POST /update_weights_from_distributed", "SGLang", "Update the weights from a trainer's group", unsupported=_BUCKET
    )
    async def update(self, request: Request, asked: GroupBucketFields) -> UpdateAnswer:
        """Every instance receives the weights beside those in use, while the trainer's rank 0 broadcasts them one by one in this
        order. When all have them, with one digest, all change to them: each call is an update of its own. If one fails, the fleet
        keeps what it had before the call, and the group is over."""
        weights = tuple(
            AnnouncedWeight(name, dtype, tuple(shape))
            for name, dtype, shape in zip(asked.names, asked.dtypes, asked.shapes, strict=True)
        )
        order = asked.order(WeightsFromGroup(asked.group_name, uuid4().hex, weights))
        open_requests = len(self._gateway.core.requests)
        return update_answer(await self._groups.update(asked.group_name, order), open_requests)

    @Described("POST /destroy_weights_update_group", "SGLang", "Leave a trainer's group")
    async def leave(self, request: Request, asked: DestroyGroupFields) -> GroupAnswer:
        """Every rank leaves the group, if it is in it. What is received from it meanwhile is given up."""
        await self._groups.leave(asked.group_name)
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
