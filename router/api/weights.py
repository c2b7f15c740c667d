"""The endpoints by which a trainer changes the weights of the whole fleet, pauses it and reads weights back, with SGLang's names
and fields.

Owns the bodies and answers, and which members are in which group of `torch.distributed` through which a trainer sends weights.
Does not know how a fleet changes its weights, nor how an instance joins a group or receives: each bucket is an update of its own,
in two phases as any other (`router.weights`). Fields: python/sglang/srt/managers/io_struct.py (UpdateWeightFromDiskReqInput,
InitWeightsUpdateGroupReqInput and those beside them) at https://github.com/sgl-project/sglang.

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
from common.messages.variants import (
    MOST_SEGMENTS,
    MOST_WEIGHTS,
    AnnouncedWeight,
    FloatName,
    GroupName,
    JoinGroup,
    LeaveGroup,
    Path,
    ReadWeight,
    ShortText,
    WeightsFromGroup,
    WeightsInMemory,
    WeightsOnDisk,
    WeightsSource,
    WeightVersion,
)
from common.ranges import Size
from router.api.bodies import object_in, unless_left
from router.api.description import ApiPart, Described
from router.api.fields import Unsupported, read_fields
from router.core import Gateway, PauseMode
from router.weights import UpdateMode, UpdateOrder

Version = Annotated[WeightVersion | None, Meta(description="What to call the weights from now on; without it: their digest.")]
UPDATE_FIELDS = {
    "load_format": ("auto", "safetensors"),
    "is_async": (False,),
    "torch_empty_cache": (True, False),
    "recapture_cuda_graph": (True, False),
    "flush_cache": (True, False),
    "token_step": (0,),
    "manifest": (),
    "selector": ("all", "target"),
}
"""Neither a cache of other weights nor graphs need anybody's care: KV knows whose it is, and graphs keep their addresses."""


class UpdateFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weight_version: Version = None
    abort_all_requests: bool = False
    """End all requests first, as mode=abort does."""
    mode: UpdateMode | None = None
    """What becomes of requests. recompute (without it): they pause, and go on with KV that is computed anew. finish: each ends
    with the weights with which it began. abort: they end."""
    finish_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """With mode=finish: how long requests may take; without it: as long as any."""
    keep_pause: bool = False
    """Stay paused afterwards, until POST /continue_generation."""

    def __post_init__(self) -> None:
        """Raises BadRequest when fields contradict each other."""
        if self.abort_all_requests and self.mode not in (None, "abort"):
            raise BadRequest(f"abort_all_requests and mode={self.mode}: send one of them", field="mode")
        if self.finish_s is not None and self.mode != "finish":
            raise BadRequest("finish_s is for mode=finish only: leave it out", field="finish_s")

    def order(self, source: WeightsSource) -> UpdateOrder:
        mode = "abort" if self.abort_all_requests else self.mode or "recompute"
        return UpdateOrder(source, mode, self.weight_version or "", self.finish_s, self.keep_pause)


