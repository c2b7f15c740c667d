"""A fleet of processes whose weights change under load, as a trainer asks by HTTP: each token is that of transformers with the
weights from which its answer says that it came.

    python -m pytest tests/e2e/test_weight_updates.py --soak      # 1,000 changes in fleets of two and two, also with ranks
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from demo.evaluate import MODEL
from tests.e2e.test_token_exact import LLAMA, Reference
from tests.rig.pages import RunningFleet, running_fleet, until

STREAMS = 4
FIRST = "default"


class Checkpoints:
    """The same model after several steps of training: on disk, and a part of each in shared memory."""

    def __init__(self, folder: Path, config: LlamaConfig, count: int) -> None:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).eval()
        self.folders: list[Path] = []
        self.references: list[Reference] = []
        self.segments: list[Path] = []
        for number in range(count):
            path = folder / f"step-{number}"
            AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
            with torch.no_grad():
                for parameter in model.parameters() if number else ():
                    parameter.mul_(0.8).add_(0.1 * parameter.std() * torch.randn_like(parameter))
            model.save_pretrained(path)
            self.folders.append(path)
            self.references.append(Reference.load(path))
            self.segments.append(Path("/dev/shm") / f"tandem-{uuid4().hex}")
            save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, self.segments[-1])

    def close(self) -> None:
        for segment in self.segments:
            segment.unlink()


class Load:
    """Some clients, each with one request after the other, until it is told to stop."""

    def __init__(self, fleet: RunningFleet, seed: int) -> None:
        self._fleet, self._random = fleet, Random(seed)
        self.answers: list[tuple[list[int], dict[str, Any]]] = []
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(Random(seed + n),)) for n in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def wait_for_another_answer(self) -> None:
        answered = len(self.answers)
        until(lambda: len(self.answers) > answered or self.errors, "another answer")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120.0)

    def _ask(self, random: Random) -> None:
        while not self._stop.is_set():
            prompt = [random.randrange(300, 2000) for _ in range(random.choice((5, 60, 200)))]
            sampling = {"temperature": 0, "max_new_tokens": random.choice((8, 32, 64)), "ignore_eos": True}
            reply = self._fleet.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
            if reply.status == 200:
                self.answers.append((prompt, reply.json()))
            else:
                self.errors.append(reply.text)


def check(answers: list[tuple[list[int], dict[str, Any]]], references: dict[str, Reference]) -> int:
    """Returns how many answers came from several weights."""
    mixed = 0
    for prompt, answer in answers:
        tokens, spans = answer["output_ids"], answer["meta_info"]["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(tokens) and answer["meta_info"]["weight_version"] == spans[-1]["version"]
        for span in spans:
            begin, end = span["start"], span["end"]
            assert tokens[begin:end] == references[span["version"]].greedy([*prompt, *tokens[:begin]], tokens[begin:end])
        mixed += len(spans) > 1
    return mixed


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path_factory.mktemp("checkpoints"), LLAMA, 3)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        pytest.param(9, (), id="one and one"),
        pytest.param(500, ("--prefill", "2", "--decode", "2"), marks=pytest.mark.soak, id="two and two"),
        pytest.param(500, ("--tp", "2"), marks=pytest.mark.soak, id="ranks"),
    ],
)
def test_every_token_is_that_of_the_weights_that_its_answer_names(
    checkpoints: Checkpoints, changes: int, flags: tuple[str, ...]
) -> None:
    random, references = Random(changes), {FIRST: checkpoints.references[0]}
    common = ("--model", str(checkpoints.folders[0]), "--dtype", "float32", "--grammar", "off", "--dead-after-s", "60")
    with running_fleet(*common, *flags) as fleet, ExitStack() as stack:
        load = Load(fleet, seed=changes)
        stack.callback(load.stop)
        for number in range(changes):
            load.wait_for_another_answer()
            chosen, version = random.randrange(len(checkpoints.folders)), f"v{number}"
            references[version] = checkpoints.references[chosen]
            body: dict[str, Any] = {"weight_version": version, "mode": ("recompute", "recompute", "finish")[number % 3]}
            if number % 2:
                reply = fleet.post("/update_weights_from_tensor", {**body, "shared_memory": [checkpoints.segments[chosen].name]})
            else:
                reply = fleet.post("/update_weights_from_disk", {**body, "model_path": str(checkpoints.folders[chosen])})
            assert reply.status == 200, reply.text
            assert reply.json()["weight_version"] == version and reply.json()["success"]
        refused = fleet.post("/update_weights_from_disk", {"model_path": "/no/such/folder"})
        assert refused.status == 400 and "there is no folder" in refused.text
        assert fleet.get("/weight_info").json()["weight_version"] == f"v{changes - 1}"
        load.stop()
        assert not load.errors, load.errors[:3]
        fleet.wait_until_home()
    assert len(load.answers) >= changes
    assert check(load.answers, references) > 0, "no answer met a change"
