"""What SGLang's clients ask a server before and while they train: its size, its load, and the weights that it serves.

Owns these answers. The fleet looks like one server, as many ranks large as its instances together. Readers: slime's
slime/backends/sglang_utils/external.py and server_control.py at https://github.com/THUDM/slime; fields:
python/sglang/srt/entrypoints/http_server.py and v1_loads.py at https://github.com/sgl-project/sglang.
"""

import asyncio
from typing import Annotated

import msgspec
from fastapi import Query

from common import own_version
from router.api.description import ApiPart, Described
from router.api.errors import require_one_of


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
    async def loads(self, include: Annotated[str, Query(description="Must be core.")] = "core") -> ServerLoads:
        """How many answers this router has open."""
        require_one_of("include", include, ("core",))
        running, waiting = self._answers()
        return ServerLoads(loads=[ServerLoad(num_running_reqs=running, num_waiting_reqs=waiting)])

    def _answers(self) -> tuple[int, int]:
        """How many run, and how many wait for an instance."""
        records = list(self._gateway.core.requests.records())
        running = sum(record.attempt is not None for record in records)
        return running, len(records) - running
