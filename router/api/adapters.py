"""The endpoints by which LoRA adapters come into the fleet and leave it, with SGLang's and vLLM's names and fields.

Owns the bodies and answers. Does not know how a fleet loads an adapter: `router.adapters` does. Fields: LoadLoRAAdapterReqInput
in python/sglang/srt/managers/io_struct.py at https://github.com/sgl-project/sglang, and LoadLoRAAdapterRequest in
vllm/entrypoints/serve/lora/protocol.py at https://github.com/vllm-project/vllm.
"""

from typing import Annotated

import msgspec
from fastapi import Request
from msgspec import Meta
from starlette.responses import Response

from common.errors import BadRequest
from common.messages.adapters import NAME_CHARS, AdapterEntry
from common.messages.weights import Path
from router.adapters import ReplaceMode
from router.api.admission import visit_of
from router.api.bodies import object_in
from router.api.description import Described, call_route
from router.api.fields import Unsupported, read_fields
from router.api.sending import json_response
from router.core import Gateway

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS, description="What requests call the adapter.")]


class LoadFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /load_lora_adapter and POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Annotated[Path, Meta(description="A folder that PEFT's save_pretrained has written, the same on every host.")]
    pinned: Annotated[bool, Meta(description="It does not give up its place when another adapter needs one.")] = False
    load_inplace: Annotated[bool, Meta(description="If the name is taken, it stands for this adapter from now on.")] = False
    mode: Annotated[
        ReplaceMode | None,
        Meta(
            description="With load_inplace, what becomes of requests that have the former adapter. finish (without it): they end "
            "with it. recompute: they go on with the new one, and their KV is computed anew. abort: they end."
        ),
    ] = None


class UnloadFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /unload_lora_adapter and POST /v1/unload_lora_adapter."""

    lora_name: Name


class AdaptersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The adapters are as asked for."""

    success: bool = True
    error_message: str = ""
    loaded_adapters: Annotated[dict[str, str], Meta(description="The folder of each adapter of the fleet, by its name.")]


_LOAD = Unsupported({"added_tokens_config": (), "lora_id": (), "is_3d_lora_weight": (False,), "base_model_name": ()})
_UNLOAD = Unsupported({"lora_id": (), "lora_int_id": ()})
_REFUSALS = (400, 403, 404, 408, 413, 415, 503)
LOAD = call_route("SGLang", "Load a LoRA adapter", LoadFields, AdaptersAnswer, _REFUSALS)
UNLOAD = call_route("SGLang", "Unload a LoRA adapter", UnloadFields, AdaptersAnswer, _REFUSALS)
_TEXT = ("text/plain",)
LOAD_V1 = Described("vLLM", "Load a LoRA adapter", "It is loaded.", None, LoadFields, media_types=_TEXT, refusals=_REFUSALS)
UNLOAD_V1 = Described("vLLM", "Unload a LoRA adapter", "It is gone.", None, UnloadFields, media_types=_TEXT, refusals=_REFUSALS)


def read_load(body: bytes, context_tokens: int | None = None) -> LoadFields:
    """Raises BadRequest."""
    fields = read_fields(object_in(body), LoadFields, _LOAD)
    if fields.mode is not None and not fields.load_inplace:
        raise BadRequest("mode is for load_inplace=true only: leave it out", field="mode")
    return fields


def read_unload(body: bytes, context_tokens: int | None = None) -> UnloadFields:
    """Raises BadRequest."""
    return read_fields(object_in(body), UnloadFields, _UNLOAD)


class AdaptersApi:
    """The handlers. model: the name of the base model."""

    def __init__(self, gateway: Gateway, model: str) -> None:
        self._gateway, self._model = gateway, model

    async def load(self, request: Request) -> Response:
        """Every instance reads the adapter, while requests run. When all have it, with one digest, requests can have it; if one
        cannot use it, nothing changes. Where all places are taken, the adapter that was used longest ago gives up its own, and is
        read again when a request asks for it."""
        await self._load(request)
        return self._answer()

    async def unload(self, request: Request) -> Response:
        """No request gets the adapter from now on. The answer comes when those that have it are over."""
        await self._unload(request)
        return self._answer()

    async def load_v1(self, request: Request) -> Response:
        """As POST /load_lora_adapter, with vLLM's answer."""
        entry = await self._load(request)
        return Response(f"Success: LoRA adapter '{entry.name}' added successfully.", media_type="text/plain")

    async def unload_v1(self, request: Request) -> Response:
        """As POST /unload_lora_adapter, with vLLM's answer."""
        entry = await self._unload(request)
        return Response(f"Success: LoRA adapter '{entry.name}' removed successfully.", media_type="text/plain")

    async def _load(self, request: Request) -> AdapterEntry:
        asked = await visit_of(request).read(request, read_load)
        if asked.lora_name == self._model:
            raise BadRequest(f"{asked.lora_name!r} is the name of the model: give the adapter another one", field="lora_name")
        return await self._gateway.adapt(
            lambda adapters, answer, now: adapters.load(
                asked.lora_name,
                asked.lora_path,
                answer,
                now,
                is_pinned=asked.pinned,
                replaces=asked.load_inplace,
                mode=asked.mode or "finish",
            )
        )

    async def _unload(self, request: Request) -> AdapterEntry:
        asked = await visit_of(request).read(request, read_unload)
        return await self._gateway.adapt(lambda adapters, answer, now: adapters.unload(asked.lora_name, answer, now))

    def _answer(self) -> Response:
        folders = {entry.name: entry.folder for entry in self._gateway.core.fleet.adapters.entries()}
        return json_response(AdaptersAnswer(loaded_adapters=folders))
