"""The endpoints by which a trainer changes the weights of the whole fleet, and pauses it, with SGLang's names and fields.

Owns the bodies and answers. Does not know how a fleet changes its weights: `router.weights` does. Fields:
python/sglang/srt/managers/io_struct.py (UpdateWeightFromDiskReqInput and those beside it) at https://github.com/sgl-project/sglang.
"""

from typing import Annotated

import msgspec
from fastapi import Request
from msgspec import Meta

from common.errors import BadRequest
from common.messages.weights import MOST_SEGMENTS, Path, WeightsInMemory, WeightsOnDisk, WeightsSource, WeightVersion
from router.api.bodies import object_in, unless_left
from router.api.description import ApiPart, Described
from router.api.fields import Unsupported, read_fields
from router.core import PauseMode
from router.weights import Updated, UpdateMode, UpdateOrder

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


class WeightsApi(ApiPart):
    """The handlers."""

    refusals = (400, 403, 409, 413, 415, 503)
    is_control = True

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
        return update_answer(await self._gateway.update_weights(order), open_requests)

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


def update_answer(done: Updated, open_requests: int) -> UpdateAnswer:
    """open_requests: those that were open when it began."""
    return UpdateAnswer(
        message=f"{done.instances} instances compute with {done.version}",
        weight_version=done.version,
        weights=done.weights,
        instances=done.instances,
        paused_s=round(done.held_s, 6),
        num_paused_requests=open_requests,
    )
