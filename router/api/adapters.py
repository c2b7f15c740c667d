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
from router.api.description import ApiPart, Described
from router.api.fields import Unsupported

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS, description="What requests call the adapter.")]


class LoadFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /load_lora_adapter and POST /v1/load_lora_adapter."""

    lora_name: Name
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

    lora_name: Name


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
