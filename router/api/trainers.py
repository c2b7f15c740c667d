"""What trainers ask of the fleet beside its weights: to pause it, end requests and drop caches, with vLLM's names; and its size,
its load and what it serves, as SGLang's clients ask a server before and while they train.

Owns the parameters and answers. The fleet looks like one server, as many ranks large as its instances together. Routes of vLLM:
vllm/entrypoints/rl/online/api_router.py, and api_router.py of cache and of sleep in vllm/entrypoints/serve/dev, at
https://github.com/vllm-project/vllm. Readers of SGLang's: slime/backends/sglang_utils/external.py and server_control.py at
https://github.com/THUDM/slime; fields: python/sglang/srt/entrypoints/http_server.py and v1_loads.py at
https://github.com/sgl-project/sglang.
"""

import asyncio
from typing import Annotated, Literal

import msgspec
from fastapi import Request
from msgspec import Meta

from common import own_version
from common.errors import BadRequest
from router.api.bodies import unless_left
from router.api.description import KEEPS_MEMORY, ApiPart, Described
from router.api.errors import require_one_of, shown
from router.api.sglang import Aborted, Flushed
from router.core import PauseMode

_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "finish", "keep": "in_place"}
_PARTS = ("scheduling", "weights", "kv_cache")
MAX_IDS = 4096


class AbortManyFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /abort_requests."""

    request_ids: Annotated[list[str], Meta(max_length=MAX_IDS)] = []
    """Ids of requests, as POST /abort_request takes them; none: all of this router."""


class AbortedMany(Aborted, frozen=True):
    """The answer of POST /abort_requests."""

    status: Literal["aborted"] = "aborted"


class PauseState(msgspec.Struct, frozen=True):
    is_paused: bool
    """No request is dispatched until POST /resume."""


class ResetAnswer(msgspec.Struct, frozen=True):
    success: bool
    """Every instance was told."""


class PauseStatus(msgspec.Struct, frozen=True):
    status: Literal["paused", "resumed"]


class SleepStatus(msgspec.Struct, frozen=True):
    status: Literal["sleeping"]
    level: int = 0


class WakeStatus(msgspec.Struct, frozen=True):
    tags: list[str] | None
    status: Literal["awake"] = "awake"


class SleepState(msgspec.Struct, frozen=True):
    is_sleeping: bool
    """No request is dispatched until POST /wake_up."""


def _flag(name: str, value: str) -> bool:
    """Raises BadRequest."""
    try:
        return msgspec.convert(value.lower(), bool, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"{name} in the URL's query must be true or false, is {shown(value)!r}", name, "invalid_value"
        ) from error


def _pause_mode(mode: str) -> PauseMode:
    """Raises BadRequest."""
    require_one_of("mode", mode, _MODES)
    return _MODES[mode]


class VllmApi(ApiPart):
    """The handlers."""

    is_control = True

    @Described("POST /pause", "vLLM", "Pause", "It is so.", refusals=(400, 403, 503))
    async def pause(
        self, request: Request, mode: str = "abort", wait_for_inflight_requests: str = "false", clear_cache: str = "true"
    ) -> PauseStatus:
        """Dispatch no request until POST /resume. Requests that come meanwhile wait, within their time limits. mode: what becomes
        of requests that run. abort: they end. wait: they go on, and the answer comes when the last of them has ended. keep: they
        stay where they are, and go on afterwards. wait_for_inflight_requests: true: as mode=wait. clear_cache: true or false;
        neither is needed, because KV of other weights is never used."""
        _flag("clear_cache", clear_cache)
        pause_mode = _pause_mode(mode)
        waits = _flag("wait_for_inflight_requests", wait_for_inflight_requests)
        await unless_left(request, self._gateway.pause("finish" if waits else pause_mode))
        return PauseStatus("paused")

    @Described("POST /resume", "vLLM", "Resume", "It is so.", refusals=(400, 403))
    async def resume(self) -> PauseStatus:
        """End a pause."""
        self._gateway.go_on()
        return PauseStatus("resumed")

    @Described("GET /is_paused", "vLLM", "Whether the fleet is paused", "Whether it is.")
    async def is_paused(self) -> PauseState:
        """Whether requests wait until somebody ends a pause."""
        return PauseState(self._gateway.core.fleet.weights.is_paused)

    @Described("POST /sleep", "vLLM", "Sleep", "It is so.", refusals=(400, 403, 503))
    async def sleep(self, request: Request, level: str = "1", mode: str = "abort") -> SleepStatus:
        """With level=0: dispatch no request until POST /wake_up, as POST /pause does. level: must be 0. At 1 and 2 vLLM gives
        memory back, which this fleet does not do. mode: as for POST /pause."""
        if level != "0":
            raise BadRequest(f"level must be 0, is {shown(level)!r}: {KEEPS_MEMORY}", "level", "unsupported_parameter")
        await unless_left(request, self._gateway.pause(_pause_mode(mode)))
        return SleepStatus("sleeping")

    @Described("POST /wake_up", "vLLM", "Wake up", "It is so.", refusals=(400, 403))
    async def wake_up(self, tags: str | None = None) -> WakeStatus:
        """End a pause, as POST /resume does. tags: scheduling, weights or kv_cache. The pause ends in any case: no memory
        sleeps."""
        if tags is not None:
            require_one_of("tags", tags, _PARTS)
        self._gateway.go_on()
        return WakeStatus(None if tags is None else [tags])

    @Described("GET /is_sleeping", "vLLM", "Whether the fleet sleeps", "Whether it does.")
    async def is_sleeping(self) -> SleepState:
        """Whether requests wait until somebody ends a pause."""
        return SleepState(self._gateway.core.fleet.weights.is_paused)

    @Described("POST /flush_cache, GET /flush_cache", "SGLang", "Flush the prefix caches", "Who was told.")
    async def flush_cache(self) -> Flushed:
        """Have every instance forget its prefix cache: what requests shared so far is computed again. Running requests go on."""
        return Flushed(self._gateway.flush_caches())

    @Described("POST /reset_prefix_cache", "vLLM", "Reset the prefix caches", "Whether it was done.", refusals=(400, 403))
    async def reset_prefix_cache(self, reset_running_requests: str = "false", reset_external: str = "false") -> ResetAnswer:
        """Have every instance forget its prefix cache, as POST /flush_cache does. reset_running_requests: must be false, because
        running requests keep their KV. reset_external: must be false, because there are no other caches."""
        asked = {"reset_running_requests": reset_running_requests, "reset_external": reset_external}
        for name, value in asked.items():
            if _flag(name, value):
                raise BadRequest(f"{name}=true is not supported: leave it out", name, "unsupported_parameter")
        self._gateway.flush_caches()
        return ResetAnswer(True)


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    num_gpus: int
    """Ranks of all instances together: as many join a trainer's group."""
    tp_size: int
    """The same."""
    pp_size: int = 1
    dp_size: int = 1
    enable_memory_saver: bool = False
    """It gives memory back when it is told to."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    served_model_name: str
    """The name that requests use."""
    is_generation: bool = True
    """It answers with text."""
    weight_version: str
    """What people call the weights in use."""


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    num_running_reqs: int
    """Answers that instances make."""
    num_waiting_reqs: int
    """Answers that wait for an instance."""


class ServerLoads(msgspec.Struct, frozen=True, kw_only=True):
    loads: list[ServerLoad]


class ServerInfoApi(ApiPart):
    """The handlers."""

    @Described("GET /server_info, GET /get_server_info", "SGLang", "The server", "Its size.")
    async def server(self) -> ServerInfo:
        """How large the fleet is."""
        ranks = sum(len(member.info.ranks) for member in self._gateway.core.fleet.members())
        return ServerInfo(num_gpus=ranks, tp_size=ranks)

    @Described("GET /model_info, GET /get_model_info", "SGLang", "The model", "Its name and weights.")
    async def model(self) -> ModelInfo:
        """What is served."""
        return ModelInfo(served_model_name=self._model, weight_version=self._gateway.core.fleet.weights.version)

    @Described("GET /version", "vLLM", "The version", "Tandem's.")
    async def version(self) -> dict[str, str]:
        """Which release this router is of."""
        return {"version": await asyncio.to_thread(own_version)}

    @Described("GET /load", "vLLM", "Load", "The load of this router.")
    async def open_answers(self) -> dict[str, int]:
        """How many answers this router has open."""
        return {"server_load": sum(self._answers())}

    @Described("GET /get_load", "SGLang", "Load", "The load of this router.")
    async def rank_loads(self) -> list[dict[str, int]]:
        """How many answers this router has open, as older clients ask for it."""
        running, waiting = self._answers()
        return [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting}]

    @Described("GET /v1/loads", "SGLang", "Load", "The load of this router.", refusals=(400,))
    async def loads(self, include: str = "core") -> ServerLoads:
        """How many answers this router has open. include: must be core."""
        require_one_of("include", include, ("core",))
        running, waiting = self._answers()
        return ServerLoads(loads=[ServerLoad(num_running_reqs=running, num_waiting_reqs=waiting)])

    def _answers(self) -> tuple[int, int]:
        """How many run, and how many wait for an instance."""
        records = list(self._gateway.core.requests.records())
        running = sum(record.attempt is not None for record in records)
        return running, len(records) - running
