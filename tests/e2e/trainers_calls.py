"""What trainers send, word for word: the statuses and the fields that each client reads.

Owns the table. The bodies are those that these clients make with their own defaults: slime 624b824a
(slime/backends/sglang_utils/sglang_engine.py, server_control.py, external.py), verl 0.9.1
(verl/workers/rollout/sglang_rollout/http_server_engine.py), SGLang 0.5.23 (sglang/srt/entrypoints/http_server_engine.py) and vLLM
0.33.0 (vllm/distributed/weight_transfer/clients.py, vllm/entrypoints/rl/online/api_router.py). OpenRLHF asks no server by HTTP.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PICKLE = "gASVBAAAAAAAAABdlGEu"
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 4,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a client, and what it needs of the answer."""

    client: str
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    """What it sends as JSON; None: no body."""
    status: int = 200
    reads: Mapping[str, Any] = field(default_factory=dict)
    """The fields that it reads, or that its server's answer has, and their values."""
    refused: str = ""
    """The field by whose name it is refused."""

    def __str__(self) -> str:
        return f"{self.client} {self.path} {'' if self.body is None else json.dumps(self.body)[:60]}"


def slime(method: str, path: str, body: Mapping[str, Any] | None = None, **expected: Any) -> Call:
    return Call("slime", method, path, body, **expected)


def verl(method: str, path: str, body: Mapping[str, Any] | None = None, **expected: Any) -> Call:
    return Call("verl", method, path, body, **expected)


def sglang(method: str, path: str, body: Mapping[str, Any] | None = None, **expected: Any) -> Call:
    return Call("SGLang", method, path, body, **expected)


def vllm(method: str, path: str, body: Mapping[str, Any] | None = None, **expected: Any) -> Call:
    return Call("vLLM", method, path, body, **expected)