class DiskFields(UpdateFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /update_weights_from_disk."""

    model_path: Path
    """The checkpoint's folder, the same on every host of the fleet."""


class TensorFields(UpdateFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /update_weights_from_tensor. Tensors come in shared memory, as safetensors writes them."""

    shared_memory: Annotated[list[Path], Meta(min_length=1, max_length=MOST_SEGMENTS)]
    """Names of shared memory on the instances' host, each an image of a safetensors file. What none of them holds stays as it
    is."""


class VersionFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /update_weight_version."""

    new_version: Annotated[str, Meta(min_length=1, max_length=128)]
    """What to call the present weights."""
    abort_all_requests: bool = False
    """End all requests first."""


class PauseFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /pause_generation."""

    mode: PauseMode = "abort"
    """abort: requests end. retract: they give up their memory, and their KV is computed anew when they go on. in_place: they stay
    where they are; if the weights change meanwhile, their KV is computed anew too. finish: they go on, and the answer comes
    when the last of them has ended."""


class ContinueFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /continue_generation."""


class UpdateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet computes with the new weights."""

    success: bool = True
    message: str
    weight_version: str
    weights: str
    """Digest of the bytes of all weights."""
    instances: int
    """How many instances compute with them."""
    paused_s: float
    """For how long no request was dispatched."""
    num_paused_requests: int
    """Requests that were open when it began."""


class PauseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "ok"
    message: str


class VersionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The weights have the name."""

    success: bool = True
    message: str
    new_version: str


class WeightInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet computes with."""

    weight_version: str
    weights: str
    """Digest of the bytes of all weights."""
    updating: bool
    """An update is under way."""
    paused: bool
    """No request is dispatched until POST /continue_generation."""


_CONTINUE = Unsupported({"torch_empty_cache": (True, False)})


def read_tensor(body: bytes, context_tokens: int | None = None) -> TensorFields:
    """Raises BadRequest."""
    raw, pickles = object_in(body), "serialized_named_tensors"
    if raw.get(pickles):
        fix = "put the tensors into shared memory as safetensors, and send shared_memory"
        raise BadRequest(
            f"{pickles} holds pickles, which can do anything to who reads them: {fix}", pickles, "unsupported_parameter"
        )
    return read_fields(raw, TensorFields, Unsupported({**UPDATE_FIELDS, pickles: ([],)}))


GroupField = Annotated[GroupName, Meta(description="The group's name.")]
DEFAULT_GROUP = "weight_update_group"
JOIN_S = 300.0


class InitGroupFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /init_weights_update_group."""

    master_address: ShortText
    """The trainer's host, where its rank 0 listens."""
    master_port: Annotated[int, Meta(ge=1, le=65_535)]
    """The port there."""
    rank_offset: Annotated[int, Meta(ge=1, lt=2**31)]
    """The rank of the fleet's first; the trainer's sender is rank 0."""
    world_size: Annotated[int, Meta(ge=2, lt=2**31)]
    """How many processes meet: those of the trainer, and each rank of each instance here."""
    group_name: GroupField = DEFAULT_GROUP
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
    group_name: GroupField = DEFAULT_GROUP

    def __post_init__(self) -> None:
        """Raises BadRequest."""
        super().__post_init__()
        for field, count in (("dtypes", len(self.dtypes)), ("shapes", len(self.shapes))):
            if count != len(self.names):
                raise BadRequest(f"{field}: there are {count}, and {len(self.names)} names: give one for each", field=field)


class DestroyGroupFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /destroy_weights_update_group."""

    group_name: GroupField = DEFAULT_GROUP


class ReadWeightFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /get_weights_by_name."""

    name: ShortText
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


class WeightsApi(ApiPart):
    """The handlers, and which members are in which group."""

    refusals = (400, 403, 409, 413, 415, 503)
    is_control = True

    def __init__(self, gateway: Gateway, model: str) -> None:
        super().__init__(gateway, model)
        self._groups: dict[str, frozenset[Life]] = {}

    @Described("POST /update_weights_from_disk", "SGLang", "Update the weights from disk", unsupported=Unsupported(UPDATE_FIELDS))
    async def from_disk(self, request: Request, asked: DiskFields) -> UpdateAnswer:
        """Every instance reads the checkpoint beside the weights in use. When all have it, with one digest, all change to it; if
        one cannot use it, nothing changes. No request sees KV of other weights than those that compute it."""
        return await self._update(asked.order(WeightsOnDisk(folder=asked.model_path)))

    @Described("POST /update_weights_from_tensor", "SGLang", "Update the weights from shared memory", reader=read_tensor)
    async def from_tensor(self, request: Request, asked: TensorFields) -> UpdateAnswer:
        """The same with weights from shared memory, for a fleet on one host."""
        return await self._update(asked.order(WeightsInMemory(segments=tuple(asked.shared_memory))))

    async def _update(self, order: UpdateOrder) -> UpdateAnswer:
        open_requests = len(self._gateway.core.requests)
        done = await self._gateway.update_weights(order)
        return UpdateAnswer(
            message=f"{done.instances} instances compute with {done.version}",
            weight_version=done.version,
            weights=done.weights,
            instances=done.instances,
            paused_s=round(done.held_s, 6),
            num_paused_requests=open_requests,
        )

    @Described("POST /update_weight_version", "SGLang", "Name the weights")
    async def rename(self, request: Request, asked: VersionFields) -> VersionAnswer:
        """Give the present weights another name. They stay as they are."""
        self._gateway.apply(self._gateway.core.fleet.weights.rename(asked.new_version))
        if asked.abort_all_requests:
            self._gateway.deliver(self._gateway.core.requests.abort_all(self._gateway.clock()))
        return VersionAnswer(message=f"the weights are called {asked.new_version}", new_version=asked.new_version)

    @Described("POST /pause_generation", "SGLang", "Pause generation")
    async def pause(self, request: Request, asked: PauseFields) -> PauseAnswer:
        """Dispatch no request until POST /continue_generation. Requests that come wait, within their time limits."""
        await unless_left(request, self._gateway.pause(asked.mode))
        return PauseAnswer(message="Generation paused successfully.")

    @Described("POST /continue_generation", "SGLang", "Continue generation", unsupported=_CONTINUE)
    async def go_on(self, request: Request, asked: ContinueFields) -> PauseAnswer:
        """End a pause."""
        self._gateway.go_on()
        return PauseAnswer(message="Generation continued successfully.")

    @Described("GET /weight_info", "vLLM", "The weights", "What the fleet computes with.")
    async def info(self) -> WeightInfo:
        """The digest and the name of the weights in use."""
        return self._info()

    @Described("GET /get_weight_version, GET /weight_version", "SGLang", "The weights", "What the fleet computes with.")
    async def version(self) -> WeightInfo:
        """The digest and the name of the weights in use."""
        return self._info()

    def _info(self) -> WeightInfo:
        weights = self._gateway.core.fleet.weights
        updating, paused = weights.update is not None, weights.is_paused
        return WeightInfo(weight_version=weights.version, weights=weights.target, updating=updating, paused=paused)

    # --- groups ---------------------------------------------------------------------------------------------

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
        async with self._over_on_error(group):
            self._require_whole(group)
            return await self._update(asked.order(WeightsFromGroup(group, uuid4().hex, weights)))

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
