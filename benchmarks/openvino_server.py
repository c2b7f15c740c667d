"""OpenVINO GenAI's continuous batching as a server of POST /v1/completions, so that `launch bench compare` can ask it.

    openvino_server.py MODEL PORT ROWS KV_GIB PROPERTIES      PROPERTIES: those of the device, as JSON

Owns the loop that its own server has too: add what is asked, step, send what each request has got. Prompts are token ids, and
every answer has the length that was asked for. It runs in OpenVINO's own environment, so it imports nothing of Tandem. Events are
written between two steps by the thread that steps: no token wakes another thread.
"""

import itertools
import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openvino
import openvino_genai


class CompletionHandler(BaseHTTPRequestHandler):
    """A connection, whose thread waits while the main thread answers."""

    protocol_version = "HTTP/1.1"
    asked: "queue.SimpleQueue[CompletionHandler]" = queue.SimpleQueue()
    """Requests that the main thread has not taken yet."""
    body: dict[str, Any]
    over: threading.Event
    answer_tokens: int

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.over, self.answer_tokens = threading.Event(), 0
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.asked.put(self)
        self.over.wait()

    def add(self, tokens: int) -> bool:
        """Send an event with so many more tokens. Returns whether the answer is whole."""
        self.answer_tokens += tokens
        usage = {"prompt_tokens": len(self.body["prompt"]), "completion_tokens": self.answer_tokens}
        event = b"data: %b\n\n" % json.dumps({"choices": [{"text": "."}], "usage": usage}).encode()
        is_whole = self.answer_tokens >= int(self.body["max_tokens"])
        event += b"data: [DONE]\n\n" if is_whole else b""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event) + (b"0\r\n\r\n" if is_whole else b""))
        if is_whole:
            self.over.set()
        return is_whole

    def log_message(self, *_: object) -> None:
        """Requests are not worth a line."""


def serve(model: str, port: int, rows: int, kv_gib: int, properties: dict[str, Any]) -> None:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = kv_gib, rows, False
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    server = ThreadingHTTPServer(("127.0.0.1", port), CompletionHandler)
    server.socket.listen(rows)  # all requests come at once
    threading.Thread(target=server.serve_forever, daemon=True).start()
    numbers, running = itertools.count(), list[tuple[CompletionHandler, Any]]()
    while True:
        while not running or not CompletionHandler.asked.empty():
            request = CompletionHandler.asked.get()
            config = openvino_genai.GenerationConfig(
                max_new_tokens=request.body["max_tokens"], ignore_eos=True, do_sample=False, apply_chat_template=False
            )
            ids = openvino.Tensor(np.array([request.body["prompt"]], dtype=np.int64))
            running.append((request, pipeline.add_request(next(numbers), ids, config)))
        pipeline.step()
        for request, handle in list(running):
            tokens = 0
            while handle.can_read():
                tokens += sum(len(output.generated_ids) for output in handle.read().values())
            if tokens and request.add(tokens):
                running.remove((request, handle))


if __name__ == "__main__":
    model, port, rows, kv_gib, properties = sys.argv[1:]
    serve(model, int(port), int(rows), int(kv_gib), json.loads(properties))