PAUSED = {"status": "ok", "message": "Generation paused successfully."}
CONTINUED = {"status": "ok", "message": "Generation continued successfully."}
PICKLES = {"status": 400, "refused": "serialized_named_tensors"}
UPDATE = {"success": True, "num_paused_requests": 0}
TRANSFER = {"master_address": "10.0.0.1", "master_port": 40001, "rank_offset": 1, "world_size": 3}
ROUNDS = {
    "a round of slime with weights on disk": (
        slime("GET", "/health_generate"),
        slime("GET", "/server_info", reads={"num_gpus": 2, "tp_size": 2, "pp_size": 1, "enable_memory_saver": False}),
        slime("GET", "/get_server_info", reads={"num_gpus": 2}),
        slime("POST", "/pause_generation", {}, reads=PAUSED),
        slime("GET", "/flush_cache"),
        slime("GET", "/health_generate"),
        slime(
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/checkpoints/weight_v000001", "weight_version": "1"},
            reads=UPDATE,
        ),
        slime("GET", "/get_weight_version", reads={"weight_version": "1"}),
        slime("POST", "/continue_generation", {}, reads=CONTINUED),
        slime("POST", "/generate", {"sampling_params": SAMPLING, "return_logprob": True, "input_ids": [5, 6, 7]}),
    ),
    "all that SGLang's own bodies hold": (
        sglang("POST", "/pause_generation", {"mode": "retract"}, reads=PAUSED),
        sglang("POST", "/flush_cache", {}),
        sglang(
            "POST",
            "/update_weights_from_disk",
            {
                "model_path": "/checkpoints/weight_v000002",
                "load_format": None,
                "abort_all_requests": False,
                "weight_version": "2",
                "is_async": False,
                "torch_empty_cache": False,
                "keep_pause": False,
                "recapture_cuda_graph": False,
                "token_step": 0,
                "flush_cache": True,
                "manifest": None,
            },
            reads=UPDATE,
        ),
        sglang("POST", "/continue_generation", {"torch_empty_cache": True}, reads=CONTINUED),
        sglang("GET", "/model_info", reads={"weight_version": "2", "is_generation": True}),
        sglang("GET", "/get_model_info", reads={"weight_version": "2"}),
        sglang("GET", "/weight_version", reads={"weight_version": "2"}),
        sglang(
            "POST",
            "/update_weight_version",
            {"new_version": "two", "abort_all_requests": True},
            reads={"success": True, "new_version": "two"},
        ),
        sglang("POST", "/pause_generation", {"mode": "in_place"}, reads=PAUSED),
        sglang("GET", "/health_generate"),
        sglang("GET", "/flush_cache"),
        sglang("POST", "/continue_generation", {}, reads=CONTINUED),
    ),
    "pauses as vLLM has them": (
        vllm("POST", "/update_weight_version", {"new_version": "3"}, reads={"success": True, "new_version": "3"}),
        vllm("GET", "/weight_info", reads={"weight_version": "3"}),
        vllm("POST", "/pause?mode=abort&clear_cache=true", reads={"status": "paused"}),
        vllm("GET", "/is_paused", reads={"is_paused": True}),
        vllm("POST", "/reset_prefix_cache", reads={"success": True}),
        vllm("POST", "/resume", reads={"status": "resumed"}),
        vllm("GET", "/is_paused", reads={"is_paused": False}),
        vllm("POST", "/pause?mode=keep", reads={"status": "paused"}),
        vllm("POST", "/resume", reads={"status": "resumed"}),
        vllm("POST", "/pause?mode=wait", reads={"status": "paused"}),
        vllm("POST", "/resume", reads={"status": "resumed"}),
        vllm("POST", "/pause?wait_for_inflight_requests=false&clear_cache=true", reads={"status": "paused"}),
        vllm("POST", "/resume", reads={"status": "resumed"}),
        vllm("POST", "/resume", reads={"status": "resumed"}),
        vllm("POST", "/reset_prefix_cache?reset_running_requests=false&reset_external=false", reads={"success": True}),
        vllm("POST", "/sleep?level=0&mode=wait", reads={"status": "sleeping", "level": 0}),
        vllm("GET", "/is_sleeping", reads={"is_sleeping": True}),
        vllm("POST", "/wake_up?tags=scheduling", reads={"status": "awake", "tags": ["scheduling"]}),
        vllm("GET", "/is_sleeping", reads={"is_sleeping": False}),
        vllm("POST", "/wake_up", reads={"status": "awake", "tags": None}),
    ),
    "requests that are ended": (
        vllm("POST", "/abort_requests", {}, reads={"status": "aborted", "aborted": 0}),
        vllm("POST", "/abort_requests", {"request_ids": ["cmpl-1"]}, reads={"status": "aborted", "aborted": 0}),
        slime("POST", "/abort_request", {"abort_all": True}, reads={"aborted": 0}),
        slime("GET", "/v1/loads?include=core", reads={"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}),
        slime("POST", "/abort_request", {"rid": "3a5d5fd2a2ac4e2a8fbc0f7a4c1b8a11"}, reads={"aborted": 0}),
        verl("POST", "/abort_request", {"rid": "", "abort_all": True}, reads={"aborted": 0}),
        verl("GET", "/flush_cache"),
        verl("GET", "/v1/models", reads={"object": "list"}),
        verl("POST", "/abort_request", {"rid": "", "abort_all": False}, status=400, refused="rid"),
    ),
    "tensors that are pickled": (
        slime(
            "POST",
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [PICKLE, PICKLE],
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": "3",
            },
            **PICKLES,
        ),
        verl(
            "POST",
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [PICKLE], "load_format": None, "flush_cache": False},
            **PICKLES,
        ),
        verl(
            "POST",
            "/load_lora_adapter_from_tensors",
            {"lora_name": "actor", "config_dict": {"r": 8}, "serialized_named_tensors": [PICKLE]},
            **PICKLES,
        ),
        sglang(
            "POST",
            "/update_weights_from_ipc",
            {"zmq_handles": {"GPU-1": "ipc:///tmp/x"}, "flush_cache": True, "weight_version": None},
            status=400,
            refused="zmq_handles",
        ),
    ),
    "fields that ask for what there is not": (
        sglang(
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/checkpoints/x", "load_format": "dummy"},
            status=400,
            refused="load_format",
        ),
        sglang(
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/checkpoints/x", "is_async": True},
            status=400,
            refused="is_async",
        ),
        sglang(
            "POST",
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [], "shared_memory": ["a"], "selector": "draft"},
            status=400,
            refused="selector",
        ),
        vllm("POST", "/reset_prefix_cache?reset_running_requests=true", status=400, refused="reset_running_requests"),
        vllm("POST", "/pause?mode=later", status=400, refused="mode"),
        sglang("GET", "/v1/loads?include=all", status=400, refused="include"),
        vllm("GET", "/is_paused", reads={"is_paused": False}),
    ),
    "memory that is given back": (
        slime("POST", "/release_memory_occupation", {}, status=400, refused="tags"),
        slime("POST", "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}, status=400, refused="tags"),
        verl("POST", "/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, status=400, refused="tags"),
        verl("POST", "/resume_memory_occupation", {"tags": None}, status=400, refused="tags"),
        vllm("POST", "/sleep", status=400, refused="level"),
        vllm("POST", "/sleep?level=2&mode=keep", status=400, refused="level"),
        vllm("POST", "/sleep?level=0&mode=later", status=400, refused="mode"),
        vllm("POST", "/wake_up?tags=everything", status=400, refused="tags"),
        vllm("POST", "/release_kv_cache_memory", status=400),
        vllm("GET", "/is_sleeping", reads={"is_sleeping": False}),
    ),
    "groups of vLLM": (
        vllm("POST", "/init_weight_transfer_engine", {"init_info": TRANSFER}, status=400, refused="init_info"),
        vllm("POST", "/start_weight_update", status=400),
        vllm(
            "POST",
            "/update_weights",
            {"update_info": {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 2]]}},
            status=400,
            refused="update_info",
        ),
        vllm("POST", "/finish_weight_update", {"weight_version": "4"}, status=400),
        vllm("POST", "/shutdown_weight_transfer_engine", status=400),
    ),
}
