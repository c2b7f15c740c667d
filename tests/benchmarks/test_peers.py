"""A model of random weights with requests for it, and OpenVINO behind HTTP, with a double in place of its library."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.options import LoadOptions, ResultOptions, ServeOptions, TargetOptions, WorkloadOptions
from bench.serve import measure
from benchmarks.random_model import write_checkpoint, write_requests
from common.addresses import LOOPBACK, free_port
from tests.launch.waiting import wait_for

LIBRARY = """
class ContinuousBatchingPipeline:
    '''Each step gives each request two tokens, or what is left. The answers of two requests grow at once.'''
    def __init__(self, model, scheduler, device, properties):
        assert (model, scheduler.cache_size, scheduler.max_num_seqs, device, properties) == ("MODEL", 3, 8, "CPU", {"A": 1})
        self.handles = []
    def add_request(self, number, ids, config):
        self.handles.append(Handle(config["max_new_tokens"]))
        return self.handles[-1]
    def step(self):
        for handle in self.handles:
            handle.ready, handle.left = min(2, handle.left), max(0, handle.left - 2)
class Handle:
    def __init__(self, left):
        self.left, self.ready = left, 0
    def can_read(self):
        return self.ready > 0
    def read(self):
        tokens, self.ready = [7] * self.ready, 0
        return {0: type("Output", (), {"generated_ids": tokens})}
SchedulerConfig, GenerationConfig = type("SchedulerConfig", (), {}), dict
"""


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def test_engines_that_read_the_checkpoint_get_a_text_for_each_id_and_requests_of_its_vocabulary(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size == 512 and len({tokenizer.decode([token]) for token in range(256, 512)}) == 256
    write_requests(tmp_path / "requests.jsonl", "tiny", 5)
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(requests) == 5 and all(max(each["prompt"]) < 512 and 64 <= each["output_tokens"] <= 128 for each in requests)


@pytest.mark.parametrize("at_once", [1, 8])
def test_openvino_answers_many_at_once_with_the_tokens_that_were_asked_for(tmp_path: Path, at_once: int) -> None:
    (tmp_path / "openvino_genai.py").write_text(LIBRARY)
    (tmp_path / "openvino.py").write_text("Tensor = list\n")
    script, port = Path("benchmarks/openvino_server.py").read_text(), free_port(LOOPBACK)
    (tmp_path / "server.py").write_text(script)
    load = tmp_path / "requests.jsonl"
    load.write_text("".join(json.dumps({"prompt": [1, 2, 3], "output_tokens": 3 + n % 4}) + "\n" for n in range(8)))
    asked = ServeOptions(
        target=TargetOptions(base_url=f"http://{LOOPBACK}:{port}", model="any"),
        workload=WorkloadOptions(dataset_name="custom", dataset_path=str(load)),
        load=LoadOptions(ignore_eos="on", max_concurrency=at_once),
        results=ResultOptions(),
    )
    with subprocess.Popen([sys.executable, str(tmp_path / "server.py"), "MODEL", str(port), "8", "3", '{"A": 1}']) as server:
        try:
            wait_for(lambda: listens(port), "the server listens")
            figures = measure(asked).figures
        finally:
            server.kill()
    assert (figures["completed"], figures["total_output_tokens"], figures["total_input_tokens"]) == (8, 36, 24)
    assert figures["max_concurrent_requests"] == at_once
