"""Endpoints of other servers that clients may ask for and this fleet does not have, each with the reason or with what to do.

Owns these tables. Without them the answer would be 404 as for any unknown URL, which says neither.
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


_NO_HEAD = (
    "checkpoints with a classification head are not served: use POST /v1/score with query, items and label_token_ids, which "
    "gives the probabilities of tokens that name the classes"
)
UNSERVED = {"/classify": ("input", _NO_HEAD), "/v1/classify": ("input", _NO_HEAD)}
"""The same, for those who use a model: they need an API key."""
_TEXT_ONLY = "texts are all that is read and written here"
_STARTED_SO = "it is a flag of `launch`, and does not change while the fleet runs"
HINTS = {
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), _TEXT_ONLY),
    **dict.fromkeys(("/v1/assistants", "/v1/threads"), "use POST /v1/responses"),
    "/v1/moderations": "use POST /v1/score with the tokens that name your classes as label_token_ids",
    "/generative_scoring": "use POST /v1/score",
    "/inference/v1/generate": "use POST /generate with input_ids",
    "/vertex_generate": "use POST /generate",
    **dict.fromkeys(("/v1/chat/completions/render", "/v1/completions/render"), "use POST /tokenize, with messages or prompt"),
    "/api/chat": "use POST /v1/chat/completions",
    "/api/generate": "use POST /v1/completions",
    **dict.fromkeys(("/api/embed", "/api/embeddings"), "use POST /v1/embeddings"),
    **dict.fromkeys(("/api/tags", "/api/show", "/api/ps"), "use GET /v1/models"),
    "/api/version": "use GET /version",
    **dict.fromkeys(("/start_profile", "/stop_profile"), "use POST /cluster/trace?seconds=10, then GET /cluster/trace"),
    **dict.fromkeys(("/parse_function_call", "/separate_reasoning"), "use POST /v1/chat/completions, which does it"),
    **dict.fromkeys(("/open_session", "/close_session"), "requests that begin with the same tokens share their KV without it"),
    **dict.fromkeys(("/set_internal_state", "/configure_logging", "/slow_down", "/collective_rpc"), _STARTED_SO),
    "/get_internal_state": "use GET /cluster",
    "/scale_elastic_ep": "use POST /cluster/instances",
    "/health_scheduler": "use GET /ready",
    "/reset_mm_cache": "use POST /reset_prefix_cache",
    "/redoc": "use GET /docs",
}
"""By path, what a 404 says of it and of all that is below it."""


def hint_at(path: str) -> str:
    """What a client may use in place of an unknown URL."""
    return next((hint for known, hint in HINTS.items() if f"{path}/".startswith(f"{known}/")), "/docs lists what there is")


def refused_routes() -> list[Route]:
    refused = {**REFUSED, **UNSERVED}.items()
    return [Route(path, _refusing(path, field, why), methods=["POST"]) for path, (field, why) in refused]


def _refusing(path: str, field: str | None, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise BadRequest(f"POST {path}{f', {field}' if field else ''}: {why}", field, "unsupported_endpoint")

    return refuse
