"""What people and planners order of instances: to start, to serve in another role while streams run, to hold LoRA adapters and to
leave them; and what planners decide.

Owns the bodies and the answers of these endpoints. `router.scaling` owns what is remembered, `router.adapters` how a fleet loads
an adapter. Sources: /pd_role_switch, as SGLang calls POST /cluster/{instance}/role, in python/sglang/srt/disaggregation/
role_switch.py at https://github.com/sgl-project/sglang (its server is one instance, so there nobody is named);
LoadLoRAAdapterReqInput in python/sglang/srt/managers/io_struct.py there, and LoadLoRAAdapterRequest in
vllm/entrypoints/serve/lora/protocol.py at https://github.com/vllm-project/vllm.
"""

import time
from typing import Annotated

import msgspec
from fastapi import Request
from msgspec import Meta
from msgspec.structs import replace
from starlette.responses import Response

from common.errors import BadRequest
from common.ids import Incarnation, InstanceId, Role, ServingRole
from common.messages.variants import NAME_CHARS, AdapterEntry, Path
from router.adapters import ReplaceMode
from router.api.admission import visit_of
from router.api.description import ApiPart, Described, reader_of
from router.api.fields import Unsupported
from router.scaling import ScalingDecision

_SAID = "prefill, decode, or both: a decode instance that gets whole requests too, where that costs less than a pair."


class RoleFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /cluster/{instance}/role."""

    role: Annotated[ServingRole, Meta(description=_SAID)]


class SwitchFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /pd_role_switch."""

    new_role: Annotated[ServingRole, Meta(description=_SAID)]
    instance: InstanceId
    """The instance that is to take it, as /cluster names it."""


class RoleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The instance serves in this role."""

    id: InstanceId
    role: ServingRole
    incarnation: Incarnation
    """Its life in this role."""
    seconds: float
    """Since it was told."""


_NEVER = Unsupported({"prepare_only": (False,), "decode_cuda_graph_memory_gb": ()})


class StartFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /cluster/instances."""

    role: Role
    """The role in which it is to start."""


class ScalingDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /cluster/decisions."""

    decisions: list[ScalingDecision]


_REFUSALS = (400, 403, 404, 409, 413, 415, 504)
"""What an order of a role may get."""


class InstancesApi(ApiPart):
    """The handlers."""

    is_control = True

    @Described(
        "POST /cluster/{instance}/role", "Operations", "Change the role of an instance", body=RoleFields, refusals=_REFUSALS
    )
    async def change(self, request: Request, instance: str) -> RoleAnswer:
        """It takes nothing new, hands off what it can in a moment, has the rest resumed elsewhere, and serves in the new role
        with its weights, graphs and prefix cache. Answers when it does. If it cannot, it stays what it was."""
        asked = await visit_of(request).read(request, reader_of(RoleFields))
        return await self._answer(InstanceId(instance), asked.role)

    @Described("POST /pd_role_switch", "SGLang", "Change the role of an instance", refusals=_REFUSALS, unsupported=_NEVER)
    async def switch(self, request: Request, asked: SwitchFields) -> RoleAnswer:
        """As POST /cluster/{instance}/role."""
        return await self._answer(asked.instance, asked.new_role)

    async def _answer(self, instance: InstanceId, role: ServingRole) -> RoleAnswer:
        began_s = time.monotonic()
        life = (await self._gateway.change_role(instance, role)).life
        seconds = round(time.monotonic() - began_s, 6)
        return RoleAnswer(id=life.id, role=role, incarnation=life.incarnation, seconds=seconds)

    @Described("POST /cluster/instances", "Operations", "Start an instance", refusals=(400, 403, 408, 409, 413, 415, 503))
    async def start(self, request: Request, asked: StartFields) -> StartFields:
        """Have `launch local` or `launch ray`, by which this router was started, start one of its spare instances."""
        self._gateway.core.scaling.start(asked.role)
        return asked

    @Described("POST /cluster/decisions", "Operations", "Tell of a decision")
    async def decided(self, request: Request, asked: ScalingDecision) -> ScalingDecision:
        """Remember what a planner has decided, with the reason in words. The router does nothing else with it."""
        decision = replace(asked, at=time.time())
        self._gateway.core.scaling.decided(decision)
        return decision

    @Described("GET /cluster/decisions", "Operations", "Decisions", "The latest decisions about the fleet, in order.")
    async def decisions(self) -> ScalingDecisions:
        """What planners have decided, and why; of decisions to stay that follow each other, the latest."""
        return ScalingDecisions(decisions=list(self._gateway.core.scaling.decisions))


AdapterField = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS, description="What requests call the adapter.")]


class LoadFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /load_lora_adapter and POST /v1/load_lora_adapter."""

    lora_name: AdapterField
    lora_path: Path
    """A folder that PEFT's save_pretrained has written, the same on every host."""
    pinned: bool = False
    """It does not give up its place when another adapter needs one."""
    load_inplace: bool = False
    """If the name is taken, it stands for this adapter from now on."""
    mode: ReplaceMode | None = None
    """With load_inplace, what becomes of requests that have the former adapter. finish (without it): they end with it. recompute:
    they go on with the new one, and their KV is computed anew. abort: they end."""

    def __post_init__(self) -> None:
        """Raises BadRequest."""
        if self.mode is not None and not self.load_inplace:
            raise BadRequest("mode is for load_inplace=true only: leave it out", field="mode")


class UnloadFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /unload_lora_adapter and POST /v1/unload_lora_adapter."""

    lora_name: AdapterField


class AdaptersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The adapters are as asked for."""

    success: bool = True
    error_message: str = ""
    loaded_adapters: dict[str, str]
    """The folder of each adapter of the fleet, by its name."""


_LOAD = Unsupported({"added_tokens_config": (), "lora_id": (), "is_3d_lora_weight": (False,), "base_model_name": ()})
_UNLOAD = Unsupported({"lora_id": (), "lora_int_id": ()})
_TEXT = ("text/plain",)


class AdaptersApi(ApiPart):
    """The handlers."""

    refusals = (400, 403, 404, 408, 413, 415, 503)
    is_control = True

    @Described("POST /load_lora_adapter", "SGLang", "Load a LoRA adapter", unsupported=_LOAD)
    async def load(self, request: Request, asked: LoadFields) -> AdaptersAnswer:
        """Every instance reads the adapter, while requests run. When all have it, with one digest, requests can have it; if one
        cannot use it, nothing changes. Where all places are taken, the adapter that was used longest ago gives up its own, and is
        read again when a request asks for it."""
        await self._load(asked)
        return self._answer()

    @Described("POST /unload_lora_adapter", "SGLang", "Unload a LoRA adapter", unsupported=_UNLOAD)
    async def unload(self, request: Request, asked: UnloadFields) -> AdaptersAnswer:
        """No request gets the adapter from now on. The answer comes when those that have it are over."""
        await self._unload(asked)
        return self._answer()

    @Described("POST /v1/load_lora_adapter", "vLLM", "Load a LoRA adapter", "It is loaded.", media_types=_TEXT, unsupported=_LOAD)
    async def load_v1(self, request: Request, asked: LoadFields) -> Response:
        """As POST /load_lora_adapter, with vLLM's answer."""
        entry = await self._load(asked)
        return Response(f"Success: LoRA adapter '{entry.name}' added successfully.", media_type="text/plain")

    @Described(
        "POST /v1/unload_lora_adapter", "vLLM", "Unload a LoRA adapter", "It is gone.", media_types=_TEXT, unsupported=_UNLOAD
    )
    async def unload_v1(self, request: Request, asked: UnloadFields) -> Response:
        """As POST /unload_lora_adapter, with vLLM's answer."""
        entry = await self._unload(asked)
        return Response(f"Success: LoRA adapter '{entry.name}' removed successfully.", media_type="text/plain")

    async def _load(self, asked: LoadFields) -> AdapterEntry:
        name, adapters = asked.lora_name, self._gateway.core.fleet.adapters
        if name == self._model:
            raise BadRequest(f"{name!r} is the name of the model: give the adapter another one", field="lora_name")
        mode = asked.mode or "finish"
        return await self._gateway.adapt(
            adapters.load(name, asked.lora_path, is_pinned=asked.pinned, replaces=asked.load_inplace, mode=mode)
        )

    async def _unload(self, asked: UnloadFields) -> AdapterEntry:
        return await self._gateway.adapt(self._gateway.core.fleet.adapters.unload(asked.lora_name))

    def _answer(self) -> AdaptersAnswer:
        folders = {entry.name: entry.folder for entry in self._gateway.core.fleet.adapters.entries()}
        return AdaptersAnswer(loaded_adapters=folders)
