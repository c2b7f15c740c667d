"""Endpoints of vLLM and SGLang that a trainer may ask for and this fleet does not have, each with the reason and what to do.

Owns that table. Without it the answer would be 404 as for any unknown URL, which says neither.
"""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import BadRequest

KEEPS_MEMORY = (
    "peers write into an instance's KV by its address, and its graphs read the weights by theirs, so no memory is given back "
    "while the fleet runs: give the trainer devices of its own, and use POST /pause_generation or POST /sleep?level=0 to pause"
)
_TRANSFER = (
    "vLLM's own groups (StatelessProcessGroup with PyNccl, or CUDA's handles) are not joined: use POST "
    "/init_weights_update_group, which joins groups of torch.distributed, or POST /update_weights_from_disk"
)
_HANDLES = "pickles and handles of devices are not read, because they can make the reader do anything: "
REFUSED = {
    "/release_memory_occupation": ("tags", KEEPS_MEMORY),
    "/resume_memory_occupation": ("tags", KEEPS_MEMORY),
    "/release_kv_cache_memory": (None, KEEPS_MEMORY),
    "/init_weight_transfer_engine": ("init_info", _TRANSFER),
    "/start_weight_update": (None, _TRANSFER),
    "/update_weights": ("update_info", _TRANSFER),
    "/finish_weight_update": (None, _TRANSFER),
    "/shutdown_weight_transfer_engine": (None, _TRANSFER),
    "/update_weights_from_ipc": ("zmq_handles", f"{_HANDLES}use POST /update_weights_from_tensor with shared_memory"),
    "/load_lora_adapter_from_tensors": (
        "serialized_named_tensors",
        f"{_HANDLES}write the adapter with PEFT's save_pretrained, and use POST /load_lora_adapter with load_inplace",
    ),
}
"""By path: the field that asks for what there is not, None where there is no such field; and why it is refused."""


def refused_routes() -> list[Route]:
    return [Route(path, _refusing(path, field, why), methods=["POST"]) for path, (field, why) in REFUSED.items()]


def _refusing(path: str, field: str | None, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise BadRequest(f"POST {path}{f', {field}' if field else ''}: {why}", field, "unsupported_endpoint")

    return refuse
