"""SGLang's server with a scheduler that computes nothing and whose steps last a given time, for `tests.soak.fronts`.

`PYTHON sglang_timed.py --model-path MODEL ...`, in an environment that has SGLang. STEP_COST_S as in `vllm_timed.py`. Its HTTP
server, tokenizer and detokenizer are its own; they get what its scheduler sends for each token.
"""

import os
import sys
import time
from array import array
from importlib import import_module
from typing import Any

import msgspec
import zmq

TOKEN = 536
ZEROS = {"image_tokens", "audio_tokens", "video_tokens", "retraction_counts", "reasoning_tokens", "cached_tokens"}
"""Fields of an output that the server reads of every request."""


class Running:
    """A request that gets its next token in each step."""

    def __init__(self, asked: Any) -> None:
        self.asked, self.tokens = asked, 0

    @property
    def is_done(self) -> bool:
        return bool(self.tokens >= self.asked.sampling_params.max_new_tokens)


def schedule(server_args: Any, ports: Any, gpu: int, tp: int, pp: int, dp: int | None, pipe: Any, *more: object) -> None:
    io, sockets = import_module("sglang.srt.managers.io_struct"), import_module("sglang.srt.utils.network")
    step_s, _, row_s = map(float, os.environ["STEP_COST_S"].split(","))
    context = zmq.Context(2)
    inbox = sockets.get_zmq_socket(context, zmq.PULL, ports.scheduler_input_ipc_name, False)
    outbox = sockets.get_zmq_socket(context, zmq.PUSH, ports.detokenizer_ipc_name, False)
    start = {"status": "ready", "max_total_num_tokens": 10**8, "max_req_input_len": 4000, "startup_time": 0.0}
    pipe.send(start | {"hicache_object_layout": None})
    running: dict[str, Running] = {}
    while True:
        while not running or inbox.poll(0):
            take(running, io.sock_recv(inbox))
        due_s = time.perf_counter() + step_s + row_s * len(running)
        for each in running.values():
            each.tokens += 1
        message = output(io.BatchTokenIDOutput, running)
        for name in [name for name, each in running.items() if each.is_done]:
            del running[name]
        time.sleep(max(0.0, due_s - time.perf_counter()))
        io.sock_send(outbox, message)


def take(running: dict[str, Running], message: Any) -> None:
    kind = type(message).__name__
    if kind == "TokenizedGenerateReqInput":
        running[message.rid] = Running(message)
    elif kind == "BatchTokenizedGenerateReqInput":
        for each in message.reqs:
            take(running, each)
    elif kind == "AbortReq":
        running.pop(message.rid, None)


def output(kind: type[Any], running: dict[str, Running]) -> Any:
    """One token of each. The detokenizer needs one of the prompt before an answer's first."""
    each, rows = list(running.values()), len(running)
    fields: dict[str, Any] = {
        field.name: [0] * rows if field.name in ZEROS else None for field in msgspec.structs.fields(kind) if field.required
    }
    fields |= {name: [0] * rows for name in ZEROS} | {
        "rids": list(running),
        "http_worker_ipcs": [None] * rows,
        "finished_reasons": [{"type": "length", "length": one.tokens} if one.is_done else None for one in each],
        "decoded_texts": [""] * rows,
        "decode_ids": [array("q", [TOKEN] * (1 + (one.tokens == 1))) for one in each],
        "read_offsets": [1] * rows,
        "output_ids": [array("q", [TOKEN]) for _ in each],
        "skip_special_tokens": [True] * rows,
        "spaces_between_special_tokens": [True] * rows,
        "no_stop_trim": [False] * rows,
        "prompt_tokens": [len(one.asked.input_ids) for one in each],
        "completion_tokens": [one.tokens for one in each],
        "spec_verify_ct": [0] * rows,
        "spec_num_correct_drafts": [0] * rows,
    }
    return kind(**fields)


if __name__ == "__main__":
    flags = import_module("sglang.srt.server_args").prepare_server_args(sys.argv[1:])
    import_module("sglang.srt.entrypoints.http_server").launch_server(flags, run_scheduler_process_func=schedule)
